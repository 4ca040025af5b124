"""The recovery of an audit log's file: its sound end, and the distinction between a torn end and damage. Pure.

A writer appends a checkpoint only when all lines before it are on the disk (`files`). So a crash damages nothing before
a checkpoint. After the last one it leaves only sound lines, then blocks that never reached the disk and read as zeros,
parts of lines between them, and an incomplete last line.
"""

import hashlib
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.audit.chain import EVENTS_MAX, LINE_BYTES_MAX, Head, Line, LineFault, is_signed, read_line

Data = bytes | mmap.mmap

TORN_BYTES_MAX = 2 * (EVENTS_MAX + 1) * LINE_BYTES_MAX
"""Largest number of bytes after the last durable checkpoint: the next checkpoint, and the events before and after
it."""

_SIGNATURE = b'"signature":"'  # the quotes in an event's strings are escaped
_BEGINNINGS = b'{"action":"', b'{"key":"'
_TORN = re.compile(rb"[\0\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class End:
    """End of the sound lines in a file."""

    head: Head
    """Head that the next line continues; for a damaged file, its number exceeds every line's."""
    num_bytes: int
    """Size of the sound lines [bytes]; after them the file is torn or damaged."""
    damage: str = ""
    """Description of damage that no crash causes; empty: none."""


def find_end(data: Data, start: Head, key: str) -> End:
    """Find the end of the sound lines in a file.

    Args:
        data: content of the file.
        start: head that the first line continues; its number is in the file's name.
        key: public key [hex] of the checkpoints.
    """
    begin, signed = _last_signed(data, key)
    at, head, damage = 0, start, ""
    if signed is not None:
        at, head = _line_end(data, begin), Head(signed.seq + 1, signed.digest)
        if _digest_of(data, begin, start.seq) != signed.prev:
            damage = f"the lines before line {signed.seq} are not the ones that this checkpoint signs"
    at, head = _read_events(data, at, head)
    if not damage and not is_torn(data, at):
        damage = f"line {head.seq} is replaced by bytes that no crash leaves"
    return End(_head_behind(data, at, head, start.seq + 1) if damage else head, at, damage)


def is_torn(data: Data, at: int = 0) -> bool:
    """Return whether the bytes from `at` on are none, or could be left by a crash after the sound lines."""
    if len(data) - at > TORN_BYTES_MAX:
        return False
    pieces = list(_lines(data, at))
    return not pieces or (_is_torn_line(pieces[0]) and all(_is_torn_line(it) or _is_event(it) for it in pieces))


def first_line(data: Data) -> Line | None:
    """Return the first line of a file; None: it cannot be read."""
    return _read(data[: _line_end(data, 0)])


def last_line(data: Data) -> Line | None:
    """Return the last line of a file, sound or not; None: it cannot be read."""
    return _read(data[data.rfind(b"\n", 0, max(0, len(data) - 1)) + 1 :])


def _last_signed(data: Data, key: str) -> tuple[int, Line | None]:
    """Return the last checkpoint signed by a key, after the offset of its line."""
    begin = len(data)
    while (found := data.rfind(_SIGNATURE, 0, begin)) >= 0:
        begin = data.rfind(b"\n", 0, found) + 1
        line = _read(data[begin : _line_end(data, found)])
        if line is not None and line.event is None and line.key == key and is_signed(line):
            return begin, line
    return 0, None


def _digest_of(data: Data, end: int, seq: int) -> str | None:
    """Return the hash of the last line before `end`, recomputed from the file's start; None: another start."""
    first = first_line(data)
    if first is None or first.seq != seq:
        return None
    digest = bytes.fromhex(first.prev)
    for piece in _lines(data, 0, end):
        digest = hashlib.sha256(digest + piece[:-1]).digest()
    return digest.hex()


def _read_events(data: Data, at: int, head: Head) -> tuple[int, Head]:
    """Read the events after the last checkpoint, as long as each one follows from its predecessor."""
    for piece in _lines(data, at):
        line = _read(piece)
        if line is None or line.event is None or (line.seq, line.prev) != (head.seq, head.digest):
            break
        at, head = at + len(piece), Head(line.seq + 1, line.digest, head.unsigned + 1)
    return at, head


def _head_behind(data: Data, at: int, head: Head, least: int) -> Head:
    """Return a head for after a damaged file: a number that no line of it has, and the hash of its last line."""
    limit = head.seq + len(data)  # each line has at least one byte, so no sound line has a larger number
    seq, digest = max(head.seq, least), head.digest
    for piece in _lines(data, at):
        line = _read(piece)
        seq = seq + 1 if line is None else max(seq, min(line.seq, limit) + 1)
        digest = digest if line is None else line.digest
    return Head(seq, digest)


def _is_event(piece: bytes) -> bool:
    line = _read(piece)
    return line is not None and line.event is not None


def _is_torn_line(piece: bytes) -> bool:
    """Return whether a piece is a line without some of its blocks, or without its end."""
    begun = piece.partition(b"\0")[0].removesuffix(b"\n")
    has_gap = b"\0" in piece or not piece.endswith(b"\n")
    is_begun = any(begun.startswith(known) or known.startswith(begun) for known in _BEGINNINGS)
    return has_gap and is_begun and _TORN.fullmatch(piece.removesuffix(b"\n")) is not None


def _read(piece: bytes) -> Line | None:
    try:
        return read_line(piece)
    except LineFault:
        return None


def _lines(data: Data, at: int, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines with their line ends; the last one may lack it."""
    end = len(data) if end is None else end
    while at < end:
        after = min(end, _line_end(data, at))
        yield data[at:after]
        at = after


def _line_end(data: Data, at: int) -> int:
    """Return the offset after the line that contains the byte `at`."""
    found = data.find(b"\n", at)
    return len(data) if found < 0 else found + 1
