"""A journal by hand with `sqlite3`: the duties of ours, and nothing else.

Every entry has a checksum, a commit is on disk when it returns (write-ahead log, one fdatasync), and entries that a
snapshot has replaced are deleted. There is one run, so a row's key is its number alone. No schema version, no other
database, no names for errors.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 1000", f"journal_size_limit = {8 << 20}")
TABLES = (
    "journal (seq INTEGER PRIMARY KEY, at REAL, kind TEXT, body TEXT, checksum INTEGER)",
    "updates (digest TEXT PRIMARY KEY, meta TEXT, data BLOB)",
    "pages (seq INTEGER, page INTEGER, body TEXT, checksum INTEGER, PRIMARY KEY (seq, page))",
    "records (round INTEGER PRIMARY KEY, body TEXT)",
)

Entry = tuple[int, float, str, str]
"""Number, time, kind, body."""
Update = tuple[str, str, bytes]
"""Digest, metadata, bytes."""
Page = tuple[int, int, str]
"""Number of the last entry that it takes into account, number of the page, body."""


class TightJournal:
    """The journal of one run, in one file; for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in PRAGMAS:
            self._database.execute(f"PRAGMA {pragma}")
        for table in TABLES:
            self._database.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    def commit(
        self,
        entries: Iterable[Entry] = (),
        updates: Iterable[Update] = (),
        pages: Iterable[Page] = (),
        record: tuple[int, str] | None = None,
    ) -> None:
        """Write all of it in one transaction."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", (_checked(*entry) for entry in entries))
        database.executemany("INSERT INTO updates VALUES (?, ?, ?)", updates)
        database.executemany(
            "INSERT INTO pages VALUES (?, ?, ?, ?)", ((*page, zlib.crc32(page[2].encode())) for page in pages)
        )
        if record is not None:
            database.execute("INSERT INTO records VALUES (?, ?)", record)
        database.execute("COMMIT")

    def prune(self, newest: int) -> None:
        """Delete all updates, and the entries up to this one."""
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("DELETE FROM updates")
        self._database.execute("DELETE FROM journal WHERE seq <= ?", (newest,))
        self._database.execute("COMMIT")

    def updates(self) -> list[bytes]:
        """Read back the bytes of all updates."""
        return [data for (data,) in self._database.execute("SELECT data FROM updates")]

    def pages(self) -> Iterator[tuple[int, str]]:
        """Read back all pages, each checked, the oldest first: the last entry that it has, and its body."""
        for seq, body, checksum in self._database.execute("SELECT seq, body, checksum FROM pages ORDER BY seq, page"):
            assert zlib.crc32(body.encode()) == checksum
            yield seq, body

    def num_records(self) -> int:
        """Count the rounds that have ended."""
        count: int = self._database.execute("SELECT count(*) FROM records").fetchone()[0]
        return count

    def entries(self, after: int) -> Iterator[Entry]:
        """Read back all entries behind this one, each checked."""
        rows = self._database.execute("SELECT * FROM journal WHERE seq > ? ORDER BY seq", (after,))
        for seq, at, kind, body, checksum in rows:
            assert _checked(seq, at, kind, body)[-1] == checksum
            yield seq, at, kind, body


def _checked(seq: int, at: float, kind: str, body: str) -> tuple[int, float, str, str, int]:
    return seq, at, kind, body, zlib.crc32(f"{seq}\0{at!r}\0{kind}\0{body}".encode())
