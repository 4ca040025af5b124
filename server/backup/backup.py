"""The backup of a state directory while a coordinator uses it; `restore` reverses it.

Files of versions and updates never change. They appear before the journal refers to them, and are deleted only when it
no longer does. So a backup is staged in three steps: hard-link these files, which preserves their bytes even if they
are deleted; copy the journal as of one instant; and link the files that have appeared meanwhile. Each file that the
journal copy refers to existed at that instant. It is among the links unless it appeared after the first step and was
deleted before the third; a check at the end finds such a file, and the staging is repeated. Then bytes are copied. The
coordinator need not run, and is not involved.

    backup.json                  the contents: each file with its size, mode and SHA-256; written last
    everything else              as in the state directory, without locks, sockets, partial uploads, and files that are
                                 not the coordinator's (`contents.belongs`)
"""

import errno
import hashlib
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.ground.file_lock import Locked, lock_file
from atoll.ground.folders import sync_folder
from atoll.ground.printable import printable
from atoll.ground.version import __version__
from atoll.protocol.progress import OnBytes, not_told
from atoll.protocol.secrets import without_password
from atoll.server.backup.contents import FOLDERS, BackupFailed, Contents, Part, belongs, is_immutable, is_key
from atoll.server.backup.journal_copy import copy_journal
from atoll.server.journal.binding import has_state
from atoll.server.required.losses import Loss, lines_of, losses_of
from atoll.server.required.needs import Need, needs_of
from atoll.server.required.run_files import RunFiles

CONTENTS = "backup.json"
STAGING = "backup.part"
ATTEMPTS = 20
BLOCK_BYTES = 1 << 20
TRANSIENT = frozenset(
    {
        "lock",
        "coordinator.json",
        "clock.json",
        "conflicts.json",
        "database.json",
        "notices.json",
        "presence.json",
        "running",
        "state.db-wal",
        "state.db-shm",
        "backup.lock",
        "folder_id",
    }
)
"""Names of transient files, which are not backed up: a restored rank directory differs from the old one, and the
journal is a file, or in another schema."""
TRANSIENT_FOLDERS = frozenset({"incoming", STAGING})
TRANSIENT_SUFFIXES = (".part", ".gone", ".new")
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


def _ignore(_more: int) -> None:
    """Ignore the report about the last file, which lists all others."""


@dataclass(frozen=True, slots=True)
class Backup:
    """Result of a backup or a restoration."""

    made_at: float
    """The instant of the journal copy [s since the epoch]."""
    has_keys: bool
    num_bytes: int
    needs: list[Need]
    strangers: tuple[str, ...] = ()
    """Paths in the state directory that do not belong to the coordinator and were omitted."""
    database: str = ""
    """Name of the server's database that held the journal; empty: it was a file."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """Files of a backup that are staged in a consistent state."""

    made_at: float
    needs: list[Need]
    database: str


# ---------------------------------------------------------------- making one


def back_up(state: Path, out: Path, *, keys: bool = True, database: str = "", on_bytes: OnBytes = not_told) -> Backup:
    """Copy a state directory, even one in use.

    Args:
        state: the directory.
        out: a new folder, or a file if it ends in .tar, readable for its owner alone.
        keys: include the coordinator's certificates and keys.
        database: the URL of a journal in PostgreSQL; empty: the URL that the directory names.
        on_bytes: called with the number of bytes copied since the last call, and in total.

    Raises:
        BackupFailed: the journal is damaged, or there is no room in the directory for its copy; a file that it relies
            on is missing; `out` exists or is inside of a state directory; or `ATTEMPTS` stagings were all inconsistent.
        OSError: a file cannot be read or written, or the database server does not answer.
    """
    if database and (state / "state.db").is_file():
        raise BackupFailed(f"{state} has its journal in state.db, not in {without_password(database)}")
    if not has_state(state):
        raise BackupFailed(f"{state} is not a state directory: there is no state.db in it")
    insist_outside(out)
    _insist_new(out)
    _insist_on_files(state, keys=keys)
    is_tar = out.suffix == ".tar"
    with _alone(state), beside(out, is_file=is_tar) as part:
        _insist_new(out)  # again: another backup may have created it before this one had the lock
        with _staging(state) as staging:
            staged = _stage(state, staging, keys=keys, database=database)
            with naming(out):
                num_bytes = _write(staging, part, staged, on_bytes, has_keys=keys, is_tar=is_tar)
    strangers = tuple(printable(path) for path in _paths(state) if not belongs(path))
    return Backup(staged.made_at, keys, num_bytes, staged.needs, strangers, staged.database)


def insist_outside(place: Path) -> None:
    """Refuse a path inside of a coordinator's state directory, whose backups would omit it.

    Raises:
        BackupFailed: the path is inside of a state directory.
    """
    for folder in filter(_is_state, Path(os.path.realpath(place)).parents):
        raise BackupFailed(f"{place} is inside of {folder}, a state directory: name a place outside of it")


def _is_state(folder: Path) -> bool:
    """Return whether a folder is a state directory, and not merely contains a journal, which a link may point to."""
    try:
        return (folder / "runs").is_dir() and has_state(folder)
    except OSError:  # the database.json of another program, or one not readable by this user
        return False


def _insist_new(out: Path) -> None:
    if os.path.lexists(out):
        raise BackupFailed(f"{out} exists: name a new folder or .tar file")


def _insist_on_files(state: Path, *, keys: bool) -> None:
    """Refuse links in place of files of the backup: they are not followed, so it would lack their targets."""
    links = [path for path in _paths(state) if (state / path).is_symlink() and path != "state.db"]
    faults = [path for path in links if any(keys or not is_key(file) for file in _places(state, path))]
    if faults:
        where = [f"{state / path} is a link, which a backup does not follow" for path in faults]
        way = "replace it by its target, or mount its volume there (`mount --bind`)"
        raise BackupFailed("\n".join([*where, way]))


def _places(state: Path, link: str) -> Iterator[str]:
    """Yield the paths at which a link in a state directory may replace a file of the coordinator.

    A dangling link may point to a volume that is not mounted now.
    """
    names = ("",) if (state / link).is_file() else FOLDERS if (state / link).is_dir() else ("", *FOLDERS)
    return filter(belongs, (link + name for name in names))


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Allow only one backup of a directory at a time."""
    try:
        lock = lock_file(state / "backup.lock")
    except Locked as error:
        raise BackupFailed(f"another backup of {state} is under way") from error
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def beside(target: Path, *, is_file: bool = False) -> Iterator[Path]:
    """Create a folder or file beside a path, and rename it to that path at the end of the context.

    After an error it is removed instead. Creation is exclusive: two processes with the same target never share it, and
    an existing file is kept.

    Raises:
        BackupFailed: a file or folder of this name exists already, or the folder of the target does not exist.
    """
    part = target.with_name(target.name + ".part")
    try:
        if is_file:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        else:
            part.mkdir(mode=0o700)
    except FileExistsError as error:
        what = "left by a killed or still running backup or restore, or one of your files"
        raise BackupFailed(f"{part} exists ({what}): move it away, or name another place than {target}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BackupFailed(f"{target} cannot be created: there is no folder {target.parent}") from error
    try:
        yield part
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True) if is_file else shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(target.parent)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Add the path to an error about a full disk, which a write to an open file, unlike its opening, does not name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


@contextmanager
def _staging(state: Path) -> Iterator[Path]:
    """Yield the folder for the links, and remove it at the end; the lock of `_alone` protects it."""
    staging = state / STAGING
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _stage(state: Path, staging: Path, *, keys: bool, database: str) -> _Staged:
    """Stage a consistent backup: links to the files that the journal copy refers to, and copies of the other files.

    Raises:
        BackupFailed: a file is missing or damaged, or all `ATTEMPTS` stagings were inconsistent.
    """
    missing: list[Loss] = []
    for _ in range(ATTEMPTS):
        before = {loss.path for loss in missing}
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        _link(state, staging)
        made_at = time.time()
        name = copy_journal(state, staging / "state.db", database, lambda: _link(state, staging))
        _copy_the_rest(state, staging, keys=keys)
        needs = needs_of(staging)
        missing, torn = losses_of(staging, needs, reads="sizes"), _torn(state, staging)
        if lasting := [loss for loss in missing if loss.path in before]:  # it was not deleted: the file is still needed
            raise BackupFailed("\n".join(_as_in(state, staging, lines_of(lasting))))
        if not (missing or torn):
            _drop_unreferenced(staging, needs)
            return _Staged(made_at, needs, name)
    if torn:
        raise BackupFailed(f"certificates are renewed faster than they can be copied: {torn} changed {ATTEMPTS} times")
    raise BackupFailed(
        f"rounds end faster than their files can be listed: {missing[0].path.name} was gone in the last of {ATTEMPTS} "
        "attempts; pause the runs"
    )


def _as_in(state: Path, staging: Path, lines: list[str]) -> Iterator[str]:
    """Yield lines about staged files, with their paths in the state directory instead, and the remedy."""
    yield from (line.replace(f"{staging}{os.sep}", f"{state}{os.sep}") for line in lines)
    yield f"{state} is damaged: `atoll coordinator --check --state {state}` lists all faults"


def _torn(state: Path, staging: Path) -> str:
    """Return the first key or certificate that has changed since it was copied; empty: none.

    A changed one may not match the key or certificate that was copied before it.
    """
    for path in sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*.pem*")):
        with suppress(FileNotFoundError):
            if (state / path).read_bytes() == (staging / path).read_bytes():
                continue
        return path
    return ""


def _paths(state: Path) -> Iterator[str]:
    """Yield the paths of all files in a state directory except the transient ones; symbolic links are not followed."""
    for root, folders, names in os.walk(state):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        folders[:] = sorted(set(folders) - TRANSIENT_FOLDERS - set(links))
        for name in sorted([*names, *links]):
            path = (Path(root) / name).relative_to(state).as_posix()
            if not _is_transient(name) or _is_being_renewed(path):
                yield path


def _is_transient(name: str) -> bool:
    return name in TRANSIENT or name.endswith(TRANSIENT_SUFFIXES)


def _is_being_renewed(path: str) -> bool:
    """Return whether the file may belong to an unfinished credential replacement, which the next process completes."""
    return path.endswith(".pem.new") and is_key(path)


def _files(state: Path) -> Iterator[str]:
    """Yield the paths of the coordinator's regular files."""
    for path in filter(belongs, _paths(state)):
        if (state / path).is_file() and not (state / path).is_symlink():
            yield path


def _link(state: Path, staging: Path) -> None:
    for path in filter(is_immutable, _files(state)):
        link = staging / path
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            _link_or_copy(state / path, link)
        except (FileExistsError, FileNotFoundError):
            continue  # already linked, or deleted: the check finds out whether the journal copy refers to it


def _link_or_copy(path: Path, link: Path) -> None:
    """Link an immutable file; copy it if a link is impossible.

    A link cannot cross to a volume that is mounted in the directory, and some file systems have no links.

    Raises:
        FileExistsError, FileNotFoundError: like `os.link`.
    """
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        if link.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), link) from error
        part = link.with_name(link.name + ".part")
        shutil.copyfile(path, part)
        os.replace(part, link)


def _copy_the_rest(state: Path, staging: Path, *, keys: bool) -> None:
    for path in _files(state):
        if path == "state.db" or is_immutable(path) or (is_key(path) and not keys):
            continue
        copy = staging / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy_whole_lines(state / path, copy)
        except FileNotFoundError:
            continue  # deleted meanwhile, so it was a transient file


def _copy_whole_lines(path: Path, copy: Path) -> None:
    """Copy a file; a log is copied up to its last whole line."""
    shutil.copy2(path, copy)
    if path.suffix == ".jsonl":
        data = copy.read_bytes()
        os.truncate(copy, data.rfind(b"\n") + 1)


def _drop_unreferenced(staging: Path, needs: list[Need]) -> None:
    """Delete the links to updates that the journal copy does not refer to, and to later versions."""
    for need in needs:
        files = RunFiles(staging, need.run_id)
        for folder in (files.folder, *(rank for rank in files.ranks if rank)):
            for path in (folder / "updates").glob("*"):
                if path.name.partition(".")[0] not in need.updates:
                    path.unlink()
            for path in (folder / "versions").glob("*"):
                if int(path.name.partition(".")[0]) > need.version:  # `belongs` lets only versions get here
                    path.unlink()


# ---------------------------------------------------------------- onto the disk


def _write(staging: Path, part: Path, staged: _Staged, on_bytes: OnBytes, *, has_keys: bool, is_tar: bool) -> int:
    """Copy the staged files, and return their size [bytes]."""
    with (_Archive if is_tar else _Folder)(part) as target:
        paths = sorted(path for path in staging.rglob("*") if path.is_file())
        total, parts = sum(path.stat().st_size for path in paths), list[Part]()
        for path in paths:
            parts.append(target.add(path, path.relative_to(staging).as_posix(), lambda more: on_bytes(more, total)))
        contents = Contents(
            atoll=__version__, made_at=staged.made_at, has_keys=has_keys, files=parts, database=staged.database
        )
        written = staging / CONTENTS
        written.write_text(contents.encoded())
        written.chmod(0o600)
        target.add(written, CONTENTS, _ignore)
    return contents.num_bytes


class _Folder:
    """Writer of a backup that is a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, path: Path, name: str, on_block: Callable[[int], None]) -> Part:
        """Copy a file, and return its entry in the contents."""
        mode = path.stat().st_mode & 0o700
        with path.open("rb") as file:
            num_bytes, sha256 = copy_durably(file, self._path / name, mode, on_block)
        return Part(path=name, num_bytes=num_bytes, mode=mode, sha256=sha256)


class _Archive:
    """Writer of a backup that is a tar file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._tar = tarfile.open(fileobj=self._file, mode="w")  # noqa: SIM115 - closed at the end of the block

    def __enter__(self) -> "_Archive":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._tar.close()
                self._file.flush()
                os.fsync(self._file.fileno())

    def add(self, path: Path, name: str, on_block: Callable[[int], None]) -> Part:
        """Copy a file, and return its entry in the contents."""
        stat, info = path.stat(), tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = stat.st_size, stat.st_mode & 0o700, int(stat.st_mtime)
        with path.open("rb") as file:
            reader = Hashing(file, on_block)
            self._tar.addfile(info, reader)
        return Part(path=name, num_bytes=info.size, mode=info.mode, sha256=reader.sha256.hexdigest())


class Hashing:
    """File that is being read, with the digest of the bytes so far."""

    def __init__(self, file: Any, on_block: Callable[[int], None]) -> None:
        self._file, self._on_block, self.sha256 = file, on_block, hashlib.sha256()

    def read(self, size: int = BLOCK_BYTES) -> bytes:
        """Return the next block; empty at the end."""
        block: bytes = self._file.read(size)
        self.sha256.update(block)
        self._on_block(len(block))
        return block


def copy_durably(source: Any, path: Path, mode: int, on_block: Callable[[int], None]) -> tuple[int, str]:
    """Copy an open file to a new, durable one, and return its size [bytes] and its SHA-256."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reader = Hashing(source, on_block)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        while block := reader.read():
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), reader.sha256.hexdigest()
