"""The files of an audit log: appended to by one process at a time, read at any time, repaired after a crash.

audit-<seq of its first line>.jsonl   the lines; the next file goes on with the chain
cut-<seq>.bin                         the unfinished end that a crash has left there, as it was cut off
key.pem, public.pem                   what checkpoints are signed with, and what they are verified with
lock                                  held while lines are appended

Lines that no checkpoint signs yet may be damaged after a power failure, for only a checkpoint waits for the disk: what
can be read of them stays, the rest is cut off and kept beside the log, and the log says so. What lies before a
checkpoint is never touched: damage there is a fault, which `atoll audit verify` names.
"""

import fcntl
import logging
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.aggregation.tensorfile import sync_folder
from atoll.protocol.chain import (
    EVENTS_MAX,
    LINE_BYTES_MAX,
    Checkpoint,
    Event,
    Head,
    LineFault,
    checkpoint_line,
    event_line,
    instant,
    read_line,
)
from atoll.protocol.durable import naming_full_disk, write_atomically

logger = logging.getLogger(__name__)

PUBLIC_KEY = "public.pem"

FILE_BYTES = 16 * 2**20
"""A file of this size is followed by the next one."""

APPEND_MAX = 4 * EVENTS_MAX
"""Events that may be written at once: so many are in danger when the power fails."""
CHECKPOINTS_BACK = APPEND_MAX // EVENTS_MAX + 2
_CHECKPOINT = b'"signature":"'  # in an event's texts the quotes are escaped


class AuditUnusable(OSError):
    """The log cannot be gone on with; the message says what to do."""


def audit_folder(state: Path) -> Path:
    """Where a coordinator's log lies in its state directory."""
    return state / "audit"


def log_files(folder: Path) -> list[Path]:
    """The files of a log, in its order."""
    return sorted(folder.glob("audit-" + "[0-9]" * 12 + ".jsonl"))


def is_log_file(name: str) -> bool:
    """Whether a file of this name is part of a log that others may have."""
    return name == PUBLIC_KEY or re.fullmatch(r"audit-[0-9]{12}\.jsonl", name) is not None


def read_lines(path: Path, *, num_bytes: int | None = None) -> Iterator[bytes]:
    """The lines of a file with their ends, none longer than LINE_BYTES_MAX: of such a one pieces.

    Args:
        path: of the file.
        num_bytes: read no further; None: to its end.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size if num_bytes is None else num_bytes
        while left > 0 and (line := file.readline(min(left, LINE_BYTES_MAX + 1))):
            left -= len(line)
            yield line


def sizes(folder: Path) -> list[tuple[Path, int]]:
    """The files of a log with their sizes at one moment, between two appends of a living writer."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a copy of a log, or one that others may only read
        return [(path, path.stat().st_size) for path in log_files(folder)]
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return [(path, path.stat().st_size) for path in log_files(folder)]
    finally:
        os.close(lock)


def public_key(path: Path) -> str:
    """The public key in a PEM file, as checkpoints name it.

    Raises:
        AuditUnusable: there is none, or another kind.
    """
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise AuditUnusable(f"{path}: no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise AuditUnusable(f"{path}: checkpoints are signed with Ed25519, this is another kind of key")
    return key.public_bytes_raw().hex()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where this process believes the log to end; whoever else has appended meanwhile makes it look again."""

    path: Path
    num_bytes: int
    head: Head


class AuditFiles:
    """Appends to a log. Threads must not share one; processes may have one each.

    Args:
        folder: of the log; it is made when missing.
        clock: gives the time of a repair and of checkpoints [s since the epoch].
        file_bytes: see FILE_BYTES.
        writer: who is said to have repaired it.

    Raises:
        AuditUnusable: there is a log and no key, or a key of another kind.
        OSError: it cannot be written.
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
        """The newest one that this process has written."""
        try:
            with self._alone():
                self._key = self._load_or_make_key()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def unsigned(self) -> int:
        """Events that no checkpoint signs yet, as far as this process knows."""
        return self._place.head.unsigned if self._place is not None else 0

    def append(self, events: Sequence[Event], *, sign: bool = False) -> None:
        """Write at most APPEND_MAX events, with a checkpoint after every EVENTS_MAX and, when asked to, after the last.

        On return they outlive this process; and the machine, when a checkpoint was written after them.

        Raises:
            DiskFull: nothing, or a part that the next append cuts off, was written.
        """
        assert len(events) <= APPEND_MAX
        with self._alone():
            place = self._find_end()
            head, lines, signed = place.head, [], None
            for event in events:
                line, head = event_line(event, head)
                lines.append(line)
                if head.unsigned >= EVENTS_MAX:
                    signed, head = self._sign(head, lines)
            if sign and head.unsigned:
                signed, head = self._sign(head, lines)
            if lines:
                self._write(place, b"".join(lines), head, is_signed=signed is not None)
            self.checkpoint = signed or self.checkpoint

    def close(self) -> None:
        """Let go of the files."""
        self._forget_place()
        os.close(self._lock)

    # ------------------------------------------------------------ writing

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _sign(self, head: Head, lines: list[bytes]) -> tuple[Checkpoint, Head]:
        line, after = checkpoint_line(instant(self._clock()), head, self._key)
        lines.append(line)
        return Checkpoint(head.seq, head.digest), after

    def _write(self, place: _Place, data: bytes, head: Head, *, is_signed: bool) -> None:
        self._place = None  # until all of it is written
        view, at = memoryview(data), place.num_bytes
        with naming_full_disk(place.path):
            while view:
                count = os.pwrite(self._file, view, at)
                view, at = view[count:], at + count
            if is_signed:
                os.fdatasync(self._file)
        self._place = _Place(place.path, at, head)

    def _find_end(self) -> _Place:
        """Where to append: where this process left off, unless another was here, or the file is full."""
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
        """The end of the last file; what is damaged there behind the last checkpoint is cut off, and this is said."""
        path = files[-1]
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        head, good = _end_of(path)
        if head is None:  # the file was begun, and nothing of it was written
            before, _ = _end_of(files[-2]) if len(files) > 1 else (Head(), 0)
            if before is None:
                raise AuditUnusable(f"{files[-2]} holds no line: put it back from a backup, or move {self.folder} away")
            head = before
        place = _Place(path, good, head)
        if good < path.stat().st_size:
            self._cut_off(place)
        return self._place or place

    def _cut_off(self, place: _Place) -> None:
        cut = os.pread(self._file, 2**30, place.num_bytes)
        write_atomically(self.folder / f"cut-{place.head.seq:012d}.bin", cut)
        os.ftruncate(self._file, place.num_bytes)
        logger.warning("%s: %d bytes of unfinished lines were cut off", place.path, len(cut))
        repair = Event(
            time=instant(self._clock()),
            actor=self._writer,
            role=self._writer,
            action="audit.repair",
            object=f"line {place.head.seq}",
            outcome=f"{len(cut)} bytes of unfinished lines were cut off",
            digests={"cut": sha256(cut).hexdigest()},
        )
        line, head = event_line(repair, place.head)
        lines = [line]
        self.checkpoint, head = self._sign(head, lines)
        self._write(place, b"".join(lines), head, is_signed=True)

    # ------------------------------------------------------------ the key

    def _load_or_make_key(self) -> Ed25519PrivateKey:
        path = self.folder / "key.pem"
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except FileNotFoundError:
            if log_files(self.folder):
                raise AuditUnusable(
                    f"{path} is missing, with which the log in {self.folder} is signed: put it back from a backup, or "
                    "move the folder to where it is kept; then a new log begins"
                ) from None
            return self._make_key(path)
        except ValueError as error:
            raise AuditUnusable(f"{path}: no private key in PEM: {error}") from error
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
        part = os.open(path.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(part, "wb") as file:  # never readable to others, not even at first
            file.write(private)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".new"), path)
        sync_folder(self.folder)
        return key


def _is_end(place: _Place) -> bool:
    try:
        has_grown = place.path.stat().st_size != place.num_bytes
    except FileNotFoundError:
        return False
    return not has_grown and not (place.path.parent / f"audit-{place.head.seq:012d}.jsonl").exists()


def _end_of(path: Path) -> tuple[Head | None, int]:
    """Where the sound lines of a file end, and at which byte; None: there is no sound line.

    It reads from a checkpoint on behind which at least one whole append lies: what was written before is on disk.
    """
    if path.stat().st_size == 0:
        return None, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        head, at = None, _old_checkpoint(data)
        while (end := data.find(b"\n", at) + 1) > 0:
            try:
                line = read_line(data[at:end])
            except LineFault:
                break
            if head is not None and (line.seq, line.prev) != (head.seq, head.digest):
                break
            unsigned = 0 if line.event is None else 1 + (head.unsigned if head is not None else 0)
            head, at = Head(line.seq + 1, line.digest, unsigned), end
        return head, at


def _old_checkpoint(data: mmap.mmap) -> int:
    """Where the line of an old enough checkpoint begins; 0: there is none in this file."""
    begin = len(data)
    for _ in range(CHECKPOINTS_BACK):
        found = data.rfind(_CHECKPOINT, 0, begin)
        if found < 0:
            return 0
        begin = data.rfind(b"\n", 0, found) + 1
    return begin
