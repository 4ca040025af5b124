"""The checksums of the journal's rows: CRC-32 of the values of a row, so that a damaged row is never replayed."""

import zlib
from typing import Any


def of_entry(seq: int, at: float, kind: str, body: str) -> int:
    """Return the checksum of an entry."""
    return _crc32(seq, at, kind, body)


def of_snapshot(row: Any) -> int:
    """Return the checksum of a snapshot: a row to write, or one of the table.

    Snapshots of schema version 2 have no pages of members; their checksum covers only the time and the body.
    """
    members = (str(row.first), str(row.num_members)) if row.num_members else ()
    return _crc32(row.seq, row.at, row.body, *members)


def of_page(row: Any) -> int:
    """Return the checksum of a page of members: a row to write, or one of the table."""
    return _crc32(row.seq, 0.0, str(row.page), row.body)


def _crc32(seq: int, at: float, *parts: str) -> int:
    return zlib.crc32("\0".join((str(seq), repr(float(at)), *parts)).encode())  # `at` as the stored float
