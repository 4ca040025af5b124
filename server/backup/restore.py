"""The restoration of a state directory from a backup: each file is checked by its digest, the journal by the files."""

import json
import os
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

from atoll.protocol.durable import write_atomically
from atoll.protocol.progress import OnBytes, not_told
from atoll.server.backup.backup import CONTENTS, Backup, beside, copy_durably, naming
from atoll.server.backup.contents import BackupFailed, Contents, Part, parse_contents
from atoll.server.backup.required_files import damaged, needs_of

NO_TAR = (tarfile.TarError, ValueError, OverflowError)
"""Errors of reading a damaged tar file; the last two come from impossible sizes in a header."""


def restore(source: Path, state: Path, *, on_bytes: OnBytes = not_told) -> Backup:
    """Restore a state directory from a backup; the directory appears after all of its files were checked.

    Raises:
        BackupFailed: `state` is not empty, or the backup is damaged.
        OSError: a file cannot be read or written.
    """
    target = Path(os.path.realpath(state))  # follows a link to an empty directory
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupFailed(f"{state} is not empty: name a new directory, or move that one away")
    if target == Path.cwd():
        raise BackupFailed(
            f"{state} is the current directory, which a new one would replace: change to its parent, and name it there"
        )
    with beside(target) as part:
        with naming(state):
            contents = _unpack(source, part, on_bytes)
        (part / "runs").mkdir(exist_ok=True)
        needs = needs_of(part)
        if faults := list(damaged(part, needs)):
            raise BackupFailed(f"{source} is damaged: {'; '.join(faults[:5])}")
    return Backup(contents.made_at, contents.has_keys, contents.num_bytes, needs)


def _unpack(source: Path, target: Path, on_bytes: OnBytes) -> Contents:
    """Copy exactly the files that the backup's contents list, and check the digest of each."""
    with closing(_opened(source)) as opened:
        try:
            contents = _contents_of(opened)
            for part in contents.files:
                _copy(opened, part, target, lambda more: on_bytes(more, contents.num_bytes))
        except (BackupFailed, *NO_TAR) as error:
            raise BackupFailed(f"{source} is no complete backup: {error}") from error
    write_atomically(target / "restored.json", json.dumps({"from": str(source), "made_at": contents.made_at}).encode())
    return contents


def _contents_of(opened: "_Folder | _Archive") -> Contents:
    with opened.open(CONTENTS) as file:
        contents = parse_contents(file.read())
    if all(part.path != "state.db" for part in contents.files):
        raise BackupFailed("it has no state.db")
    return contents


def _copy(opened: "_Folder | _Archive", part: Part, target: Path, on_block: Callable[[int], None]) -> None:
    with opened.open(part.path) as file:
        found = copy_durably(file, target / part.path, part.mode & 0o700, on_block)
    if found != (part.num_bytes, part.sha256):
        raise BackupFailed(f"{part.path} is damaged: its size and SHA-256 differ from those in {CONTENTS}")


def _opened(path: Path) -> "_Folder | _Archive":
    if not path.exists():
        raise BackupFailed(f"there is no backup at {path}")
    return _Folder(path) if path.is_dir() else _Archive(path)


class _Folder:
    """A folder to read files from."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        """Open one regular file.

        Raises:
            BackupFailed: there is no such file.
        """
        if not (self._path / name).is_file():
            raise BackupFailed(f"{name} is missing")
        return (self._path / name).open("rb")

    def close(self) -> None:
        """Do nothing: a folder is not open."""


class _Archive:
    """A tar file to read files from."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - `close` does
        except NO_TAR as error:
            raise BackupFailed(f"{path} is no tar file of a backup: {error}") from error

    def open(self, name: str) -> IO[bytes]:
        """Open one regular file.

        Raises:
            BackupFailed: there is no such file.
            NO_TAR: the tar file is damaged, or was cut short.
        """
        try:
            member = self._tar.getmember(name)
        except KeyError as error:
            raise BackupFailed(f"{name} is missing") from error
        file = self._tar.extractfile(member) if member.isreg() else None
        if file is None:
            raise BackupFailed(f"{name} is not a regular file")
        return file

    def close(self) -> None:
        """Close the tar file."""
        self._tar.close()
