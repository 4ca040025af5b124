"""The residuals of error feedback, which an update leaves for the next one: current once their update is accepted.

    NAME.RUN.TASK.DIGEST.SHA-256.staged        belongs to update DIGEST, not answered yet
    NAME.RUN.TASK.DIGEST.SHA-256.safetensors   current: update DIGEST was accepted

A staged file is durable before its update can be sent. Its header names the current files that it was made from
(`REPLACES`). When the update is accepted, one atomic rename makes the staged file current, and the files that it
replaces are deleted; otherwise the staged file is deleted. After a crash in between, the files alone determine the
recovery: an update in the spool is sent again and gets the same answer; a staged file whose update is not in the spool
is deleted; so is a current file that another file replaces.

While an update has no answer, no other update uses the files that it was made from: each residual counts in one update
only. So there may be several current files, from updates that were open at the same time.

The last part of a name is the digest of the file, which is checked before use.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.client.disk.named_digest import check_named
from atoll.ground.durable import move_into
from atoll.ground.file_digest import sha256_of_file
from atoll.ground.folders import sync_folder
from atoll.protocol.vocabulary import Digest, RunId
from atoll.tensors.safetensors_file import TensorFileCorrupted, read_metadata
from atoll.tensors.updates.encoded_writer import REPLACES

logger = logging.getLogger(__name__)

STAGED, CURRENT = ".staged", ".safetensors"

_PARTS = 5
"""Parts of a file's name, without its suffix."""

AGE_MAX_S = 90 * 86400.0
"""Age at which a current file is deleted when the agent starts: its run was left unfinished."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner of residual files: a kind of residual, a run and its task."""

    name: str
    run_id: RunId
    task: str

    @property
    def stem(self) -> str:
        """Prefix of the owner's file names; hashed, so that no string from the wire leads out of the folder."""
        return f"{self.name}.{_hashed(self.run_id)}.{_hashed(self.task)}"


class ResidualStore:
    """The residuals in one folder. `stage` and `current` may run on a thread; all other methods are quick.

    Args:
        folder: holds the files; unused ones are deleted.
        unanswered: digests of the updates in the spool.
    """

    def __init__(self, folder: Path, unanswered: Collection[Digest] = ()) -> None:
        self._folder = folder
        oldest = time.time() - AGE_MAX_S
        for path in self._files("*"):
            if path.stem.count(".") == _PARTS - 2:  # from an earlier program
                path.rename(path.with_name(f"{path.stem}.{sha256_of_file(path)}{path.suffix}"))
        for path in self._files("*"):
            is_staged = path.suffix == STAGED and _digest_of(path) in unanswered
            is_current = path.suffix == CURRENT and path.stat().st_mtime >= oldest
            if not (is_staged or is_current):
                path.unlink()
        for path in self._files(f"*{CURRENT}"):
            self._drop_replaced(path)

    def current(self, owner: Owner) -> tuple[Path, ...]:
        """Return the residual files to add to the next update: one; none at first, or while an update has no answer.

        Reads all of their bytes.

        Raises:
            StateDamaged: a file does not match its digest.
        """
        staged = self._files(f"{owner.stem}.*{STAGED}")
        claimed = {made_with for path in staged for made_with in _replaced_by(check_named(path))}
        files = self._files(f"{owner.stem}.*{CURRENT}")
        return tuple(check_named(path) for path in files if _made_with(path.name) not in claimed)

    def stage(self, owner: Owner, digest: Digest, file: Path) -> None:
        """Stage a safetensors file with an update by moving it; durable on return."""
        with file.open("rb") as data:
            os.fsync(data.fileno())
        move_into(file, self._folder / f"{owner.stem}.{digest}.{sha256_of_file(file)}{STAGED}")
        self._sync()

    def settle(self, digest: Digest, *, accepted: bool) -> None:
        """Make the files that were staged with an update current if it was accepted, else delete them. Idempotent."""
        for path in self._files(f"*.{digest}.*{STAGED}"):
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
        for made_with in _replaced_by(current):
            for path in self._files(f"{made_with}.*{CURRENT}"):
                path.unlink(missing_ok=True)

    def _sync(self) -> None:
        sync_folder(self._folder)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _digest_of(path: Path) -> Digest:
    """Return the digest of the update that a file was staged with."""
    return Digest(_made_with(path.name).rpartition(".")[2])


def _made_with(name: str) -> str:
    """Return the part NAME.RUN.TASK.DIGEST of a file's name."""
    return ".".join(name.split(".")[: _PARTS - 1])


def _replaced_by(path: Path) -> Iterator[str]:
    """Yield the prefixes NAME.RUN.TASK.DIGEST of the current files that a file was made from."""
    try:
        names = json.loads(read_metadata(path).get(REPLACES, "[]"))
    except (TensorFileCorrupted, ValueError) as error:
        logger.warning("%s is damaged: %s", path, error)
        return
    for name in names:
        if Path(name).name == name and _made_with(name) != _made_with(path.name):
            yield _made_with(name)
