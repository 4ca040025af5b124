"""Where a file of an audit log ends, and whether a crash can have left it so. Pure.

A writer lets a checkpoint follow only when all before it is on the disk (`audit_files`). So no crash damages what
stands before a checkpoint, and behind the last one it leaves but this: sound lines, then blocks that never reached the
disk, which read as zeros, with what was written of the lines between them, and a last line that lacks its end.
"""

import hashlib
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.audit.chain import EVENTS_MAX, LINE_BYTES_MAX, Head, Line, LineFault, is_signed, read_line

Data = bytes | mmap.mmap

TORN_BYTES_MAX = 2 * (EVENTS_MAX + 1) * LINE_BYTES_MAX
"""Bytes behind the last checkpoint that is on the disk: the next one, and the events before and behind that."""

_SIGNATURE = b'"signature":"'  # in an event's texts the quotes are escaped
_BEGINNINGS = b'{"action":"', b'{"key":"'
_TORN = re.compile(rb"[\0\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class End:
    """Where the sound lines of a file end."""

    head: Head
    """What the next line needs to know; of a damaged file it is a number that no line there has."""
    num_bytes: int
    """Of the sound lines: what is behind them was torn by a crash, or is damaged."""
    damage: str = ""
    """What no crash can have done, in words; empty: nothing of this kind was seen."""


def find_end(data: Data, start: Head, key: str) -> End:
    """Where the lines of a file end.

    Args:
        data: the file.
        start: what its first line follows from; its number is that in the file's name.
        key: the public key [hex] of its checkpoints.
    """
    begin, signed = _last_signed(data, key)
    at, head, damage = 0, start, ""
    if signed is not None:
        at, head = _line_end(data, begin), Head(signed.seq + 1, signed.digest)
        if _digest_of(data, begin, start.seq) != signed.prev:
            damage = f"what stands before line {signed.seq} is not what this checkpoint signs"
    at, head = _read_on(data, at, head)
    if not damage and not is_torn(data, at):
        damage = f"where line {head.seq} should be is something else"
    return End(_behind(data, at, head, start.seq + 1) if damage else head, at, damage)


def is_torn(data: Data, at: int = 0) -> bool:
    """Whether a crash can have left what is behind the sound lines, from this byte on, or there is nothing."""
    if len(data) - at > TORN_BYTES_MAX:
        return False
    pieces = list(_lines(data, at))
    return not pieces or (_is_torn_line(pieces[0]) and all(_is_torn_line(it) or _is_event(it) for it in pieces))


def first_line(data: Data) -> Line | None:
    """The first line of a file; None: it cannot be read."""
    return _read(data[: _line_end(data, 0)])


def last_line(data: Data) -> Line | None:
    """The last line of a file, sound or not; None: it cannot be read."""
    return _read(data[data.rfind(b"\n", 0, max(0, len(data) - 1)) + 1 :])


def _last_signed(data: Data, key: str) -> tuple[int, Line | None]:
    """The last checkpoint that this key has signed, and where its line begins."""
    begin = len(data)
    while (found := data.rfind(_SIGNATURE, 0, begin)) >= 0:
        begin = data.rfind(b"\n", 0, found) + 1
        line = _read(data[begin : _line_end(data, found)])
        if line is not None and line.event is None and line.key == key and is_signed(line):
            return begin, line
    return 0, None


def _digest_of(data: Data, end: int, seq: int) -> str | None:
    """The hash of the last line before `end`, over all of the file; None: this is not how it begins."""
    first = first_line(data)
    if first is None or first.seq != seq:
        return None
    digest = bytes.fromhex(first.prev)
    for piece in _lines(data, 0, end):
        digest = hashlib.sha256(digest + piece[:-1]).digest()
    return digest.hex()


def _read_on(data: Data, at: int, head: Head) -> tuple[int, Head]:
    """The events behind the last checkpoint, as far as each follows from the one before."""
    for piece in _lines(data, at):
        line = _read(piece)
        if line is None or line.event is None or (line.seq, line.prev) != (head.seq, head.digest):
            break
        at, head = at + len(piece), Head(line.seq + 1, line.digest, head.unsigned + 1)
    return at, head


def _behind(data: Data, at: int, head: Head, least: int) -> Head:
    """What a line behind all this can follow from: a number that no line here has, and the last one's hash."""
    limit = head.seq + len(data)  # a number beyond is none of this file's: each of its lines has bytes
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
    """Whether it is a line of which blocks, or the end, are missing."""
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
    """The lines with their ends, the last one perhaps without."""
    end = len(data) if end is None else end
    while at < end:
        after = min(end, _line_end(data, at))
        yield data[at:after]
        at = after


def _line_end(data: Data, at: int) -> int:
    """Behind the line that this byte is in."""
    found = data.find(b"\n", at)
    return len(data) if found < 0 else found + 1
