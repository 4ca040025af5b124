"""From a backup to a state directory: every file is held against its digest, and the journal against the files."""

import json
import os
import tarfile
from contextlib import closing
from pathlib import Path
from typing import IO

from atoll.protocol.durable import write_atomically
from atoll.server.backup.backup import CONTENTS, Backup, beside, copy_durably, naming
from atoll.server.backup.contents import BackupFailed, Contents, Part, parse_contents
from atoll.server.backup.required_files import damaged, needs_of

NO_TAR = (tarfile.TarError, ValueError, OverflowError)
"""What reading a damaged tar file raises; the last two, where a header names sizes that no file has."""


def restore(source: Path, state: Path) -> Backup:
    """Make a state directory of a backup; it appears when everything in it was checked.

    Raises:
        BackupFailed: there is something at `state`, or the backup is damaged.
        OSError: a file cannot be read or written.
    """
    target = Path(os.path.realpath(state))  # of a link to an empty directory: that one
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupFailed(f"{state} is not empty: name a new directory, or move that one away")
    if target == Path.cwd():
        raise BackupFailed(f"{state} is where you are, and a new directory would take its place: go up, and name it")
    with beside(target) as part:
        with naming(state):
            said = _unpack(source, part)
        (part / "runs").mkdir(exist_ok=True)
        needs = needs_of(part)
        if faults := list(damaged(part, needs)):
            raise BackupFailed(f"{source} is damaged: {'; '.join(faults[:5])}")
    return Backup(said.made_at, said.has_keys, said.num_bytes, needs)


def _unpack(source: Path, target: Path) -> Contents:
    """Every file that the backup names, and no other; each must have the digest that is written there."""
    with closing(_opened(source)) as opened:
        try:
            said = _contents_of(opened)
            for part in said.files:
                _take(opened, part, target)
        except (BackupFailed, *NO_TAR) as error:
            raise BackupFailed(f"{source} is no whole backup: {error}") from error
    write_atomically(target / "restored.json", json.dumps({"from": str(source), "made_at": said.made_at}).encode())
    return said


def _contents_of(opened: "_Folder | _Archive") -> Contents:
    with opened.open(CONTENTS) as file:
        said = parse_contents(file.read())
    if all(part.path != "state.db" for part in said.files):
        raise BackupFailed("it has no state.db")
    return said


def _take(opened: "_Folder | _Archive", part: Part, target: Path) -> None:
    with opened.open(part.path) as file:
        found = copy_durably(file, target / part.path, part.mode & 0o700)
    if found != (part.num_bytes, part.sha256):
        raise BackupFailed(f"{part.path} is damaged: its size and SHA-256 are not those that {CONTENTS} says")


def _opened(path: Path) -> "_Folder | _Archive":
    if not path.exists():
        raise BackupFailed(f"there is no backup at {path}")
    return _Folder(path) if path.is_dir() else _Archive(path)


class _Folder:
    """A folder to read files from."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        """One regular file.

        Raises:
            BackupFailed: there is none of this name.
        """
        if not (self._path / name).is_file():
            raise BackupFailed(f"{name} is missing")
        return (self._path / name).open("rb")

    def close(self) -> None:
        """Nothing is held."""


class _Archive:
    """The same for a tar file."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - `close` does
        except NO_TAR as error:
            raise BackupFailed(f"{path} is no tar file of a backup: {error}") from error

    def open(self, name: str) -> IO[bytes]:
        """One regular file.

        Raises:
            BackupFailed: there is none of this name.
            NO_TAR: the tar file is damaged, or was cut short.
        """
        try:
            member = self._tar.getmember(name)
        except KeyError as error:
            raise BackupFailed(f"{name} is missing") from error
        file = self._tar.extractfile(member) if member.isreg() else None
        if file is None:
            raise BackupFailed(f"{name} is no file")
        return file

    def close(self) -> None:
        """Let go of the file."""
        self._tar.close()
