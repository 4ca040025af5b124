"""What an agent keeps from one update for the next: it becomes current with the acceptance of the update, or never.

    NAME.RUN.TASK.DIGEST.staged        made with an update whose answer is open; DIGEST is the update's
    NAME.RUN.TASK.DIGEST.safetensors   current: that update was accepted

A staged file is durable before its update can be sent, and names in its header the current files that it was made
from (`encoded.REPLACES`). Accepted: it gets its current name, which is one atomic rename, then those go. Anything else:
it goes, and they stay. Whoever is killed in between finds what to do by looking: while the update is in the spool it is
sent again and answered as before; a staged file whose update is not there was never to count; and a current file that
another one replaces is deleted.

While an answer is open, what the update was made from is not current for another one, and so counts in one of them
alone. Hence there may be several current files: of two updates that were open at once, both accepted.
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
from atoll.protocol.vocabulary import Digest, RunId

logger = logging.getLogger(__name__)

STAGED, CURRENT = ".staged", ".safetensors"

AGE_MAX_S = 90 * 86400.0
"""What no update has changed for so long is of a run that nobody goes on with."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose it is: a kind of thing, of one run and its task."""

    name: str
    run_id: RunId
    task: str

    @property
    def stem(self) -> str:
        """The beginning of its files' names, which no text from the wire can lead out of the folder."""
        return f"{self.name}.{_hashed(self.run_id)}.{_hashed(self.task)}"


class Kept:
    """The files in one folder. `stage` may run on a thread; everything else is quick.

    Args:
        folder: of the files.
        unanswered: the updates in the spool.
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
        """What the next update is made from; mostly one file, none at first, or while an answer is open."""
        claimed = {name for path in self._files(f"{owner.stem}.*{STAGED}") for name in _replaced_by(path)}
        return tuple(path for path in self._files(f"{owner.stem}.*{CURRENT}") if path.name not in claimed)

    def stage(self, owner: Owner, digest: Digest, file: Path) -> None:
        """Take over a safetensors file that becomes current when that update is accepted; on return it is durable."""
        with file.open("rb") as data:
            os.fsync(data.fileno())
        os.replace(file, self._folder / f"{owner.stem}.{digest}{STAGED}")
        self._sync()

    def settle(self, digest: Digest, *, accepted: bool) -> None:
        """The answer to an update is here: whatever was staged with it is current, or gone. Again: nothing happens."""
        for path in self._files(f"*.{digest}{STAGED}"):
            if not accepted:
                path.unlink()
                continue
            current = path.with_suffix(CURRENT)
            os.replace(path, current)
            self._sync()  # before the spool forgets the update
            self._drop_replaced(current)

    def forget(self, run_id: RunId) -> None:
        """The run is finished, and nothing of it is ever needed again."""
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
    """The names of the current files that one was made from."""
    try:
        names = json.loads(read_metadata(path).get(REPLACES, "[]"))
    except (TensorFileCorrupted, ValueError) as error:
        logger.warning("%s is damaged: %s", path, error)
        return
    for name in names:
        if Path(name).name == name != path.name:
            yield name
