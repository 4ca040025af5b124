"""The migrations of a journal with content, in a file and on a server: what was read before is read after."""

import json
import logging

from sqlalchemy import Connection, delete, select, text, update

from atoll.protocol.paging import Paging
from atoll.server.journal import checksums, schema
from atoll.server.journal.codec import encode_ledger_without_members, encode_page
from atoll.server.journal.journal import Journal
from atoll.server.journal.member_rows import Page
from atoll.server.journal.rows import Batch, Snapshot
from atoll.server.journal.schema import MEMBERS, MEMBERS_BY_PAGE, META, PARTICIPATIONS, ROUNDS, SNAPSHOTS, SUMMARIES
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Member, Profile
from atoll.server.views.history import History
from atoll.server.views.views import View, look
from tests.server.views.test_history import write_history

NAMES = ["d", "c", "b", "a"]


def to_third_schema(connection: Connection) -> None:
    """Undo the migration from the third schema, whose pages of members are in the order of joining."""
    PARTICIPATIONS.drop(connection)
    SUMMARIES.drop(connection)
    MEMBERS_BY_PAGE.drop(connection)
    connection.execute(delete(MEMBERS).where(MEMBERS.c.page < 0))
    connection.execute(update(META).where(META.c.key == "schema_version").values(value="3"))


def with_members(state: StateDirectory) -> None:
    """Put members on a complete set and on a later page, out of order, as the third schema has them."""
    journal = Journal(state)
    recovered = journal.load("r")
    ledger, seq = recovered.ledger, recovered.snapshot_seq
    ledger.membership.members.clear()
    ledger.membership.members.update({name: Member(Profile(5, name), software="old") for name in NAMES})
    ledger.membership.counted("b", 7)
    body = encode_ledger_without_members(ledger)
    everyone = encode_page(ledger.membership.members, NAMES)
    later = encode_page(ledger.membership.members, ["b"])
    journal.commit(
        Batch(
            snapshots=[Snapshot("r", seq, 50.0, body, seq - 1, len(NAMES))],
            members=[Page("r", seq - 1, 0, everyone), Page("r", seq, 0, later)],
        )
    )


def test_a_journal_of_the_third_schema_is_read_as_before(tmp_path, database_url):
    with StateDirectory.open(tmp_path / "state", database=database_url) as state:
        write_history(state)
        with_members(state)
        before, membership = History(state.path), Journal(state).load("r").ledger.membership
        rounds, shown = before.rounds("r"), look(before, View.ROUNDS, "r")["rows"]
        whole = look(before, View.CLIENTS, "r")["rows"]
        with state.database.transaction() as connection:
            to_third_schema(connection)
    with StateDirectory.open(tmp_path / "state") as state, state.database.transaction() as connection:
        assert schema.check_version(connection, "it") == schema.SCHEMA_VERSION
        assert [*connection.scalars(select(MEMBERS.c.page).order_by(MEMBERS.c.page))] == [-1, 0]
    with StateDirectory.open(tmp_path / "state") as state:
        history = History(state.path)
        assert Journal(state).load("r").ledger.membership == membership
        assert history.rounds("r") == rounds
        assert look(history, View.ROUNDS, "r")["rows"] == shown
        assert look(history, View.CLIENTS, "r")["rows"] == whole
        page = look(history, View.CLIENTS, "r", paging=Paging(2, after="a"))
        assert [row["client"] for row in page["rows"]] == ["b", "c"]
        assert [row["client"] for row in whole] == sorted(NAMES)


def test_a_damaged_record_does_not_stop_the_migration(tmp_path, caplog):
    with StateDirectory.open(tmp_path / "state") as state:
        write_history(state)
        with state.database.transaction() as connection:
            to_third_schema(connection)
            connection.execute(update(ROUNDS).where(ROUNDS.c.round_id == 2).values(record="{"))
    with caplog.at_level(logging.ERROR), StateDirectory.open(tmp_path / "state") as state:
        rows = look(History(state.path), View.ROUNDS, "r")["rows"]
    assert 2 not in [row["round"] for row in rows]
    assert 1 in [row["round"] for row in rows]
    assert "run r, round 2: not a RoundRecord" in caplog.text
    assert "the lists of rounds are without it" in caplog.text


def test_a_damaged_snapshot_does_not_stop_the_migration(tmp_path):
    with StateDirectory.open(tmp_path / "state") as state:
        write_history(state)
        ledger = Journal(state).load("r").ledger
        with state.database.transaction() as connection:
            newest = connection.scalar(select(SNAPSHOTS.c.seq).order_by(SNAPSHOTS.c.seq.desc()).limit(1))
            connection.execute(update(SNAPSHOTS).where(SNAPSHOTS.c.seq == newest).values(checksum=0))
            to_third_schema(connection)
    with StateDirectory.open(tmp_path / "state") as state:
        recovered = Journal(state).load("r")
        assert recovered.snapshot_seq < newest
        assert recovered.replay(Journal(state).runs()[0].rules).ledger.version == ledger.version


def test_the_checksums_of_a_migrated_journal_hold(tmp_path):
    with StateDirectory.open(tmp_path / "state") as state:
        write_history(state)
        with_members(state)
        with state.database.transaction() as connection:
            to_third_schema(connection)
    with StateDirectory.open(tmp_path / "state") as state, state.database.transaction() as connection:
        for row in connection.execute(select(MEMBERS)):
            assert checksums.of_page(row) == row.checksum
        for row in connection.execute(select(SNAPSHOTS)):
            assert checksums.of_snapshot(row) == row.checksum
        contents = connection.scalar(select(MEMBERS.c.body).where(MEMBERS.c.page == -1))
        assert json.loads(contents) == ["a"]
        assert connection.scalar(text("SELECT count(*) FROM snapshots")) == 1
