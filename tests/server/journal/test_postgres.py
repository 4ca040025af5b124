"""The journal on a server that is away, belongs to another coordinator, answers late, or has lost a commit."""

import dataclasses
import logging
import os
import re
import threading

import pytest
from sqlalchemy import inspect, select

from atoll.ground.durable import DiskFull
from atoll.protocol.vocabulary import RunState
from atoll.server.errors import DatabaseAway, StateInUse, StateUnusable, StoreCorrupted
from atoll.server.journal import migrations, schema
from atoll.server.journal.binding import binding_of
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, EvaluationRow, RunChange, VersionRow
from atoll.server.journal.schema import SCHEMA_VERSION, StateTooNew
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views.history import History
from tests.server.journal.test_journal import entry, run_row, snapshot

pytest.importorskip("psycopg", reason="the driver is not installed: pip install -c constraints.txt -e '.[dev]'")

from atoll.server.journal.postgres import PostgresDatabase
from atoll.server.journal.postgres_session import Server, faults_of
from tests.server.journal.wiretap import Wiretap

GOOD = Server(150018, "UTF8", "on", "on", "on", False, "public", True)


def terminate(server, schema):
    """End the session that holds a schema's lock, as an operator or a broken connection does."""
    (ended,) = server.sql(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted "
        f"AND objid = '{schema}'::regnamespace::oid"
    )
    assert ended == (True,)


@pytest.fixture
def name(postgres_server):
    return postgres_server.new_schema()


@pytest.fixture
def state(tmp_path, postgres_server, name):
    with StateDirectory.open(tmp_path / "state", database=postgres_server.url(name)) as opened:
        yield opened


# ---------------------------------------------------------------- the checks of a server


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 130022}, "version is 13; allowed: PostgreSQL 14 or later"),
        ({"encoding": "SQL_ASCII"}, "encoding is SQL_ASCII; allowed: UTF8"),
        ({"synchronous_commit": "off"}, r"synchronous_commit is off; allowed: on \| remote_apply"),
        ({"synchronous_commit": "local"}, "synchronous_commit is local"),
        ({"fsync": "off"}, "fsync is off; allowed: on"),
        ({"full_page_writes": "off"}, "full_page_writes is off"),
        ({"is_standby": True}, "it is a standby"),
        ({"schema": None, "may_create": None}, "names no existing schema"),
        ({"may_create": False}, "may not create tables in the schema public"),
    ],
)
def test_a_server_that_does_not_keep_what_it_confirms_is_refused(changes, fault):
    assert list(faults_of(GOOD)) == []
    (found,) = faults_of(dataclasses.replace(GOOD, **changes))
    assert re.search(fault, found)


def test_everything_that_is_wrong_with_a_server_is_said_at_once():
    bad = dataclasses.replace(GOOD, version=90600, encoding="LATIN1", synchronous_commit="off", fsync="off")
    assert len(list(faults_of(bad))) == 4
    assert len(list(faults_of(bad, read_only=True))) == 2


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{schema}%20-csynchronous_commit%3Doff", "synchronous_commit is off"),
        ("nowhere", "its search path names no existing schema"),
    ],
)
def test_a_real_server_is_asked_before_anything_is_written(tmp_path, postgres_server, name, path, why):
    with pytest.raises(StateUnusable, match=why):
        StateDirectory.open(tmp_path, database=postgres_server.url(path.format(schema=name)))
    made = postgres_server.sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{name}'")
    assert made == [(0,)]
    StateDirectory.open(tmp_path, database=postgres_server.url(name)).close()  # the directory was let go


def test_what_was_promised_at_the_start_holds_for_the_session(state, postgres_server):
    postgres_server.sql("ALTER SYSTEM SET synchronous_commit = off")
    try:
        postgres_server.sql("SELECT pg_reload_conf()")
        with state.database.transaction() as connection:
            assert connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    finally:
        postgres_server.sql("ALTER SYSTEM RESET synchronous_commit")
        postgres_server.sql("SELECT pg_reload_conf()")


def test_a_password_is_needed_and_is_told_to_nobody(tmp_path, postgres_server, name, caplog):
    caplog.set_level(logging.DEBUG)
    with StateDirectory.open(tmp_path / "good", database=postgres_server.tcp_url(name)) as state:
        assert "s3cret" not in (state.path / "database.json").read_text()
        assert "s3cret" not in state.database.name
    with pytest.raises(DatabaseAway, match="password authentication failed for user") as wrong:
        StateDirectory.open(tmp_path / "bad", database=postgres_server.tcp_url(name, password="n0t%2Fit"))
    assert "n0t" not in str(wrong.value)
    assert not any(secret in caplog.text for secret in ("s3cret", "n0t"))


@pytest.mark.parametrize("url", ["postgresql:///atoll?host=/nowhere", "postgresql://127.0.0.1:1/atoll"])
def test_a_server_that_is_not_there_is_named(tmp_path, url):
    with pytest.raises(DatabaseAway, match="cannot be reached: connection"):
        StateDirectory.open(tmp_path, database=url)
    with pytest.raises(DatabaseAway, match="cannot be reached"):
        History(tmp_path, url)


# ---------------------------------------------------------------- the content of the tables


def test_it_has_the_tables_of_the_file_and_is_migrated_like_it(tmp_path, schema_url, monkeypatch):
    with StateDirectory.open(tmp_path, database=schema_url) as state, state.database.transaction() as connection:
        assert set(inspect(connection).get_table_names()) == set(schema.metadata.tables)
        assert schema.check_version(connection, "it") == SCHEMA_VERSION
    monkeypatch.setattr(schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    steps = {SCHEMA_VERSION: lambda c: c.exec_driver_sql("CREATE TABLE one (a INTEGER)")}
    monkeypatch.setattr(migrations, "MIGRATIONS", steps)
    with StateDirectory.open(state.path) as again, again.database.transaction() as connection:
        assert "one" in inspect(connection).get_table_names()
    monkeypatch.undo()
    with pytest.raises(StateTooNew, match=f"schema version {SCHEMA_VERSION + 1}, this Atoll knows up to"):
        StateDirectory.open(state.path)


def test_numbers_and_text_come_back_that_only_a_file_would_take(state):
    journal = Journal(state)
    at = 1762000000.1234567
    nan, big = float("nan"), 3 << 40
    evaluation = EvaluationRow("r", 1, "clients", {"a": (nan, float("inf"))}, 1, "a\0b \U0001f40b", at)
    journal.add_run(run_row())
    journal.commit(
        Batch(
            entries=[entry(1, at=at)],
            versions=[VersionRow("r", big, "d", big, at)],
            evaluations=[evaluation],
            changes=[RunChange("r", RunState.FAILED, "ended\0", at)],
        )
    )
    history = History(state.path)
    (found,) = history.evaluations("r")
    assert repr(found.statistics["a"]) == "(nan, inf)"
    assert found.detail == "a\ufffdb \U0001f40b"
    assert history.versions("r") == [VersionRow("r", big, "d", big, at)]
    assert journal.load("r").entries[0].at == at
    assert history.run("r").cause == "ended\ufffd"


def test_a_reader_needs_only_the_url(state, tmp_path, postgres_server, name):
    Journal(state).add_run(run_row())
    history = History(tmp_path / "elsewhere", postgres_server.url(name))
    assert [row.run_id for row in history.runs()] == ["r"]
    assert history.coordinator() is None
    assert not (tmp_path / "elsewhere").exists()


# ---------------------------------------------------------------- the lock and the binding


def test_a_second_coordinator_is_told_who_has_the_schema(state, tmp_path, postgres_server, name):
    with pytest.raises(StateInUse, match=rf"is in use by a coordinator on \S+ with its state in {state.path}"):
        StateDirectory.open(tmp_path / "other", database=postgres_server.url(name))
    other = postgres_server.url(postgres_server.new_schema())
    with StateDirectory.open(tmp_path / "other", database=other) as beside:
        Journal(beside).add_run(run_row())
    assert Journal(state).runs() == []


def test_whoever_was_taken_over_writes_nothing_more(state, postgres_server, name):
    journal = Journal(state)
    journal.commit(Batch(entries=[entry(1)]))
    terminate(postgres_server, name)
    second = PostgresDatabase(postgres_server.url(name), state="/somewhere")
    with second.transaction() as connection:
        second.settle(connection)
    second.close()
    with pytest.raises(StateInUse, match=r"taken over by a coordinator on .* with its state in /somewhere"):
        journal.commit(Batch(entries=[entry(2)]))
    assert postgres_server.sql(f"SELECT seq FROM {name}.journal") == [(1,)]


def test_a_session_that_lost_its_lock_without_knowing_is_stopped_by_its_signature(state, postgres_server, name):
    """A pooler may give the lock to another session; the signature still protects what is written."""
    postgres_server.sql(f"UPDATE {name}.meta SET value = 'stranger 7' WHERE key = 'writer'")
    with pytest.raises(StateInUse, match="has been taken over"):
        Journal(state).commit(Batch(entries=[entry(1)]))
    assert postgres_server.sql(f"SELECT count(*) FROM {name}.journal") == [(0,)]


def test_a_directory_and_its_database_know_each_other(tmp_path, postgres_server, name):
    with StateDirectory.open(tmp_path / "state", database=postgres_server.url(name)) as state:
        Journal(state).add_run(run_row())
        (state.path / "runs" / "r").mkdir()
    with StateDirectory.open(state.path) as again:  # it says itself where its journal is
        assert [row.run_id for row in Journal(again).runs()] == ["r"]
        assert again.database.dialect == "postgresql"
    with pytest.raises(
        StateUnusable, match=r"holds the runs of a coordinator on .*not in .*other: name that directory"
    ):
        StateDirectory.open(tmp_path / "other", database=postgres_server.url(name))
    empty = postgres_server.url(postgres_server.new_schema())
    with pytest.raises(StoreCorrupted, match=r"is missing or empty, but .* holds the files of runs"):
        StateDirectory.open(state.path, database=empty)
    StateDirectory.open(tmp_path / "file").close()
    with pytest.raises(StateUnusable, match=r"has its journal in state\.db"):
        StateDirectory.open(tmp_path / "file", database=empty)
    assert binding_of(tmp_path / "file") is None


def test_somebody_elses_tables_are_left_alone(tmp_path, postgres_server, name):
    postgres_server.sql(f"CREATE TABLE {name}.theirs (a INTEGER)")
    with pytest.raises(StoreCorrupted, match="no database of Atoll"):
        StateDirectory.open(tmp_path, database=postgres_server.url(name))
    assert postgres_server.sql(f"SELECT tablename FROM pg_tables WHERE schemaname = '{name}'") == [("theirs",)]


# ---------------------------------------------------------------- broken connections


@pytest.fixture
def tap(postgres_server):
    to = postgres_server.url().partition("host=")[2].partition("&")[0]
    relay = Wiretap(f"{to}/.s.PGSQL.{postgres_server.port}")
    yield relay
    relay.close()


@pytest.mark.parametrize("how", ["before", "after", "silently"])
def test_a_commit_during_which_the_line_breaks_takes_place_once(tmp_path, postgres_server, name, tap, how, monkeypatch):
    monkeypatch.setattr("atoll.server.journal.postgres.RETRY_S", 0.01)
    url = f"postgresql://atoll@127.0.0.1:{tap.port}/postgres?sslmode=disable&options=-csearch_path%3D{name}"
    with StateDirectory.open(tmp_path / "state", database=url) as state:
        journal = Journal(state)
        journal.add_run(run_row())
        journal.commit(Batch(entries=[entry(1)]))
        tap.plan = [None, how, how]
        journal.commit(Batch(entries=[entry(2)]))
        journal.commit(Batch(entries=[entry(3)], snapshots=[snapshot(3)]))  # twice the same number would be refused
        journal.add_run(run_row("q"))
        assert tap.broken == [how, how]
        assert journal.load("r").seq == 3
        assert [row.run_id for row in journal.runs()] == ["r", "q"]
        journal.commit(Batch(entries=[entry(4)]))
    assert postgres_server.sql(f"SELECT seq FROM {name}.journal ORDER BY seq") == [(1,), (2,), (3,), (4,)]


def test_a_server_that_forgot_what_it_had_confirmed_is_found_out(state, postgres_server, name):
    journal = Journal(state)
    backup = postgres_server.sql(f"SELECT value FROM {name}.meta WHERE key = 'writer'")[0][0]
    journal.commit(Batch(entries=[entry(1)]))
    postgres_server.sql(f"UPDATE {name}.meta SET value = '{backup}' WHERE key = 'writer'")
    terminate(postgres_server, name)
    with pytest.raises(StoreCorrupted, match="had confirmed 2: it was replaced by an older copy"):
        journal.commit(Batch(entries=[entry(2)]))


def test_nothing_that_was_confirmed_is_lost_when_the_server_crashes(state, postgres_server, name, caplog):
    journal, told, enough = Journal(state), [], threading.Event()

    def write():
        seq = 0
        while not enough.is_set():
            journal.commit(Batch(entries=[entry(seq + i) for i in (1, 2, 3)]))
            seq += 3
            told.append(seq)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for restart in range(3):
            goes_on(told, 20)
            postgres_server.crash() if restart % 2 == 0 else postgres_server.stop()
            postgres_server.start()
            goes_on(told, 2)
    finally:
        enough.set()
        writer.join()
    assert "the journal waits for its database" in caplog.text
    assert journal.load("r").seq == told[-1]  # it reads every entry, in order, without a gap
    (count,) = postgres_server.sql(f"SELECT count(*) FROM {name}.journal")[0]
    assert count == told[-1]


def goes_on(told, count):
    """Wait until `count` more commits have been confirmed."""
    pause, enough = threading.Event(), len(told) + count
    for _ in range(6000):
        if len(told) >= enough:
            return
        pause.wait(0.01)
    raise AssertionError("it takes too long")


def test_a_server_that_is_away_is_noticed_by_whatever_asks_first(state, postgres_server):
    """A coordinator without work asks for its members now and then, and waits for no answer."""
    database = state.database
    postgres_server.crash()
    try:
        with pytest.raises(DatabaseAway), database.transaction():
            pass
        assert database.away
    finally:
        postgres_server.start()
    with database.transaction():
        pass
    assert database.away == ""


def test_who_waits_for_the_server_is_let_go_when_the_coordinator_ends(state, postgres_server):
    journal, caught = Journal(state), []
    postgres_server.crash()
    try:

        def write():
            try:
                journal.commit(Batch(entries=[entry(1)]))
            except DatabaseAway as error:
                caught.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        journal.close()
        writer.join(30)
        assert not writer.is_alive()
    finally:
        postgres_server.start()
    assert len(caught) == 1


def test_a_full_disk_is_named_and_the_batch_may_be_tried_again(state, postgres_server, name):
    """A trigger raises the server's error of a full disk."""
    journal = Journal(state)
    postgres_server.sql(
        f"CREATE FUNCTION {name}.no_room() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END$$"
    )
    postgres_server.sql(f"CREATE TRIGGER no_room BEFORE INSERT ON {name}.journal EXECUTE FUNCTION {name}.no_room()")
    batch = Batch(entries=[entry(1)], versions=[VersionRow("r", 1, "d", 5, 1.0)])
    for _ in range(2):
        with pytest.raises(DiskFull, match="no room: could not extend file"):
            journal.commit(batch)
    with state.database.transaction() as connection:
        assert connection.execute(select(schema.VERSIONS)).all() == []
    postgres_server.sql(f"DROP TRIGGER no_room ON {name}.journal")
    journal.commit(batch)
    assert journal.load("r").seq == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="makes no difference to another user")
def test_the_server_of_the_tests_does_not_run_as_root(postgres_server):
    assert postgres_server._process is not None
    assert os.stat(f"/proc/{postgres_server._process.pid}").st_uid != 0
