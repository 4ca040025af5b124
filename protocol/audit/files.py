"""The files of an audit log: appended to by one process at a time, readable at any time, repaired after a crash.

audit-<seq of its first line>.jsonl   lines; the next file continues the chain
cut-<seq>.bin                         torn end that a crash has left, moved here
key.pem, public.pem                   private key that signs checkpoints, and the public key that verifies them
lock                                  lock file, locked while lines are appended

A power failure may tear the lines that no checkpoint signs yet, because only a checkpoint waits for the disk. Readable
lines stay, the torn end is moved to a file beside the log, and the log records this (`audit.repair`). A checkpoint is
written when all lines before it are on the disk, so they are never torn and never changed. Damage to them, or damage
that no crash causes, is left for `atoll audit verify` to report; the log continues in the next file, whose first line
records it (`audit.fault`).
"""

import logging
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.ground.durable import naming_full_disk, write_atomically, write_private
from atoll.ground.file_lock import exclusively, shared
from atoll.ground.folders import in_words, sync_folder
from atoll.ground.printable import count_of
from atoll.ground.private_key import private_key_in
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.audit.archive import Archived, ArchiveRefused, copy_into
from atoll.protocol.audit.chain import (
    ARCHIVE,
    EVENTS_MAX,
    FAULT,
    GENESIS,
    LINE_BYTES_MAX,
    REPAIR,
    Checkpoint,
    Event,
    Head,
    Verifier,
    archive_event,
    checkpoint_line,
    event_line,
    instant,
)
from atoll.protocol.audit.recovery import Data, End, find_end, first_line, last_line

logger = logging.getLogger(__name__)

PUBLIC_KEY = "public.pem"

FILE_BYTES = 16 * 2**20
"""Size from which a file is followed by the next one."""

APPEND_MAX = 4 * EVENTS_MAX
"""Largest number of events of one append, and so of events that a power failure may lose."""


class AuditUnusable(OSError):
    """Error: a log cannot be continued; the text says what to do."""


def audit_folder(state: Path) -> Path:
    """Return the folder of a coordinator's log in its state directory."""
    return state / "audit"


def log_files(folder: Path) -> list[Path]:
    """Return the files of a log, in its order."""
    return sorted(folder.glob("audit-" + "[0-9]" * 12 + ".jsonl"))


def cut_files(folder: Path) -> list[Path]:
    """Return the files with the torn ends, in the log's order."""
    return sorted(folder.glob("cut-" + "[0-9]" * 12 + ".bin"))


def is_log_file(name: str) -> bool:
    """Return whether a file of this name is a part of the log that auditors may read: lines or the public key."""
    return name == PUBLIC_KEY or re.fullmatch(r"audit-[0-9]{12}\.jsonl", name) is not None


def first_number(path: Path) -> int:
    """Return the number of the first line of a file, which is in its name."""
    return int(path.stem.removeprefix("audit-"))


def read_lines(path: Path, *, num_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends; a line longer than LINE_BYTES_MAX is split.

    Args:
        path: the path of the file.
        num_bytes: size to read; None: the whole file.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size if num_bytes is None else num_bytes
        while left > 0 and (line := file.readline(min(left, LINE_BYTES_MAX + 1))):
            left -= len(line)
            yield line


def sizes(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of a log with their sizes at one instant, between two appends of a running writer."""
    try:
        with shared(folder / "lock"):
            return [(path, path.stat().st_size) for path in log_files(folder)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # a copy of a log, or a log that others read
        return [(path, path.stat().st_size) for path in log_files(folder)]


def _verified(files: Sequence[Path], key: str) -> Verifier:
    """Return the verifier of a log at the end of its files."""
    verifier = Verifier(key)
    for path in files:
        for number, line in enumerate(read_lines(path), 1):
            verifier.feed(line, f"{path.name}:{number}")
    verifier.finish()
    return verifier


def public_key(path: Path) -> str:
    """Return the public key of a PEM file, hexadecimal, as checkpoints name it.

    Raises:
        AuditUnusable: the file has no key, or a key of another kind.
    """
    try:
        key = serialization.load_pem_public_key(text_of(path.read_bytes(), path).encode())
    except NotText as error:
        raise AuditUnusable(str(error)) from error
    except OSError as error:
        raise AuditUnusable(in_words(error)) from error
    except (ValueError, UnsupportedAlgorithm, InternalError) as error:
        raise AuditUnusable(f"{path}: no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise AuditUnusable(f"{path}: checkpoints are signed with Ed25519, this is another kind of key")
    return key.public_bytes_raw().hex()


@dataclass(frozen=True, slots=True)
class _Place:
    """End of the log as of this process's last append; another process may have appended since."""

    path: Path
    num_bytes: int
    head: Head


_Parts = list[list[bytes]]
"""Lines to write: the second and every later part begin with a checkpoint."""


class AuditFiles:
    """Appender to a log. Threads must not share an instance; several processes may append to one log.

    Args:
        folder: the folder of the log; it is made when it is missing.
        clock: returns the time of repairs and checkpoints [s since the epoch].
        file_bytes: size from which the next file begins [bytes].
        writer: actor of the log's own events.

    Raises:
        AuditUnusable: there is a log without its key, or a key of another kind.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        *,
        file_bytes: int = FILE_BYTES,
        writer: str = "coordinator",
    ) -> None:
        self.folder, self._clock, self._file_bytes, self._writer = folder, clock, file_bytes, writer
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = -1
        self._place: _Place | None = None
        self.checkpoint: Checkpoint | None = None
        """Newest checkpoint that this process has written."""
        self.damage = ""
        """Description of damage that this process has found; empty: none."""
        try:
            with exclusively(self._lock):
                self._key = self._load_or_make_key()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def unsigned(self) -> int:
        """Number of events that no checkpoint signs yet, as of this process's last append."""
        return self._place.head.unsigned if self._place is not None else 0

    def append(self, events: Sequence[Event], *, sign: bool = False) -> None:
        """Append at most APPEND_MAX events, with a checkpoint after each EVENTS_MAX of them.

        On return they survive a crash of the process; events before a checkpoint survive a power failure, too.

        Args:
            events: the events, in their order.
            sign: write a checkpoint after the last one, too.

        Raises:
            DiskFull: the disk is full; nothing was written.
        """
        assert len(events) <= APPEND_MAX
        with exclusively(self._lock):
            place = self._find_end()
            parts, head, signed = self._compose(events, place.head, sign=sign)
            if events or signed:
                self._write(place, parts, head)
            self.checkpoint = signed or self.checkpoint

    def archive(self, out: Path, *, actor: str, role: str) -> Archived:
        """Move all lines into an archive; the log continues with a signed event that holds the hash of the last line.

        A crash leaves the log unchanged, or with lines that the archive has, too.

        Args:
            out: folder of the archive, which may have older lines of this log.
            actor: the actor of the event.
            role: the actor's role.

        Returns:
            The archived lines; none if only that event was written since the last archive, or the log was emptied.

        Raises:
            ArchiveRefused: the folder belongs to another log, or lies in the state directory of this one.
            OSError: the archive or the log cannot be written.
        """
        if out.resolve().is_relative_to(state := self.folder.resolve().parent):
            why = "a run that is deleted would delete it, and a backup leaves it out"
            raise ArchiveRefused(f"{out} lies in the log's state directory {state}, where {why}: name another folder")
        with exclusively(self._lock):
            head, key = self._signed_end(), public_key(self.folder / PUBLIC_KEY)
            files = [path for path in log_files(self.folder) if first_number(path) < head.seq]  # the last may be empty
            if not files or (head.seq - first_number(files[0]) <= 2 and _begins_behind_archive(files[0])):
                found = _verified(log_files(self.folder), key)
                return Archived(head.seq, head.seq - 1, (), 0, found)
            first, cut = first_number(files[0]), cut_files(self.folder)
            copies = copy_into(out, [*files, *cut], self.folder / PUBLIC_KEY)
            num_bytes = sum(path.stat().st_size for path in files)
            found = _verified(copies[: len(files)], key)
            self._forget_place()
            place = self._begin(head)
            self._give_to_owner_of(files[-1])
            event = archive_event(instant(self._clock()), actor, role, (first, found.num_faults), head)
            parts, head, self.checkpoint = self._compose([event], head, sign=True)
            self._write(place, parts, head)
            for path in (*files, *cut):
                path.unlink()
            sync_folder(self.folder)
        return Archived(first, place.head.seq - 1, tuple(copies), num_bytes, found)

    def _signed_end(self) -> Head:
        """Return the head after a checkpoint over all lines; write the checkpoint if there is none."""
        place = self._find_end()
        if place.head.unsigned:
            parts, head, self.checkpoint = self._compose([], place.head, sign=True)
            self._write(place, parts, head)
            place = self._find_end()
        return place.head

    def _give_to_owner_of(self, path: Path) -> None:
        """Set the new file's owner to the log's: root may archive beside a service of another user."""
        if os.geteuid() == 0:
            of = path.stat()
            os.fchown(self._file, of.st_uid, of.st_gid)

    def close(self) -> None:
        """Close the files of the log."""
        self._forget_place()
        os.close(self._lock)

    # ------------------------------------------------------------ writing

    def _compose(self, events: Sequence[Event], head: Head, *, sign: bool) -> tuple[_Parts, Head, Checkpoint | None]:
        """Return the lines of events and checkpoints, the head after them, and the last checkpoint."""
        parts: _Parts = [[]]
        signed = None
        for event in events:
            if head.unsigned >= EVENTS_MAX:  # a crash came between earlier events and their checkpoint
                signed, head = self._sign(head, parts)
            line, head = event_line(event, head)
            parts[-1].append(line)
            if head.unsigned >= EVENTS_MAX:
                signed, head = self._sign(head, parts)
        if sign and head.unsigned:
            signed, head = self._sign(head, parts)
        return parts, head, signed

    def _sign(self, head: Head, parts: _Parts) -> tuple[Checkpoint, Head]:
        line, after = checkpoint_line(instant(self._clock()), head, self._key)
        parts.append([line])
        return Checkpoint(head.seq, head.digest), after

    def _write(self, place: _Place, parts: _Parts, head: Head) -> None:
        self._place = None  # until everything is written
        try:
            with naming_full_disk(place.path):
                num_bytes = self._write_parts(parts, place.num_bytes)
        except OSError:
            with suppress(OSError):  # else a retry would write the lines twice; recovery copes if this fails
                os.ftruncate(self._file, place.num_bytes)
            raise
        self._place = _Place(place.path, num_bytes, head)

    def _write_parts(self, parts: _Parts, at: int) -> int:
        for lines in parts:
            view = memoryview(b"".join(lines))
            while view:
                count = os.pwrite(self._file, view, at)
                view, at = view[count:], at + count
            if len(parts) > 1:  # a durable checkpoint proves that all lines before it are durable
                os.fdatasync(self._file)
        return at

    def _find_end(self) -> _Place:
        """Return where to append: after this process's last line, unless others have appended or the file is full."""
        place, files = self._place, None
        if place is None or not _is_end(place):
            files = log_files(self.folder)
            self._forget_place()
            place = self._recover(files) if files else self._begin(Head())
        if place.num_bytes >= self._file_bytes and place.head.unsigned == 0:
            self._forget_place()
            place = self._begin(place.head)
        self._place = place
        return place

    def _begin(self, head: Head) -> _Place:
        path = self.folder / f"audit-{head.seq:012d}.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        sync_folder(self.folder)
        return _Place(path, 0, head)

    def _forget_place(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._place = -1, None

    # ------------------------------------------------------------ after a crash

    def _recover(self, files: list[Path]) -> _Place:
        """Return the end of the last file, after removing a torn end or starting the next file after damage."""
        path = files[-1]
        with _opened(path) as data:
            end = find_end(data, _start_of(files, data), self._key.public_key().public_bytes_raw().hex())
            if end.damage:
                return self._continue_behind(path, end, sha256(data).hexdigest())
            torn = data[end.num_bytes :]
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        place = _Place(path, end.num_bytes, end.head)
        return self._cut_off(place, torn) if torn else place

    def _cut_off(self, place: _Place, torn: bytes) -> _Place:
        write_atomically(self.folder / f"cut-{place.head.seq:012d}.bin", torn)
        os.ftruncate(self._file, place.num_bytes)
        logger.warning("%s: %d bytes of unfinished lines were cut off", place.path, len(torn))
        outcome = f"{count_of(len(torn), 'byte')} of unfinished lines cut off"
        return self._record(place, REPAIR, f"line {place.head.seq}", outcome, {"cut": sha256(torn).hexdigest()})

    def _continue_behind(self, path: Path, end: End, digest: str) -> _Place:
        """Leave a damaged file unchanged, and record it in the first line of the next file."""
        place = self._begin(end.head)
        self.damage = (
            f"{path} was changed by a person or a failing disk, not by a crash: {end.damage}. It stays unchanged, and "
            f"the log continues in {place.path.name}. First copy the folder; then `atoll audit verify` names the lines"
        )
        logger.error("%s", self.damage)
        return self._record(place, FAULT, path.name, end.damage, {"file": digest})

    def _record(self, place: _Place, action: str, about: str, outcome: str, digests: dict[str, str]) -> _Place:
        """Append a signed event of the log itself."""
        event = Event(instant(self._clock()), self._writer, self._writer, action, about, outcome, digests)
        parts, head, self.checkpoint = self._compose([event], place.head, sign=True)
        self._write(place, parts, head)
        assert self._place is not None
        return self._place

    # ------------------------------------------------------------ the key

    def _load_or_make_key(self) -> Ed25519PrivateKey:
        path = self.folder / "key.pem"
        try:
            key = private_key_in(text_of(path.read_bytes(), path).encode())
        except FileNotFoundError:
            if log_files(self.folder):
                raise AuditUnusable(
                    f"{path} is missing, the key that signs the log in {self.folder}: put it back from a backup, or "
                    "move the folder away and keep it; then a new log begins"
                ) from None
            return self._make_key(path)
        except NotText as error:
            raise AuditUnusable(str(error)) from error
        except ValueError as error:
            raise AuditUnusable(f"{path}: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise AuditUnusable(f"{path}: checkpoints are signed with Ed25519, this is another kind of key")
        return key

    def _make_key(self, path: Path) -> Ed25519PrivateKey:
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_atomically(self.folder / PUBLIC_KEY, public)
        write_private(path, private)
        sync_folder(self.folder)
        return key


def _begins_behind_archive(path: Path) -> bool:
    with _opened(path) as data:
        line = first_line(data)
    return line is not None and line.event is not None and line.event.action == ARCHIVE


def _is_end(place: _Place) -> bool:
    return log_files(place.path.parent)[-1:] == [place.path] and place.path.stat().st_size == place.num_bytes


@contextmanager
def _opened(path: Path) -> Iterator[Data]:
    """Map a file into memory for the block."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _start_of(files: list[Path], data: Data) -> Head:
    """Return the head that the last file continues: from its first line, or else from the previous file."""
    number = first_number(files[-1])
    first, before = first_line(data), None
    if first is not None and first.seq == number:
        return Head(number, first.prev)
    if len(files) > 1:
        with _opened(files[-2]) as older:
            before = last_line(older)
    return Head(number, before.digest if before is not None else GENESIS)
