"""The file of an offline run of Weights & Biases: the log format of LevelDB, with a separate header.

    header  ":W&B", 0xbee1 (u16), 0 (u8)
    block   32,768 bytes; a record that does not fit is split, and fewer than seven bytes at the end stay empty
    record  CRC-32 of kind and bytes (u32), length (u16), kind (u8: 1 whole, 2 first, 3 middle, 4 last part), bytes

Source: the reader and writer of the package `wandb` (leveldb's log_format.md). All numbers are little-endian. Pure.
"""

import struct
from zlib import crc32

HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
BLOCK = 32_768
HEAD = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def framed(record: bytes, place: int) -> bytes:
    """Return the bytes of a record that begins at a place of the file."""
    found, at, is_begun = bytearray(), 0, False
    while True:
        left = BLOCK - (place + len(found)) % BLOCK
        if left < HEAD.size:
            found += bytes(left)
            left = BLOCK
        part = record[at : at + left - HEAD.size]
        at += len(part)
        is_end = at == len(record)
        kind = (LAST if is_begun else WHOLE) if is_end else (MIDDLE if is_begun else FIRST)
        found += HEAD.pack(crc32(part, crc32(bytes([kind]))), len(part), kind) + part
        if is_end:
            return bytes(found)
        is_begun = True


def read_records(content: bytes) -> tuple[list[bytes], list[int]]:
    """Return the whole records of a file, and the end of each; a record that was cut off, and all after it, is left."""
    records: list[bytes] = []
    ends: list[int] = []
    at, parts = len(HEADER), b""
    while True:
        if (left := BLOCK - at % BLOCK) < HEAD.size:
            at += left
        if at + HEAD.size > len(content):
            return records, ends
        checksum, length, kind = HEAD.unpack_from(content, at)
        part = content[at + HEAD.size : at + HEAD.size + length]
        if len(part) < length or kind not in (WHOLE, FIRST, MIDDLE, LAST):
            return records, ends
        if checksum != crc32(part, crc32(bytes([kind]))):
            return records, ends
        at += HEAD.size + length
        parts += part
        if kind in (WHOLE, LAST):
            records.append(parts)
            ends.append(at)
            parts = b""
