"""The residuals of error feedback, which an update leaves for the next one: current once the update is accepted.

    NAME.RUN.TASK.DIGEST.staged        made with the update DIGEST, which has no answer yet
    NAME.RUN.TASK.DIGEST.safetensors   current: the update DIGEST was accepted

A staged file is durable before its update can be sent. Its header names the current files that it was made from
(`REPLACES`). When the update is accepted, one atomic rename makes the staged file current, and the files that it
replaces are deleted; otherwise the staged file is deleted and they stay. After a crash in between, the files alone tell
what to do: an update in the spool is sent again and gets the same answer; a staged file whose update is not in the
spool is deleted; so is a current file that another one replaces.

While an update has no answer, the files that it was made from are not current for another update: each residual counts
in one update only. So there may be several current files, of updates that were open at the same time.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.folders import sync_folder
from atoll.aggregation.tensors.safetensors_file import TensorFileCorrupted, read_metadata
from atoll.aggregation.updates.encoded_writer import REPLACES
from atoll.protocol.durable import move_into
from atoll.protocol.vocabulary import Digest, RunId

logger = logging.getLogger(__name__)

STAGED, CURRENT = ".staged", ".safetensors"

AGE_MAX_S = 90 * 86400.0
"""Age at which a current file is deleted when the agent starts: its run was left unfinished."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of some files: a kind of residual, a run and its task."""

    name: str
    run_id: RunId
    task: str

    @property
    def stem(self) -> str:
        """Beginning of its files' names; hashes, so that no text from the wire leads out of the folder."""
        return f"{self.name}.{_hashed(self.run_id)}.{_hashed(self.task)}"


class ResidualStore:
    """The residuals in one folder. `stage` may run on a thread; all other methods are quick.

    Args:
        folder: holds the files; those without use are deleted.
        unanswered: digests of the updates in the spool.
    """

    def __init__(self, folder: Path, unanswered: Collection[Digest] = ()) -> None:
        self._folder = folder
        oldest = time.time() - AGE_MAX_S
        for path in folder.iterdir():
            is_staged = path.suffix == STAGED and _digest_of(path) in unanswered
            is_current = path.suffix == CURRENT and path.stat().st_mtime >= oldest
            if not (is_staged or is_current):
                path.unlink()
        for path in self._files(f"*{CURRENT}"):
            self._drop_replaced(path)

    def current(self, owner: Owner) -> tuple[Path, ...]:
        """Return the files that the next update adds: mostly one; none at first, or while an update has no answer."""
        claimed = {name for path in self._files(f"{owner.stem}.*{STAGED}") for name in _replaced_by(path)}
        return tuple(path for path in self._files(f"{owner.stem}.*{CURRENT}") if path.name not in claimed)

    def stage(self, owner: Owner, digest: Digest, file: Path) -> None:
        """Stage a safetensors file with an update by moving it; durable on return."""
        with file.open("rb") as data:
            os.fsync(data.fileno())
        move_into(file, self._folder / f"{owner.stem}.{digest}{STAGED}")
        self._sync()

    def settle(self, digest: Digest, *, accepted: bool) -> None:
        """Make the files that were staged with an answered update current, or delete them. Idempotent."""
        for path in self._files(f"*.{digest}{STAGED}"):
            if not accepted:
                path.unlink()
                continue
            current = path.with_suffix(CURRENT)
            os.replace(path, current)
            self._sync()  # before the spool forgets the update
            self._drop_replaced(current)

    def forget(self, run_id: RunId) -> None:
        """Delete all files of a finished run."""
        for path in self._files(f"*.{_hashed(run_id)}.*"):
            path.unlink()

    def _files(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(pattern))

    def _drop_replaced(self, current: Path) -> None:
        for name in _replaced_by(current):
            (self._folder / name).unlink(missing_ok=True)

    def _sync(self) -> None:
        sync_folder(self._folder)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _digest_of(path: Path) -> Digest:
    return Digest(path.stem.rpartition(".")[2])


def _replaced_by(path: Path) -> Iterator[str]:
    """Yield the names of the current files that a file was made from."""
    try:
        names = json.loads(read_metadata(path).get(REPLACES, "[]"))
    except (TensorFileCorrupted, ValueError) as error:
        logger.warning("%s is damaged: %s", path, error)
        return
    for name in names:
        if Path(name).name == name != path.name:
            yield name
