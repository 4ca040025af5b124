"""The hash chain of an audit log: its JSON lines, the signed checkpoints among them, and its verification. Pure.

A line is canonical JSON: ASCII, sorted keys, no blanks, no number except `seq`. The two kinds of lines share one
numbering:

    {"action", "actor", "digests", "object", "outcome", "prev", "role", "seq", "time"}    an event
    {"key", "prev", "seq", "signature", "time"}                                            a checkpoint

`prev` is the hash of the line before, h = SHA256(prev || line), both as bytes and without the line's end; in the first
line it is 64 zeros. A checkpoint signs itself without its signature (Ed25519), and so, through `prev`, all lines
before.

A reader detects every changed, missing, reordered or repeated line before the last checkpoint; after it, every changed
line except the last, unless all later hashes were recomputed; and more than EVENTS_MAX events in a row without a
checkpoint. The log alone cannot show that its end was truncated, at a checkpoint or up to EVENTS_MAX events after one,
nor that the owner of the key has rewritten it all. To detect both, keep a checkpoint's number and `prev` elsewhere
(`Checkpoint`): a log without that line is not the same log.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.ground.printable import count_of

EVENTS_MAX = 256
"""Largest number of events in a row without a checkpoint."""

LINE_BYTES_MAX = 32 * 1024
TEXT_MAX = 200
"""Largest length of each string of an event [characters]; longer ones are truncated."""
USER_MAX = 80
"""Largest length of the name of a user for whom an actor acts [characters]."""
DIGESTS_MAX = 4

GENESIS = "0" * 64

REPAIR, FAULT, ARCHIVE = "audit.repair", "audit.fault", "audit.archive"
"""Actions of the log itself: a torn end was truncated; the log continues after a damaged file; after archived lines."""

ARCHIVED = "archived"
"""Name of the digest of an `ARCHIVE` event that holds the hash of the last archived line."""

_EVENT_KEYS = frozenset({"action", "actor", "digests", "object", "outcome", "prev", "role", "seq", "time"})
_USER = "on_behalf_of"
_CHECKPOINT_KEYS = frozenset({"key", "prev", "seq", "signature", "time"})
_HEX = {length: re.compile(f"[0-9a-f]{{{length}}}") for length in (64, 128)}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_SIGNED = b"atoll audit checkpoint\n"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


class LineFault(ValueError):
    """Error: bytes are not a line of an audit log; the text says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event: its actor, action and outcome."""

    time: str
    """Instant in RFC 3339, see `instant`."""
    actor: str
    role: str
    action: str
    object: str
    outcome: str
    digests: Mapping[str, str] = field(default_factory=dict)
    on_behalf_of: str = ""
    """User for whom the actor says that it acts; empty: for itself, and the line has no such key."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Identity of a checkpoint, to be kept elsewhere: a log without this line is not the same log."""

    seq: int
    """Number of the checkpoint's line."""
    digest: str
    """Hash of the previous line, which is its `prev`."""

    def __str__(self) -> str:
        return f"{self.seq}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> "Checkpoint":
        """Read a string SEQ:DIGEST, which `str` returns.

        Raises:
            ValueError: the text has another form.
        """
        seq, _, digest = text.partition(":")
        if not (seq.isascii() and seq.isdecimal() and len(seq) <= 18 and _HEX[64].fullmatch(digest)):
            raise ValueError(f"checkpoint {text[:100]!r}: allowed is SEQ:DIGEST, as `atoll audit show` prints it")
        return cls(int(seq), digest)


@dataclass(frozen=True, slots=True)
class Head:
    """End of a log: the values that the next line continues."""

    seq: int = 0
    """Number of the next line."""
    digest: str = GENESIS
    """Hash of the last line."""
    unsigned: int = 0
    """Number of events since the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a log: an event or a checkpoint."""

    seq: int
    prev: str
    digest: str
    """Hash of this line, the next line's `prev`."""
    time: str
    event: Event | None
    """The event; None: the line is a checkpoint."""
    key: str = ""
    """Public key of a checkpoint, hexadecimal."""
    signature: str = ""
    """Signature of a checkpoint, hexadecimal."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Identity of a checkpoint's line, to be kept elsewhere."""
        return Checkpoint(self.seq, self.prev)


def archive_event(at: str, actor: str, role: str, archived: tuple[int, int], head: Head) -> Event:
    """Return the event with which a log continues after archived lines.

    Args:
        at: the time of the event.
        actor: its actor.
        role: the actor's role.
        archived: number of the first archived line, and of the faults in the archived lines, which end before the head.
        head: the head of the log.
    """
    first, num_faults = archived
    outcome = f"with {count_of(num_faults, 'fault')}" if num_faults else "ok"
    return Event(at, actor, role, ARCHIVE, f"lines {first} to {head.seq - 1}", outcome, {ARCHIVED: head.digest})


def instant(at: float) -> str:
    """Return an instant [s since the epoch] as RFC 3339 in UTC: strings of one length that sort by time."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def event_line(event: Event, head: Head) -> tuple[bytes, Head]:
    """Return the line of an event, line end included, and the head after it; strings are truncated to TEXT_MAX.

    The name of a user is truncated to USER_MAX.
    """
    digests = {_cut(name): _cut(event.digests[name]) for name in list(event.digests)[:DIGESTS_MAX]}
    texts = {name: _cut(getattr(event, name)) for name in ("actor", "role", "action", "object", "outcome")}
    if event.on_behalf_of:
        texts[_USER] = _cut(event.on_behalf_of, USER_MAX)
    line = _encode({**texts, "digests": digests, "time": event.time, "prev": head.digest, "seq": head.seq}).encode()
    return line + b"\n", Head(head.seq + 1, _hash(head.digest, line), head.unsigned + 1)


def checkpoint_line(at: str, head: Head, key: Ed25519PrivateKey) -> tuple[bytes, Head]:
    """Return a checkpoint over all previous lines, with its line end, and the head after it."""
    fields = {"key": key.public_key().public_bytes_raw().hex(), "prev": head.digest, "seq": head.seq, "time": at}
    signature = key.sign(_SIGNED + _encode(fields).encode()).hex()
    line = _encode({**fields, "signature": signature}).encode()
    return line + b"\n", Head(head.seq + 1, _hash(head.digest, line))


def read_line(data: bytes) -> Line:
    """Read one line, with its line end.

    Raises:
        LineFault: the line is unfinished, too long, or not byte for byte what a writer writes.
    """
    if not data.endswith(b"\n"):
        raise LineFault("too long" if len(data) > LINE_BYTES_MAX else "its end is missing")
    content = data[:-1]
    fields = _parse_canonical(content)
    keys = frozenset(fields)
    is_event = keys - {_USER} == _EVENT_KEYS
    if not (is_event or keys == _CHECKPOINT_KEYS) or type(fields["seq"]) is not int or fields["seq"] < 0:
        raise LineFault("neither an event nor a checkpoint")
    _check_hex(fields, "prev", 64)
    _check_time(fields["time"])
    digest = _hash(fields["prev"], content)
    if keys == _CHECKPOINT_KEYS:
        _check_hex(fields, "key", 64)
        _check_hex(fields, "signature", 128)
        return Line(digest=digest, event=None, **fields)
    return Line(fields["seq"], fields["prev"], digest, fields["time"], _read_event(fields))


def _parse_canonical(content: bytes) -> dict[str, Any]:
    """Parse a JSON object whose bytes are exactly the output of `_encode`."""
    with suppress(ValueError, RecursionError):
        fields: dict[str, Any] = json.loads(content)
        if type(fields) is dict and _encode(fields).encode() == content:
            return fields
    raise LineFault("not canonical JSON")


def _read_event(fields: Mapping[str, Any]) -> Event:
    """Read the event from a line's fields; all of its values are strings."""
    names = ("time", "actor", "role", "action", "object", "outcome", *([_USER] if _USER in fields else []))
    texts = {name: fields[name] for name in names}
    digests = fields["digests"]
    if type(digests) is not dict or not all(type(text) is str for text in (*texts.values(), *digests.values())):
        raise LineFault("a value of its event is not a string")
    if texts.get(_USER) == "":
        raise LineFault("it names no user, with the key of one")
    return Event(digests=digests, **texts)


def is_signed(line: Line) -> bool:
    """Return whether a checkpoint's signature is valid for the key that it names."""
    fields = {"key": line.key, "prev": line.prev, "seq": line.seq, "time": line.time}
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(line.key))
        key.verify(bytes.fromhex(line.signature), _SIGNED + _encode(fields).encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _hash(prev: str, line: bytes) -> str:
    return hashlib.sha256(bytes.fromhex(prev) + line).hexdigest()


def _cut(text: str, most: int = TEXT_MAX) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _check_hex(fields: Mapping[str, Any], name: str, length: int) -> None:
    if type(fields[name]) is not str or _HEX[length].fullmatch(fields[name]) is None:
        raise LineFault(f"its {name} is not {length} lower-case hexadecimal digits")


def _check_time(time: object) -> None:
    if type(time) is not str or _TIME.fullmatch(time) is None:
        raise LineFault("its time is not of the form 2026-01-31T12:00:00.000000Z")


# ---------------------------------------------------------------- verification


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a log, which no honest writer causes."""

    where: str
    """File and number of the line, counted from 1."""
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


FAULTS_MAX = 100


@dataclass(slots=True)
class Verifier:
    """Verifier of a log, line by line, in the order of its files; memory grows with the faults, not with the log.

    Attributes:
        key: public key [hex] of the signatures; None: the key of the first checkpoint.
        whole: whether the log must begin with line 0.
        expected: checkpoints, kept elsewhere, that the log must have.
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
    """Line with the highest number."""
    last_checkpoint: Line | None = None
    archived: Line | None = None
    """First line, if it is an `ARCHIVE` event: the log relies on the archive named there, which was not read."""
    mended: list[Line] = field(default_factory=list)
    """Lines in which the log records a repair or a damaged file, at most FAULTS_MAX of them."""
    _before: Line | None = None
    _before_where: str = ""
    _missing: list[tuple[int, int, str]] = field(default_factory=list)

    def feed(self, data: bytes, where: str) -> Line | None:
        """Verify the next line, whose line end may be missing; return it, or None if it is not a line."""
        try:
            line = read_line(data)
        except LineFault as fault:
            self._add_fault(where, f"changed or unfinished: {fault}")
            self._before = None
            return None
        self._check_place(line, where)
        if self._before is not None and line.seq == self._before.seq + 1 and line.prev != self._before.digest:
            text = f"changed: line {line.seq} does not follow from line {self._before.seq}"
            self._add_fault(self._before_where, text)
        self.events, self.unsigned = self.events + (line.event is not None), self.unsigned + (line.event is not None)
        if line.event is not None and line.event.action in (REPAIR, FAULT) and len(self.mended) < FAULTS_MAX:
            self.mended.append(line)
        first = self.archived
        if first is not None and first is self._before and (line.event is not None or line.prev != first.digest):
            self._no_archive("its line is not signed")
        if line.event is None:
            self._check_signature(line, where)
        elif self.unsigned == EVENTS_MAX + 1:
            self._add_fault(where, f"more than {EVENTS_MAX} events in a row are signed by no checkpoint")
        self._before, self._before_where = line, where
        return line

    def finish(self) -> list[Fault]:
        """Return all faults, mostly in the order of the log, at most FAULTS_MAX of them."""
        if self.newest is None and not self.num_faults:
            self._add_fault("the log", "it holds no line: it was emptied, or nothing of it was ever written")
        if self.archived is not None and self.archived is self.newest:
            self._no_archive("its line is not signed")
        for low, high, where in self._missing:
            self._add_fault(where, f"line {low} is missing" if low == high else f"lines {low} to {high} are missing")
        for checkpoint in self.expected:
            if self.archived is not None and checkpoint.seq < self.archived.seq:
                self._add_fault("the archive", f"checkpoint {checkpoint} is on an archived line: name its --archive")
                continue
            self._add_fault("the end", f"checkpoint {checkpoint} is not in this log: it was cut off, or rewritten")
        self._missing, self.expected = [], []
        return self.faults

    def _add_fault(self, where: str, what: str) -> None:
        self.num_faults += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(Fault(where, what))

    def _check_place(self, line: Line, where: str) -> None:
        if self.newest is None:
            self.first = line
            self.archived = line if line.seq > 0 and _is_archive(line) else None
            if self.whole and line.seq > 0 and self.archived is None:
                self._missing.append((0, line.seq - 1, where))
            if line.seq == 0 and line.prev != GENESIS:
                self._add_fault(where, "changed: the first line must have 64 zeros as its prev")
        elif line.seq > self.newest.seq + 1:
            self._missing.append((self.newest.seq + 1, line.seq - 1, where))
        elif line.seq <= self.newest.seq:
            was_missing = self._take_from_missing(line.seq)
            self._add_fault(where, f"line {line.seq} is {'out of order' if was_missing else 'repeated'}")
        if self.newest is None or line.seq > self.newest.seq:
            self.newest = line
        self.expected = [known for known in self.expected if known != line.checkpoint]

    def _no_archive(self, why: str) -> None:
        """Report a first line that claims an archive: a process that writes here without the key could claim one."""
        assert self.archived is not None
        self._add_fault(self._before_where, f"lines 0 to {self.archived.seq - 1} are missing, not archived: {why}")
        self.archived = None

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
            self._add_fault(where, f"checkpoint {line.seq} is signed with another key: {line.key[:16]}...")
        elif not is_signed(line):
            self._add_fault(where, f"changed: the signature of checkpoint {line.seq} is wrong")
        self.last_checkpoint = line


def _is_archive(line: Line) -> bool:
    event = line.event
    return (
        event is not None
        and (event.action, event.digests.get(ARCHIVED)) == (ARCHIVE, line.prev)
        and event.object.endswith(f" to {line.seq - 1}")
    )


def _without(seq: int, low: int, high: int, where: str) -> Iterator[tuple[int, int, str]]:
    if low < seq:
        yield low, seq - 1, where
    if seq < high:
        yield seq + 1, high, where
