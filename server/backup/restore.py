"""The restoration of a state directory from a backup: each file is checked by its digest, the journal by the files."""

import json
import os
import secrets
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from atoll.ground.durable import write_atomically
from atoll.protocol.progress import OnBytes, not_told
from atoll.server.backup.backup import CONTENTS, Backup, Hashing, beside, copy_durably, insist_outside, naming
from atoll.server.backup.contents import BackupFailed, Contents, Part, parse_contents
from atoll.server.backup.journal_copy import move_into_schema
from atoll.server.required.losses import lines_of, losses_of
from atoll.server.required.needs import needs_of

NO_TAR = (tarfile.TarError, ValueError, OverflowError)
"""Errors of reading a damaged tar file; the last two come from impossible sizes in a header."""


def restore(source: Path, state: Path, *, database: str = "", on_bytes: OnBytes = not_told) -> Backup:
    """Restore a state directory from a backup; the directory appears after all of its files have been checked.

    Args:
        source: the backup.
        state: the directory, new or empty.
        database: the URL of an empty schema in PostgreSQL for the journal; empty: a file.
        on_bytes: as in `back_up`.

    Raises:
        BackupFailed: `state` is not empty, or inside of a state directory; the schema is not empty; or the backup is
            damaged.
        OSError: a file cannot be read or written, or the database server does not answer.
    """
    target = Path(os.path.realpath(state))  # follows a link to an empty directory
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupFailed(f"{state} is not empty: name a new directory, or move that one away")
    if target == Path.cwd():
        raise BackupFailed(
            f"{state} is the current directory, which the new one would replace: name it from its parent"
        )
    insist_outside(state)
    with beside(target) as part:
        with naming(state):
            made = _checked(source, part, on_bytes)
        if database:
            move_into_schema(part / "state.db", part, database)
    return made


def verify(source: Path, *, on_bytes: OnBytes = not_told) -> Backup:
    """Check a backup as a restoration does: a tar file in a temporary folder, which needs room for its files.

    Raises:
        BackupFailed: the backup is damaged, or files that its journal relies on are missing.
        OSError: a file cannot be read or written.
    """
    if source.is_dir():
        return _paired(source, source, _read(source, on_bytes))
    with TemporaryDirectory(prefix="atoll-backup-") as folder:
        return _checked(source, Path(folder), on_bytes)


def _checked(source: Path, part: Path, on_bytes: OnBytes) -> Backup:
    """Unpack a backup, and check that journal and files match."""
    contents = _unpack(source, part, on_bytes)
    (part / "runs").mkdir(exist_ok=True)
    return _paired(source, part, contents)


def _read(source: Path, on_bytes: OnBytes) -> Contents:
    """Read a backup that is a folder, and check the digest of each of its files."""
    opened = _Folder(source)
    try:
        contents = _contents_of(opened)
        for part in contents.files:
            with opened.open(part.path) as file:
                reader, num_bytes = Hashing(file, lambda more: on_bytes(more, contents.num_bytes)), 0
                while block := reader.read():
                    num_bytes += len(block)
            _check_digest(part, num_bytes, reader.sha256.hexdigest())
    except BackupFailed as error:
        raise BackupFailed(f"{source} is not a complete backup: {error}") from error
    return contents


def _paired(source: Path, part: Path, contents: Contents) -> Backup:
    """Check that the journal and the files of a backup match."""
    needs = needs_of(part)
    if losses := losses_of(part, needs, reads="all"):
        lines = (line.replace(f"{part}{os.sep}", "") for line in lines_of(losses))
        raise BackupFailed(f"{source} is damaged: {'; '.join(lines)}")
    return Backup(contents.made_at, contents.has_keys, contents.num_bytes, needs, database=contents.database)


def _unpack(source: Path, target: Path, on_bytes: OnBytes) -> Contents:
    """Copy exactly the files that the backup's contents list, and check the digest of each."""
    with closing(_opened(source)) as opened:
        try:
            contents = _contents_of(opened)
            for part in contents.files:
                _copy(opened, part, target, lambda more: on_bytes(more, contents.num_bytes))
        except (BackupFailed, *NO_TAR) as error:
            raise BackupFailed(f"{source} is not a complete backup: {error}") from error
    note = {"id": secrets.token_hex(16), "from": str(source), "made_at": contents.made_at}
    write_atomically(target / "restored.json", json.dumps(note).encode())  # `server.hosting.restoration` reads it
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
    _check_digest(part, *found)


def _check_digest(part: Part, num_bytes: int, sha256: str) -> None:
    if (num_bytes, sha256) != (part.num_bytes, part.sha256):
        raise BackupFailed(f"{part.path} is damaged: its size and SHA-256 differ from those in {CONTENTS}")


def _opened(path: Path) -> "_Folder | _Archive":
    if not path.exists():
        raise BackupFailed(f"there is no backup at {path}")
    return _Folder(path) if path.is_dir() else _Archive(path)


class _Folder:
    """Reader of a backup that is a folder."""

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
    """Reader of a backup that is a tar file."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - `close` does
        except NO_TAR as error:
            raise BackupFailed(f"{path} is not a tar file of a backup: {error}") from error

    def open(self, name: str) -> IO[bytes]:
        """Open one regular file.

        Raises:
            BackupFailed: there is no such file.
            NO_TAR: the tar file is damaged, or is truncated.
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
