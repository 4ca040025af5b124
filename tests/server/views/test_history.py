import os
import shutil
import sqlite3

import pytest

from atoll.protocol.vocabulary import Phase, RunState
from atoll.server.errors import StateUnusable, StoreCorrupted
from atoll.server.journal.codec import encode_ledger, encode_record
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, EvaluationRow, RecordRow, RunChange, Snapshot, VersionRow
from atoll.server.journal.schema import StateTooNew
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.rounds import events as ev
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.views.history import History
from tests.server.journal.test_codec import RULES, some_history
from tests.server.journal.test_journal import entry, run_row

HISTORY = list(some_history())
IN_ROUND_4 = next(i for i, (at, _) in enumerate(HISTORY) if at == 43.0) + 1


def write_history(state, count=None):
    """Write what the driver does: entries, records and snapshots of the first `count` events."""
    journal = Journal(state)
    journal.add_run(run_row())
    machine = RunMachine(RULES)
    for seq, (at, event) in enumerate(HISTORY[:count], start=1):
        batch = Batch(entries=[entry(seq, event, at=at)])
        for effect in machine.receive(event, at):
            match effect:
                case ev.Commit(round_id, version, digest):
                    batch.versions.append(VersionRow("r", version, digest, 10, at))
                    record = machine.record_of(round_id)
                    batch.records.append(RecordRow("r", encode_record(record), record))
                case ev.Abandon(round_id) | ev.AmendRecord(round_id):
                    record = machine.record_of(round_id)
                    batch.records.append(RecordRow("r", encode_record(record), record))
                case ev.EndRun(end, cause):
                    batch.changes.append(RunChange("r", end, cause, at))
                case ev.CloseEvaluation(version, answers):
                    batch.evaluations.append(EvaluationRow("r", version, "clients", answers["c"], 1, "", at))
        if batch.records and machine.may_snapshot:
            batch.snapshots.append(Snapshot("r", seq, at, encode_ledger(machine.ledger)))
        if seq == 1:
            batch.changes.append(RunChange("r", RunState.RUNNING))
        journal.commit(batch)
    return machine


@pytest.fixture
def state(tmp_path, database_url):
    with StateDirectory.open(tmp_path / "state", database=database_url) as opened:
        yield opened


only_sqlite = pytest.mark.parametrize("database_url", [""], ids=["sqlite"])


def test_ended_rounds_come_from_their_records_and_the_open_one_from_the_journal(state):
    machine = write_history(state, IN_ROUND_4)
    rounds = History(state.path).rounds("r")
    assert [record.round_id for record in rounds] == [1, 2, 3, 4]
    assert [record.phase for record in rounds] == ["committed", "committed", "abandoned", "collecting"]
    assert rounds[3] == machine.round.record
    assert rounds[2] == machine.ledger.past[3]
    assert rounds[2].clients["c"].digest == "c3"  # a late update that came after the round's end
    assert History(state.path).round("r", 4) == machine.round.record
    assert History(state.path).round("r", 1).version == 1


@only_sqlite
def test_a_history_is_read_whether_the_coordinator_lives_has_ended_or_was_killed(state, tmp_path):
    write_history(state)
    alive = History(state.path).rounds("r")
    killed = tmp_path / "killed"
    shutil.copytree(state.path, killed)
    state.database.close()
    ended = tmp_path / "ended"
    shutil.copytree(state.path, ended)
    assert (killed / "state.db-wal").exists()
    assert not (ended / "state.db-wal").exists()
    for path in (killed, ended):
        before = (path / "state.db").read_bytes()
        history = History(path)
        assert history.rounds("r") == alive
        assert history.machine("r").ledger.version == 3
        assert history.coordinator() is None
        assert (path / "state.db").read_bytes() == before
        with StateDirectory.open(path):
            assert history.rounds("r") == alive


def test_a_history_follows_a_coordinator_that_goes_on(state):
    history = History(_made(state).path)
    journal = Journal(state)
    assert history.runs() == []
    journal.add_run(run_row())
    assert [row.run_id for row in history.runs()] == ["r"]
    for seq, (at, event) in enumerate(HISTORY[:8], start=1):
        journal.commit(Batch(entries=[entry(seq, event, at=at)]))
        assert history.machine("r").ledger.now == at


def _made(state):
    with state.database.transaction():
        return state


def test_runs_are_found_by_id_and_by_name_newest_first(state):
    journal = Journal(state)
    for run_id in ("r-1", "r-2", "run"):
        journal.add_run(run_row(run_id))
    journal.add_run(run_row("r-3"))
    history = History(state.path)
    assert history.run("r-1").run_id == "r-1"
    assert history.run("run").run_id == "run"  # an id before a name, which all four have
    with pytest.raises(LookupError, match="there is no run 'x' \\(known: r-1, r-2, run, r-3\\)"):
        history.run("x")
    with pytest.raises(LookupError, match="run r-1 has no record of a round 7"):
        history.round("r-1", 7)


def test_versions_evaluations_and_the_end_are_told(state):
    write_history(state)
    history = History(state.path)
    assert [(row.version, row.digest) for row in history.versions("r")] == [(1, "m1"), (2, "m2"), (3, "m3")]
    assert history.evaluations("r") == [EvaluationRow("r", 2, "clients", {"accuracy": (1.0, 2.0)}, 1, "", 23.5)]
    row = history.run("r")
    assert (row.state, row.cause, row.ended_at) == (RunState.STOPPED, "enough", 45.0)
    assert row.rules == RULES


def test_clients_are_connected_only_while_a_coordinator_runs(state):
    write_history(state, IN_ROUND_4)
    history = History(state.path)
    membership = history.membership("r")
    assert [membership.is_connected(client) for client in "abc"] == [False, False, False]
    state.announce("127.0.0.1:1", "127.0.0.1:2", os.getpid())
    membership = history.membership("r")
    assert sorted(membership.members) == ["a", "b", "c"]
    assert [membership.members[client].session for client in "abc"] == ["s-a2", "s-b2", "s-c2"]
    assert [membership.is_connected(client) for client in "abc"] == [True, True, True]
    assert membership.members["a"].train_seconds == 1.7


def test_a_writer_is_not_disturbed_by_a_reader_that_takes_its_time(state):
    write_history(state)
    history = History(state.path)
    journal = Journal(state)
    with history._database.transaction() as reading:
        before = reading.exec_driver_sql("SELECT count(*) FROM journal").scalar()
        journal.commit(Batch(entries=[entry(len(HISTORY) + 1, at=99.0)]))
        assert reading.exec_driver_sql("SELECT count(*) FROM journal").scalar() == before  # one instant
    assert journal.load("r").seq == len(HISTORY) + 1


def test_a_reader_can_change_nothing(state):
    write_history(state)
    with (
        pytest.raises(StateUnusable, match=r"readonly|read-only"),
        History(state.path)._database.transaction() as connection,
    ):
        connection.exec_driver_sql("DELETE FROM journal")


def test_what_is_no_state_directory_is_refused(tmp_path):
    with pytest.raises(StateUnusable, match=r"there is no state\.db in it"):
        History(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_or_damaged_directory_is_refused(tmp_path):
    StateDirectory.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute("UPDATE meta SET value = '99'")
    connection.close()
    with pytest.raises(StateTooNew, match="schema version 99"):
        History(tmp_path)
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreCorrupted, match=r"state\.db: damaged"):
        History(tmp_path)


def test_a_damaged_record_names_its_round(state):
    write_history(state)
    with state.database.transaction() as connection:
        connection.exec_driver_sql("UPDATE rounds SET record = '{}' WHERE round_id = 2")
        connection.exec_driver_sql("UPDATE runs SET config = '{}'")
    with pytest.raises(StoreCorrupted, match="run r, round 2: not a RoundRecord"):
        History(state.path).round("r", 2)
    with pytest.raises(StoreCorrupted, match="run r: this Atoll does not allow its stored settings: task: missing"):
        History(state.path).runs()


def test_the_open_round_is_in_no_table(state):
    write_history(state, IN_ROUND_4)
    with state.database.transaction() as connection:
        phases = connection.exec_driver_sql("SELECT DISTINCT phase FROM rounds").scalars().all()
    assert set(phases) <= {Phase.COMMITTED, Phase.ABANDONED}
