"""A folder of checkpoints on storage that all ranks share. Rank 0 alone changes it; no name in it is ever incomplete.

    step-00000100/       complete: PyTorch's files (`.metadata`, `__0_0.distcp`, ...) and ours, `atoll.json` and
                         `SHA256SUMS`, the digests of all others
    step-00000200.tmp/   being written; after a crash: a leftover
    step-00000100.old/   replaced by another of the same step
    step-00000050.gone/  being deleted
    latest               the name of the newest one

Every file is on the disk before a folder gets its final name, and the folder has that name before `latest` names it.
The next checkpoint removes the leftovers of a crash when it begins. So a folder with a final name that lacks a file, or
has other bytes than its digests say, is damaged: it is refused by name, and no older one silently replaces it.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from atoll.ground.file_digest import SUMS, read_sums, sha256_of_file, sums_text
from atoll.ground.folders import sync_folder
from atoll.parallel.checkpoint.errors import CheckpointBroken, reason
from atoll.parallel.checkpoint.reading import CONTENTS

ABOUT = "atoll.json"
LATEST = "latest"
FORMAT = 2
"""The version of `atoll.json` and of the keys in `.metadata`; a program reads its own version only."""

_NAME = re.compile(r"step-(\d{8,})")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def steps_to_keep(steps: Iterable[int], newest: int, keep: int, every: int | None) -> set[int]:
    """Return the checkpoints that stay when one of step `newest` has been written.

    These are the `keep` last ones up to it, all of a multiple of `every`, and all beyond it: the run has resumed from
    before them, and its operator decides about them.
    """
    last = sorted(step for step in steps if step <= newest)[-keep:]
    return {step for step in steps if step > newest or step in last or (every and step % every == 0)}


def is_complete(path: Path) -> bool:
    """Return whether a folder is a complete checkpoint."""
    return bool(_NAME.fullmatch(path.name)) and not _missing(path)


def _missing(path: Path) -> list[str]:
    return [name for name in (CONTENTS, ABOUT, SUMS) if not (path / name).is_file()]


def damage(path: Path, share: int = 0, num_shares: int = 1) -> list[str]:
    """List the faults of a checkpoint's files, by their names; empty: all have the bytes that were written.

    Args:
        path: the path of the checkpoint.
        share: the index of the files to read, of `num_shares` that together have all of them.
        num_shares: the number of processes that divide the reading.
    """
    try:
        read_about(path)
        digests = _sums(path)
    except CheckpointBroken as error:
        return [str(error)]
    faults = []
    for name in sorted(digests)[share::num_shares]:
        try:
            if sha256_of_file(path / name) != digests[name]:
                faults.append(f"{path / name} is damaged: its SHA-256 is not the one in {SUMS}")
        except OSError as error:
            faults.append(f"{path / name}, which {SUMS} lists, cannot be read: {error.strerror}")
    return faults


def _sums(path: Path) -> dict[str, str]:
    try:
        digests = read_sums(path)
        for name in (ABOUT, CONTENTS):
            if name not in digests:
                raise ValueError(f"it does not list {name}")
    except (OSError, ValueError) as error:
        raise CheckpointBroken(f"{path / SUMS} is damaged: {error}") from error
    return digests


def read_about(path: Path) -> dict[str, Any]:
    """Return the description of a checkpoint, from its `atoll.json`.

    Raises:
        CheckpointBroken: it does not exist, is not complete, is damaged, or of another format or step.
    """
    if not is_complete(path):
        lacks = ", ".join(_missing(path)) or f"a name like {_name(1)}"
        raise CheckpointBroken(f"{path} is not a complete checkpoint: it has no {lacks}")
    digest = _sums(path)[ABOUT]
    try:
        data = (path / ABOUT).read_bytes()
        if sha256(data).hexdigest() != digest:
            raise CheckpointBroken(f"{path / ABOUT} is damaged: its SHA-256 is not the one in {SUMS}")
        about: dict[str, Any] = json.loads(data)
        found, step = about["format"], about["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointBroken):
            raise
        raise CheckpointBroken(f"{path / ABOUT} cannot be read: {reason(error)}") from error
    if found != FORMAT:
        raise CheckpointBroken(f"{path} has format {found}, this program reads format {FORMAT}")
    if path.name != _name(step):
        raise CheckpointBroken(f"{path} has the files of another checkpoint, of step {step}")
    return about


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Protect the checkpoint from deletion during the block, if the storage has locks (flock).

    Raises:
        CheckpointBroken: it does not exist, or is just being deleted.
    """
    try:
        file = (path / ABOUT).open("rb")
    except OSError as error:
        raise CheckpointBroken(f"{path} is not a complete checkpoint: {error}") from error
    with file:
        if not (_lock(file, fcntl.LOCK_SH) and (path / ABOUT).is_file()):
            raise CheckpointBroken(f"{path} is just being deleted")
        yield


class Store:
    """The folder, as rank 0 changes it and all ranks read it."""

    def __init__(self, folder: Path, keep: int = 3, every: int | None = None) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"keep must be at least 1, and every at least 1 or none, got keep={keep}, every={every}")
        self.folder = folder
        self._keep, self._every = keep, every

    def path(self, step: int) -> Path:
        """Return the folder of a step's complete checkpoint."""
        return self.folder / _name(step)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return [step for step in self._named() if is_complete(self.path(step))]

    def latest(self) -> Path | None:
        """Return the checkpoint that was written last, also a damaged one; if deleted, the one of the highest step."""
        try:
            named = (self.folder / LATEST).read_text("utf-8").strip()
        except (OSError, ValueError):
            named = ""
        if _NAME.fullmatch(named) and (self.folder / named).is_dir():
            return self.folder / named
        steps = self._named()
        return self.path(steps[-1]) if steps else None

    def begin(self, step: int) -> Path:
        """Return an empty folder for the checkpoint of a step; remove the leftovers of a crash.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self._left_over("old"):
            if is_complete(original := old.with_suffix("")):
                shutil.rmtree(old)
            else:
                old.rename(original)
        for left in [*self._left_over("tmp"), *self._left_over("gone")]:
            shutil.rmtree(left)
        temporary = self.temporary(step)
        temporary.mkdir()
        return temporary

    def publish(self, step: int, about: dict[str, Any], digests: Mapping[str, str]) -> None:
        """Give the complete checkpoint of a step its final name, and delete the expired ones.

        Args:
            step: the step of the checkpoint, whose other files lie in `temporary`.
            about: the description of the checkpoint.
            digests: the SHA-256 of each of these files, by name.

        Raises:
            OSError: it could not be written, and has not appeared.
        """
        temporary, path = self.temporary(step), self.path(step)
        text = json.dumps({"format": FORMAT, "step": step} | about, indent=1)
        _write(temporary / ABOUT, text)
        _write(temporary / SUMS, sums_text({**digests, ABOUT: sha256(text.encode()).hexdigest()}))
        sync_folder(temporary)
        replaced = path.with_name(f"{path.name}.old")
        if path.exists():
            path.rename(replaced)
        temporary.rename(path)
        sync_folder(self.folder)
        _write(self.folder / f"{LATEST}.tmp", path.name)
        (self.folder / f"{LATEST}.tmp").replace(self.folder / LATEST)
        sync_folder(self.folder)
        if replaced.exists():
            shutil.rmtree(replaced)
        steps = self.steps()
        for old in sorted(set(steps) - steps_to_keep(steps, step, self._keep, self._every)):
            _delete(self.path(old))

    def temporary(self, step: int) -> Path:
        """Return the folder of a step's checkpoint while it is being written."""
        return self.folder / f"{self.path(step).name}.tmp"

    def _named(self) -> list[int]:
        """Return the steps of the folders with the final name of a checkpoint, ascending."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name.removeprefix("step-")) for path in found if _NAME.fullmatch(path.name))

    def _left_over(self, suffix: str) -> list[Path]:
        return [path for path in self.folder.glob(f"step-*.{suffix}") if _NAME.fullmatch(path.stem)]


def _delete(path: Path) -> None:
    """Delete a checkpoint, unless a process reads it; then the next checkpoint tries again."""
    with (path / ABOUT).open("rb") as file:
        if not _lock(file, fcntl.LOCK_EX):
            return
        gone = path.rename(path.with_name(f"{path.name}.gone"))
    shutil.rmtree(gone)


def _lock(file: BinaryIO, kind: int) -> bool:
    """Take the lock of a file; return whether no other process holds it (true on storage without locks)."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
