"""A copy of a state directory beside the coordinator that uses it, and the way back.

Files of versions and updates never change; they appear before the journal refers to them, and go after it no longer
does. So: link them (which takes no time and no room), copy the journal as of one instant, and link what has come
meanwhile. Whatever that journal refers to existed at that instant; it is among the links unless it came after the first
look and went before the second, which the check at the end finds, and then everything is done again. Only after that
are bytes copied. Nothing is asked of the coordinator, which may also be dead.

    backup.json                  what is in the backup: each file with its size, mode and SHA-256; written last
    everything else              as in the state directory, but for locks, sockets, partial uploads
"""

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from atoll import __version__
from atoll.aggregation.tensorfile import sync_folder
from atoll.server.binding import binding_of
from atoll.server.completeness import Need, RunFiles, damaged, lacking, needs_of
from atoll.server.durable import write_atomically

FORMAT = 1
CONTENTS = "backup.json"
STAGING = "backup.part"
ATTEMPTS = 20
BLOCK_BYTES = 1 << 20
LEFT_OUT = frozenset({"lock", "coordinator.json", "state.db", "state.db-wal", "state.db-shm", "backup.lock"})
FOLDERS_LEFT_OUT = frozenset({"incoming", STAGING})
KEYS = frozenset({"identity", "authority", "key.pem"})
"""Names of what proves who the coordinator is."""


class BackupFailed(OSError):
    """There is no backup, or none that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds."""

    made_at: float
    has_keys: bool
    num_bytes: int
    needs: list[Need]


@dataclass(frozen=True, slots=True)
class _Part:
    path: str
    num_bytes: int
    mode: int
    sha256: str


# ---------------------------------------------------------------- making one


def back_up(state: Path, out: Path, *, keys: bool = True) -> Backup:
    """Copy a state directory, also one in use.

    Args:
        state: the directory.
        out: a new folder, or a file if it ends in .tar; nobody but its owner may read it.
        keys: whether the coordinator's certificates and keys are in it.

    Raises:
        BackupFailed: the journal lies elsewhere, `out` exists, or no consistent copy came about.
        OSError: a file cannot be read or written.
    """
    if binding_of(state) is not None:
        raise BackupFailed(
            f"the journal of {state} is in PostgreSQL: stop the coordinator, then dump it and copy the directory, as "
            "docs/postgresql.md says"
        )
    if not (state / "state.db").is_file():
        raise BackupFailed(f"{state} is no state directory: there is no state.db in it")
    if out.exists():
        raise BackupFailed(f"{out} exists: name a new folder or .tar file")
    lock = os.open(state / "backup.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made_at, needs = _stage(state, state / STAGING, keys=keys)
        num_bytes = _write(state / STAGING, out, made_at, has_keys=keys)
    except BlockingIOError as error:
        raise BackupFailed(f"another backup of {state} is under way") from error
    finally:
        shutil.rmtree(state / STAGING, ignore_errors=True)
        os.close(lock)
    return Backup(made_at, keys, num_bytes, needs)


def _stage(state: Path, staging: Path, *, keys: bool) -> tuple[float, list[Need]]:
    """Links to everything that the journal's copy refers to, and copies of what changes in place."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        _link(state, staging)
        made_at = time.time()
        _copy_database(state / "state.db", staging / "state.db")
        _link(state, staging)
        _copy_the_rest(state, staging, keys=keys)
        needs = needs_of(staging)
        if not (missing := lacking(staging, needs)):
            _drop_what_is_younger(staging, needs)
            return made_at, needs
    raise BackupFailed(
        f"rounds end faster than their files can be listed: {missing[0].name} was gone {ATTEMPTS} times; pause the runs"
    )


def _files(folder: Path) -> Iterator[Path]:
    """Regular files, links never followed, those of locks, sockets and partial uploads left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in FOLDERS_LEFT_OUT)
        for name in sorted(names):
            path = Path(root) / name
            is_half = path.suffix in (".part", ".gone", ".new")
            if name not in LEFT_OUT and not is_half and path.is_file() and not path.is_symlink():
                yield path


def _is_immutable(path: Path) -> bool:
    return path.parent.name in ("versions", "updates")


def _link(state: Path, staging: Path) -> None:
    for path in filter(_is_immutable, _files(state)):
        link = staging / path.relative_to(state)
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, link)
        except (FileExistsError, FileNotFoundError):
            continue  # linked before, or gone: the check tells whether that matters


def _copy_database(database: Path, copy: Path) -> None:
    """As of one instant, whoever writes meanwhile."""
    source = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0)
    target = sqlite3.connect(copy)
    try:
        source.backup(target)  # in one step: one read transaction
        target.execute("PRAGMA journal_mode = DELETE")  # all in one file; whoever writes there next changes it back
    finally:
        target.close()
        source.close()


def _copy_the_rest(state: Path, staging: Path, *, keys: bool) -> None:
    for path in _files(state):
        relative = path.relative_to(state)
        if _is_immutable(path) or (not keys and KEYS.intersection(relative.parts)):
            continue
        copy = staging / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".db":
                _copy_database(path, copy)
            elif not path.name.endswith((".db-wal", ".db-shm")):
                _copy_whole_lines(path, copy)
        except FileNotFoundError:
            continue  # it was never to last


def _copy_whole_lines(path: Path, copy: Path) -> None:
    """A log is copied up to its last whole line."""
    shutil.copy2(path, copy)
    if path.suffix == ".jsonl":
        data = copy.read_bytes()
        os.truncate(copy, data.rfind(b"\n") + 1)


def _drop_what_is_younger(staging: Path, needs: list[Need]) -> None:
    """What came after the journal's instant, and what it no longer refers to."""
    for need in needs:
        files = RunFiles(staging, need.run_id)
        for folder in (files.folder, *(rank for rank in files.ranks if rank)):
            for path in (folder / "updates").glob("*.bin"):
                if path.stem not in need.updates:
                    path.unlink()
            for path in (folder / "versions").glob("*"):
                if int(path.name.partition(".")[0]) > need.version:
                    path.unlink()


# ---------------------------------------------------------------- onto the disk


def _write(staging: Path, out: Path, made_at: float, *, has_keys: bool) -> int:
    """Copy what was staged; `out` appears when all of it is on disk. Returns its size [bytes]."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.unlink(missing_ok=True)
    parts: list[_Part] = []
    with _Target(part, is_tar=out.suffix == ".tar") as target:
        for path in _files_of_backup(staging):
            parts.append(target.add(path, str(path.relative_to(staging))))
        said = {"format": FORMAT, "atoll": __version__, "made_at": made_at, "has_keys": has_keys}
        contents = staging / CONTENTS
        contents.write_text(json.dumps({**said, "files": [asdict(one) for one in parts]}, indent=1))
        contents.chmod(0o600)
        target.add(contents, CONTENTS)
    os.replace(part, out)
    sync_folder(out.parent)
    return sum(one.num_bytes for one in parts)


def _files_of_backup(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


class _Target:
    """A folder or a tar file that nobody else may read."""

    def __init__(self, path: Path, *, is_tar: bool) -> None:
        self._path, self._tar = path, None
        if is_tar:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file: IO[bytes] = os.fdopen(file, "r+b")
            self._tar = tarfile.open(fileobj=self._file, mode="w")  # noqa: SIM115 - closed at the end of the block
        else:
            path.mkdir(mode=0o700, parents=True)

    def __enter__(self) -> "_Target":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tar is not None:
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def add(self, path: Path, name: str) -> _Part:
        """Copy a file, and say what it holds."""
        stat, reader = path.stat(), _Hashing(path)
        with reader:
            if self._tar is not None:
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = stat.st_size, stat.st_mode & 0o700, int(stat.st_mtime)
                self._tar.addfile(info, reader)
            else:
                _copy(reader, self._path / name, stat.st_mode & 0o700)
        return _Part(name, stat.st_size, stat.st_mode & 0o700, reader.sha256.hexdigest())


class _Hashing:
    """A file that is being read, and the digest of what was."""

    def __init__(self, path: Path) -> None:
        self._file, self.sha256 = path.open("rb"), hashlib.sha256()

    def __enter__(self) -> "_Hashing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = BLOCK_BYTES) -> bytes:
        """The next block."""
        block = self._file.read(size)
        self.sha256.update(block)
        return block


def _copy(source: Any, path: Path, mode: int) -> str:
    """Write a file that is on disk when this returns; its SHA-256."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sha256 = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        while block := source.read(BLOCK_BYTES):
            sha256.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


# ---------------------------------------------------------------- the way back


def restore(source: Path, state: Path) -> Backup:
    """Make a state directory of a backup; it appears when everything in it was checked.

    Raises:
        BackupFailed: there is something at `state`, or the backup is damaged.
        OSError: a file cannot be read or written.
    """
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        raise BackupFailed(f"{state} is not empty: name a new directory, or move that one away")
    part = state.with_name(state.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700, parents=True)
    try:
        said = _unpack(source, part)
        (part / "runs").mkdir(exist_ok=True)
        needs = needs_of(part)
        if faults := list(damaged(part, needs)):
            raise BackupFailed(f"{source} is damaged: {'; '.join(faults[:5])}")
        if state.exists():
            state.rmdir()
        os.replace(part, state)
        sync_folder(state.absolute().parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Backup(said["made_at"], said["has_keys"], sum(one["num_bytes"] for one in said["files"]), needs)


def _unpack(source: Path, target: Path) -> dict[str, Any]:
    """Every file that the backup names, and no other; each must have the digest that is written there."""
    with _Source(source) as opened:
        try:
            with opened.open(CONTENTS) as file:
                said: dict[str, Any] = json.loads(file.read())
            parts = [_Part(**one) for one in said["files"]]
        except (KeyError, ValueError, TypeError, FileNotFoundError) as error:
            raise BackupFailed(f"{source} is no whole backup: {CONTENTS} is missing or damaged") from error
        if said.get("format") != FORMAT:
            raise BackupFailed(f"{source} has format {said.get('format')}, this Atoll knows {FORMAT}")
        for one in parts:
            path = target / one.path
            if not path.resolve().is_relative_to(target.resolve()):
                raise BackupFailed(f"{source} names {one.path}, which lies outside")
            try:
                with opened.open(one.path) as file:
                    sha256 = _copy(file, path, one.mode & 0o700)
            except (KeyError, FileNotFoundError) as error:
                raise BackupFailed(f"{source} lacks {one.path}") from error
            if sha256 != one.sha256:
                raise BackupFailed(f"{source}: {one.path} is damaged: its SHA-256 is not that of the backup")
    write_atomically(target / "restored.json", json.dumps({"from": str(source), "made_at": said["made_at"]}).encode())
    return said


class _Source:
    """A folder or a tar file to read from."""

    def __init__(self, path: Path) -> None:
        self._path, self._tar = path, None
        if not path.exists():
            raise BackupFailed(f"there is no backup at {path}")
        if path.is_file():
            try:
                self._tar = tarfile.open(path, "r:")  # noqa: SIM115 - closed at the end of the block
            except tarfile.TarError as error:
                raise BackupFailed(f"{path} is no tar file of a backup: {error}") from error

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *_: object) -> None:
        if self._tar is not None:
            self._tar.close()

    def open(self, name: str) -> IO[bytes]:
        """One regular file; KeyError or FileNotFoundError when there is none."""
        if self._tar is None:
            return (self._path / name).open("rb")
        member = self._tar.getmember(name)
        file = self._tar.extractfile(member) if member.isreg() else None
        if file is None:
            raise KeyError(name)
        return file
