"""What opened a sum is in no file of the coordinator after its round, and the journal replays without it."""

import os
import sqlite3
from contextlib import closing

import pytest

from atoll.server.journal.codec import encode_event
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, Entry
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.rounds.session_events import SharesRevealed
from tests.server.journal.test_journal import run_row

SHARES = 64 * 33
"""Bytes of a reveal in a session of 64: more than a page of the file has room for, in hexadecimal digits."""


def entries(contents):
    events = [SharesRevealed(f"site-{number}", 1, 0, 1, content) for number, content in enumerate(contents)]
    return [Entry("r", seq, 1.0, *encode_event(event)) for seq, event in enumerate(events, 1)]


def files_with(folder, contents):
    """Return the files with a piece of the contents, in the middle of which no header of a page lies."""
    pieces = [content[at : at + 64].encode() for content in contents for at in range(0, len(content) - 64, 256)]
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name for path in found if any(piece in path.read_bytes() for piece in pieces)}


@pytest.mark.parametrize("database_url", [""], ids=["sqlite"])
@pytest.mark.parametrize("size", [33, SHARES])
def test_revealed_shares_are_in_no_file_after_their_round(tmp_path, database_url, size):
    contents = [os.urandom(size).hex() for _ in range(20)]
    with StateDirectory.open(tmp_path / "state", database=database_url) as state:
        journal = Journal(state)
        journal.commit(Batch(runs=[run_row()], entries=entries(contents)))
        assert files_with(tmp_path, contents), "the test finds what is there"
        journal.commit(Batch(forgotten=[("r", 20)]))
        assert files_with(tmp_path, contents) == set()
        rows = journal.load("r").entries
        assert [row.event.content for row in rows] == [""] * 20
        journal.commit(Batch(entries=[entries(["00"] * 21)[-1]]))
    assert files_with(tmp_path, contents) == set()


@pytest.mark.parametrize("database_url", [""], ids=["sqlite"])
def test_a_reader_delays_the_end_of_the_log_and_nothing_else(tmp_path, database_url):
    contents = [os.urandom(SHARES).hex() for _ in range(5)]
    with StateDirectory.open(tmp_path / "state", database=database_url) as state:
        journal = Journal(state)
        journal.commit(Batch(runs=[run_row()], entries=entries(contents)))
        with closing(sqlite3.connect(tmp_path / "state" / "state.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM journal").fetchone() == (5,)
            journal.commit(Batch(forgotten=[("r", 5)]))
            assert files_with(tmp_path, contents) <= {"state.db", "state.db-wal"}
        journal.commit(Batch(forgotten=[("r", 5)]))
        assert files_with(tmp_path, contents) == set()
