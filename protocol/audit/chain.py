"""The audit log as bytes: hash-chained JSON lines, signed checkpoints among them, and what is wrong with a log. Pure.

A line is canonical JSON: ASCII, keys in order, no blanks, no number but `seq`. There are two kinds, numbered together:

    {"action", "actor", "digests", "object", "outcome", "prev", "role", "seq", "time"}    who did what
    {"key", "prev", "seq", "signature", "time"}                                            a checkpoint

`prev` is the hash of the line before, h = SHA256(prev || line), both as bytes and without the line's end; the first
line's is 64 zeros. A checkpoint signs (Ed25519) itself without its signature, hence through `prev` all lines before.

What a reader finds: every changed, missing, reordered or repeated line before the last checkpoint, and before the last
line every one that was changed without computing all later hashes anew; more than EVENTS_MAX events in a row that no
checkpoint signs. What nobody can find in the log alone: that it ends earlier than it did, at a checkpoint or up to
EVENTS_MAX events after one, or that whoever holds the key has written all of it anew. For that, keep a checkpoint's
number and `prev` elsewhere (`Checkpoint`): a log that does not hold it any more is another one.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

EVENTS_MAX = 256
"""Events in a row without a checkpoint."""

LINE_BYTES_MAX = 32 * 1024
TEXT_MAX = 200
"""Characters of each text of an event: longer ones are cut."""
DIGESTS_MAX = 4

GENESIS = "0" * 64

REPAIR, FAULT = "audit.repair", "audit.fault"
"""What a log says of itself: that a torn end was cut off; that it goes on behind a damaged file."""

_EVENT_KEYS = frozenset({"action", "actor", "digests", "object", "outcome", "prev", "role", "seq", "time"})
_CHECKPOINT_KEYS = frozenset({"key", "prev", "seq", "signature", "time"})
_HEX = {length: re.compile(f"[0-9a-f]{{{length}}}") for length in (64, 128)}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_SIGNED = b"atoll audit checkpoint\n"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


class LineFault(ValueError):
    """The bytes are no line of an audit log; the text says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """Who did what, and what came of it."""

    time: str
    """RFC 3339, see `instant`."""
    actor: str
    role: str
    action: str
    object: str
    outcome: str
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What has to be remembered elsewhere, so that no log without these lines passes for this one."""

    seq: int
    """Of the checkpoint's line."""
    digest: str
    """Hash of the line before it: its `prev`."""

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> "Checkpoint":
        """What `str` gives.

        Raises:
            ValueError: of another form.
        """
        seq, _, digest = text.partition(":")
        if not (seq.isascii() and seq.isdecimal() and len(seq) <= 18 and _HEX[64].fullmatch(digest)):
            raise ValueError(f"checkpoint {text[:100]!r}: allowed is SEQ:DIGEST, as `atoll audit show` prints it")
        return cls(int(seq), digest)


@dataclass(frozen=True, slots=True)
class Head:
    """Where a log ends: what the next line needs to know."""

    seq: int = 0
    """Of the next line."""
    digest: str = GENESIS
    unsigned: int = 0
    """Events since the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, read; `event` is None for a checkpoint."""

    seq: int
    prev: str
    digest: str
    time: str
    event: Event | None
    key: str = ""
    signature: str = ""

    @property
    def checkpoint(self) -> Checkpoint:
        """As it is remembered elsewhere."""
        return Checkpoint(self.seq, self.prev)


def instant(at: float) -> str:
    """An instant [s since the epoch] as RFC 3339 in UTC: texts of one length, ordered as the times are."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def event_line(event: Event, head: Head) -> tuple[bytes, Head]:
    """The line of an event, with its end, and where the log ends then; texts are cut to TEXT_MAX characters."""
    digests = {_cut(name): _cut(event.digests[name]) for name in list(event.digests)[:DIGESTS_MAX]}
    texts = {name: _cut(getattr(event, name)) for name in ("actor", "role", "action", "object", "outcome")}
    line = _encode({**texts, "digests": digests, "time": event.time, "prev": head.digest, "seq": head.seq}).encode()
    return line + b"\n", Head(head.seq + 1, _hash(head.digest, line), head.unsigned + 1)


def checkpoint_line(at: str, head: Head, key: Ed25519PrivateKey) -> tuple[bytes, Head]:
    """A checkpoint over all lines before it, with its end, and where the log ends then."""
    said = {"key": key.public_key().public_bytes_raw().hex(), "prev": head.digest, "seq": head.seq, "time": at}
    signature = key.sign(_SIGNED + _encode(said).encode()).hex()
    line = _encode({**said, "signature": signature}).encode()
    return line + b"\n", Head(head.seq + 1, _hash(head.digest, line))


def read_line(data: bytes) -> Line:
    """One line, with its end.

    Raises:
        LineFault: it is unfinished, too long, or not exactly what a writer would have written.
    """
    if not data.endswith(b"\n"):
        raise LineFault("too long" if len(data) > LINE_BYTES_MAX else "its end is missing")
    data = data[:-1]
    try:
        said = json.loads(data)
        is_canonical = type(said) is dict and _encode(said).encode() == data
    except (ValueError, RecursionError):
        is_canonical = False
    if not is_canonical:
        raise LineFault("not canonical JSON")
    keys = frozenset(said)
    if not (keys in (_EVENT_KEYS, _CHECKPOINT_KEYS) and type(said["seq"]) is int and said["seq"] >= 0):
        raise LineFault("neither an event nor a checkpoint")
    _check_hex(said, "prev", 64)
    if type(said["time"]) is not str or _TIME.fullmatch(said["time"]) is None:
        raise LineFault("its time is not of the form 2026-01-31T12:00:00.000000Z")
    seq, prev, digest = said["seq"], said["prev"], _hash(said["prev"], data)
    if keys == _CHECKPOINT_KEYS:
        _check_hex(said, "key", 64)
        _check_hex(said, "signature", 128)
        return Line(seq, prev, digest, said["time"], None, said["key"], said["signature"])
    texts = {name: said[name] for name in ("actor", "role", "action", "object", "outcome")}
    digests = said["digests"]
    if type(digests) is not dict or not all(type(text) is str for text in (*texts.values(), *digests.values())):
        raise LineFault("what should be a text is none")
    return Line(seq, prev, digest, said["time"], Event(time=said["time"], digests=digests, **texts))


def is_signed(line: Line) -> bool:
    """Whether a checkpoint's signature is that of the key which it names."""
    said = {"key": line.key, "prev": line.prev, "seq": line.seq, "time": line.time}
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(line.key))
        key.verify(bytes.fromhex(line.signature), _SIGNED + _encode(said).encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _hash(prev: str, line: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(prev) + line).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


def _check_hex(said: Mapping[str, Any], name: str, length: int) -> None:
    if type(said[name]) is not str or _HEX[length].fullmatch(said[name]) is None:
        raise LineFault(f"its {name} is not {length} lower-case hexadecimal digits")


# ---------------------------------------------------------------- what is wrong with a log


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that no honest writer leaves behind."""

    where: str
    """File and line, counted from 1."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


FAULTS_MAX = 100


@dataclass(slots=True)
class Verifier:
    """Reads a log line by line, in the order of its files; memory does not grow with it, but with its faults.

    Attributes:
        key: the public key [hex] that must have signed; None: any, as long as it is one and the same.
        whole: the first line must be the first of all.
        expected: checkpoints that must be there, kept elsewhere.
    """

    key: str | None = None
    whole: bool = True
    expected: list[Checkpoint] = field(default_factory=list)
    events: int = 0
    checkpoints: int = 0
    unsigned: int = 0
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)
    first: Line | None = None
    newest: Line | None = None
    """The line with the highest number."""
    last_checkpoint: Line | None = None
    mended: list[Line] = field(default_factory=list)
    """Where the log says that it was repaired, or goes on behind damage: at most FAULTS_MAX of them."""
    _before: Line | None = None
    _before_where: str = ""
    _missing: list[tuple[int, int, str]] = field(default_factory=list)

    def feed(self, data: bytes, where: str) -> Line | None:
        """One more line, with its end, or what there is of it; None when it is none."""
        try:
            line = read_line(data)
        except LineFault as fault:
            self._fault(where, f"changed or unfinished: {fault}")
            self._before = None
            return None
        self._check_place(line, where)
        if self._before is not None and line.seq == self._before.seq + 1 and line.prev != self._before.digest:
            self._fault(self._before_where, f"changed: line {line.seq} does not follow from line {self._before.seq}")
        self.events, self.unsigned = self.events + (line.event is not None), self.unsigned + (line.event is not None)
        if line.event is not None and line.event.action in (REPAIR, FAULT) and len(self.mended) < FAULTS_MAX:
            self.mended.append(line)
        if line.event is None:
            self._check_signature(line, where)
        elif self.unsigned == EVENTS_MAX + 1:
            self._fault(where, f"more than {EVENTS_MAX} events in a row are signed by no checkpoint")
        self._before, self._before_where = line, where
        return line

    def finish(self) -> list[Fault]:
        """All faults, in the order of the log as far as can be, at most FAULTS_MAX of them."""
        if self.newest is None and not self.num_faults:
            self._fault("the log", "it holds no line: it was emptied, or nothing of it was ever written")
        for low, high, where in self._missing:
            self._fault(where, f"line {low} is missing" if low == high else f"lines {low} to {high} are missing")
        for checkpoint in self.expected:
            self._fault("the end", f"checkpoint {checkpoint} is not in this log: it was cut off, or written anew")
        self._missing, self.expected = [], []
        return self.faults

    def _fault(self, where: str, what: str) -> None:
        self.num_faults += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(Fault(where, what))

    def _check_place(self, line: Line, where: str) -> None:
        if self.newest is None:
            self.first = line
            if self.whole and line.seq > 0:
                self._missing.append((0, line.seq - 1, where))
            if line.seq == 0 and line.prev != GENESIS:
                self._fault(where, "changed: the first line follows from no other")
        elif line.seq > self.newest.seq + 1:
            self._missing.append((self.newest.seq + 1, line.seq - 1, where))
        elif line.seq <= self.newest.seq:
            was_missing = self._take_from_missing(line.seq)
            self._fault(where, f"line {line.seq} is {'out of order' if was_missing else 'repeated'}")
        if self.newest is None or line.seq > self.newest.seq:
            self.newest = line
        self.expected = [known for known in self.expected if known != line.checkpoint]

    def _take_from_missing(self, seq: int) -> bool:
        for index, (low, high, where) in enumerate(self._missing):
            if low <= seq <= high:
                self._missing[index : index + 1] = list(_without(seq, low, high, where))
                return True
        return False

    def _check_signature(self, line: Line, where: str) -> None:
        self.checkpoints += 1
        self.unsigned = 0
        if self.key is None:
            self.key = line.key
        if line.key != self.key:
            self._fault(where, f"checkpoint {line.seq} is signed with another key: {line.key[:16]}...")
        elif not is_signed(line):
            self._fault(where, f"changed: the signature of checkpoint {line.seq} is wrong")
        self.last_checkpoint = line


def _without(seq: int, low: int, high: int, where: str) -> Iterator[tuple[int, int, str]]:
    if low < seq:
        yield low, seq - 1, where
    if seq < high:
        yield seq + 1, high, where
