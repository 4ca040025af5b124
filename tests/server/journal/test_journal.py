import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.exc import IntegrityError

from atoll.ground.durable import DiskFull
from atoll.protocol.vocabulary import Phase, RunState
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import encode_event, encode_ledger, encode_record
from atoll.server.journal.journal import Journal
from atoll.server.journal.pruning import Stay
from atoll.server.journal.rows import (
    Batch,
    Entry,
    EvaluationRow,
    RecordRow,
    RunChange,
    RunRow,
    Snapshot,
    UpdateRow,
    VersionRow,
)
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.rounds import events as ev
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.views.history import History
from tests.server.journal.test_codec import RULES, some_history

CONFIG = RunConfig(task="m:t", local={"lr": 1.0, "epochs": 2, "nesterov": True}, round=StragglerPolicy(quorum=1))


@pytest.fixture
def state(tmp_path, database_url):
    with StateDirectory.open(tmp_path / "state", database=database_url) as opened:
        yield opened


only_sqlite = pytest.mark.parametrize("database_url", [""], ids=["sqlite"])


@pytest.fixture
def journal(state):
    return Journal(state)


def run_row(run_id="r", **changes):
    return replace(RunRow.new(run_id, CONFIG, RULES, 100.0), **changes)


def entry(seq, event=None, *, at=None, run_id="r"):
    return Entry(run_id, seq, float(seq) if at is None else at, *encode_event(event or ev.SamplerFailed(1, f"e{seq}")))


def snapshot(seq, ledger=None, run_id="r"):
    return Snapshot(run_id, seq, float(seq), encode_ledger(ledger or Ledger(now=float(seq))))


def sql(state, statement, *values):
    with state.database.transaction() as connection:
        return (
            connection.exec_driver_sql(statement, values).all()
            if statement.startswith("SELECT")
            else (connection.exec_driver_sql(statement, values).rowcount)
        )


def seqs(recovered):
    return [happened.seq for happened in recovered.entries]


# ---------------------------------------------------------------- entries, snapshots, rows


def test_a_new_run_has_an_empty_ledger_and_no_entries(journal):
    recovered = journal.load("r")
    assert (recovered.ledger, recovered.seq, recovered.entries, recovered.faults) == (Ledger(), 0, (), ())


def test_entries_come_back_in_order_with_their_times(journal):
    at = 1762000000.123456789
    journal.commit(Batch(entries=[entry(1, ev.RoundDue(), at=at), entry(2, ev.TimePassed(), at=at)]))
    journal.commit(Batch(entries=[entry(3), entry(1, run_id="other")]))
    recovered = journal.load("r")
    assert seqs(recovered) == [1, 2, 3]
    assert [happened.event for happened in recovered.entries[:2]] == [ev.RoundDue(), ev.TimePassed()]
    assert recovered.entries[0].at == at
    assert recovered.seq == 3
    assert journal.load("other").seq == 1


def test_entries_before_the_newest_snapshot_are_not_replayed(journal):
    journal.commit(Batch(entries=[entry(1), entry(2)], snapshots=[snapshot(2)]))
    journal.commit(Batch(entries=[entry(3)]))
    recovered = journal.load("r")
    assert (recovered.snapshot_seq, seqs(recovered), recovered.seq) == (2, [3], 3)
    assert recovered.ledger == Ledger(now=2.0)
    assert journal.last_instant() == 3.0


def test_a_run_goes_on_from_the_journal_as_if_nothing_had_happened(journal):
    straight = RunMachine(RULES)
    history = list(some_history())
    for seq, (at, event) in enumerate(history, start=1):
        batch = Batch(entries=[entry(seq, event, at=at)])
        straight.receive(event, at)
        if straight.may_snapshot and seq % 3 == 0:
            batch.snapshots.append(snapshot(seq, straight.ledger))
        journal.commit(batch)
        recovered = journal.load("r")
        machine = recovered.replay(RULES)
        assert recovered.seq == seq
        assert encode_ledger(machine.ledger) == encode_ledger(straight.ledger)
        assert (machine.round and machine.round.record) == (straight.round and straight.round.record)
        journal.prune("r", Stay())


def test_runs_come_back_in_the_order_of_the_queue(journal):
    for name in ("r", "b", "a"):
        journal.add_run(run_row(name))
    rows = journal.runs()
    assert [row.run_id for row in rows] == ["r", "b", "a"]
    assert rows[0] == run_row(order=1)
    assert rows[0].config == CONFIG
    assert [type(value) for value in rows[0].config.local.values()] == [float, int, bool]
    assert type(rows[0].config.round.quorum) is int
    assert rows[0].name == "run"


def test_a_run_id_is_never_given_twice(journal):
    journal.add_run(run_row())
    with pytest.raises(IntegrityError):
        journal.add_run(run_row())


def test_a_run_ends_and_is_reopened(journal):
    journal.add_run(run_row())
    journal.commit(Batch(changes=[RunChange("r", RunState.RUNNING)]))
    assert journal.runs()[0].state is RunState.RUNNING
    journal.commit(Batch(changes=[RunChange("r", RunState.FAILED, "too few clients", 200.5)]))
    row = journal.runs()[0]
    assert (row.state, row.cause, row.ended_at) == (RunState.FAILED, "too few clients", 200.5)
    journal.commit(Batch(changes=[RunChange("r", RunState.RUNNING)]))
    row = journal.runs()[0]
    assert (row.state, row.cause, row.ended_at) == (RunState.RUNNING, "", None)
    other = RunRules(StragglerPolicy(), rounds=99)
    journal.commit(Batch(runs=[replace(row, rules=other)]))
    assert journal.runs()[0].rules == other


def test_a_later_record_of_a_round_takes_the_place_of_the_earlier_one(journal, state):
    record = RoundRecord(7, 6, 1.0, 2, 2, 2, phase=Phase.COMMITTED, version=7)
    first = RecordRow("r", encode_record(record), record)
    record.detail = "amended"
    journal.commit(Batch(records=[first, RecordRow("r", encode_record(record), record)]))
    assert sql(state, "SELECT run_id, round_id, phase, version, record FROM rounds") == [
        ("r", 7, "committed", 7, encode_record(record))
    ]


def test_an_empty_batch_is_no_mistake(journal):
    journal.commit(Batch())


def test_two_threads_do_not_get_into_each_others_transactions(journal):
    def write(run_id):
        for seq in range(1, 40):
            journal.commit(Batch(entries=[entry(seq, run_id=run_id)]))
            assert journal.load(run_id).seq == seq

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [journal.load(name).seq for name in "ab"] == [39, 39]


# ---------------------------------------------------------------- atomic commits


def test_a_batch_is_written_whole_or_not_at_all(journal):
    journal.commit(Batch(entries=[entry(1)]))
    with pytest.raises(IntegrityError):  # the same seq twice is our mistake
        journal.commit(Batch(entries=[entry(2), entry(1)], snapshots=[snapshot(2)]))
    assert (journal.load("r").snapshot_seq, journal.load("r").seq) == (0, 1)


def full_batch(seq):
    record = RoundRecord(1, 0, 1.0, 2, 2, 2, phase=Phase.ABANDONED)
    return Batch(
        entries=[entry(seq), entry(seq + 1, ev.SamplerFailed(1, "x" * 100_000))],
        snapshots=[snapshot(seq + 1)],
        records=[RecordRow("r", encode_record(record), record)],
        updates=[UpdateRow("r", "d", "{}", b"x")],
        versions=[VersionRow("r", 1, "d", 5, 1.0)],
        evaluations=[EvaluationRow("r", 1, "server", {"a": (1.0, float("nan"))}, 1, "", 1.0)],
        changes=[RunChange("r", RunState.FAILED, "x", 1.0)],
    )


@only_sqlite
def test_a_full_disk_leaves_nothing_of_a_batch_and_it_may_be_tried_again(journal, state):
    journal.add_run(run_row())
    journal.commit(Batch(entries=[entry(1)]))
    pages = sql(state, "SELECT * FROM pragma_page_count")[0][0]
    sql(state, f"PRAGMA max_page_count = {pages + 3}")
    batch = full_batch(2)
    for _ in range(3):
        with pytest.raises(DiskFull, match=r"state\.db: no room"):
            journal.commit(batch)
        assert journal.load("r").seq == 1
        for table in ("updates", "snapshots", "rounds", "versions", "evaluations"):
            assert sql(state, f"SELECT count(*) FROM {table}") == [(0,)]
    assert journal.runs()[0].state is RunState.QUEUED
    sql(state, "PRAGMA max_page_count = 1000000")
    journal.commit(batch)
    assert journal.load("r").seq == 3
    assert journal.runs()[0].state is RunState.FAILED


# ---------------------------------------------------------------- damage


def with_snapshots(journal, count=2):
    for number in range(1, count + 1):
        journal.commit(Batch(entries=[entry(2 * number - 1), entry(2 * number)], snapshots=[snapshot(2 * number)]))
    journal.commit(Batch(entries=[entry(2 * count + 1)]))


@pytest.mark.parametrize("damage", ["body = 'x' || body", "body = replace(body, '4.0', '5.0')", "checksum = 1"])
def test_a_damaged_snapshot_is_passed_over_and_named(journal, state, damage):
    with_snapshots(journal)
    assert sql(state, f"UPDATE snapshots SET {damage} WHERE seq = 4") == 1
    recovered = journal.load("r")
    assert (recovered.snapshot_seq, recovered.ledger.now, seqs(recovered)) == (2, 2.0, [3, 4, 5])
    assert recovered.faults == ("run r, snapshot 4: its checksum is wrong",)


def test_without_any_good_snapshot_the_whole_journal_is_replayed(journal, state):
    with_snapshots(journal)
    sql(state, "UPDATE snapshots SET body = '{}'")
    recovered = journal.load("r")
    assert (recovered.snapshot_seq, seqs(recovered), len(recovered.faults)) == (0, [1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize("keeps_last", [True, False])
def test_without_any_good_snapshot_a_pruned_journal_is_refused(journal, state, keeps_last):
    with_snapshots(journal, 4)
    journal.prune("r", Stay())
    sql(state, "UPDATE snapshots SET body = '{}'")
    if not keeps_last:
        sql(state, "DELETE FROM journal")
    with pytest.raises(StoreCorrupted, match="run r, snapshot 8: its checksum is wrong; run r, snapshot 6"):
        journal.load("r")


@pytest.mark.parametrize(
    "damage", ["body = 'x'", "body = replace(body, 'e2', 'e3')", "at = 2.5", "kind = 'RoundDue'", "seq = 9"]
)
def test_a_damaged_entry_is_never_replayed(journal, state, damage):
    journal.commit(Batch(entries=[entry(1), entry(2), entry(3)]))
    assert sql(state, f"UPDATE journal SET {damage} WHERE seq = 2") == 1
    with pytest.raises(
        StoreCorrupted, match=r"run r: entry 2 is missing before 3|run r, entry 2: its checksum is wrong"
    ):
        journal.load("r")


def test_an_entry_of_a_later_atoll_names_its_place(journal, state):
    journal.commit(Batch(entries=[Entry("r", 1, 1.0, "Invented", "{}")]))
    with pytest.raises(StoreCorrupted, match="run r, entry 1: unknown kind 'Invented'"):
        journal.load("r")


@only_sqlite
def test_a_database_that_is_damaged_while_it_is_used_is_named(journal, state):
    for seq in range(1, 200):
        journal.commit(Batch(entries=[entry(seq)]))
    state.database.close()
    size = (state.path / "state.db").stat().st_size
    with (state.path / "state.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))
    with pytest.raises(StoreCorrupted, match=r"state\.db: damaged"):
        journal.load("r")


# ---------------------------------------------------------------- retention


def test_prune_keeps_what_the_last_two_snapshots_need_and_every_record(journal, state):
    for number in range(1, 6):
        record = RoundRecord(number, 0, 1.0, 2, 2, 2, phase=Phase.COMMITTED, version=number)
        journal.commit(
            Batch(
                entries=[entry(2 * number - 1), entry(2 * number)],
                snapshots=[snapshot(2 * number)],
                records=[RecordRow("r", encode_record(record), record)],
                versions=[VersionRow("r", number, "d", 5, 1.0)],
                evaluations=[EvaluationRow("r", number, "server", None, 1, "", 1.0)],
            )
        )
    journal.commit(Batch(entries=[entry(1, run_id="other"), entry(11)]))
    journal.prune("r", Stay())
    assert sql(state, "SELECT seq FROM snapshots") == [(8,), (10,)]
    assert sql(state, "SELECT seq FROM journal WHERE run_id = 'r'") == [(9,), (10,), (11,)]
    assert journal.load("other").seq == 1
    for table in ("rounds", "versions", "evaluations"):
        assert sql(state, f"SELECT count(*) FROM {table}") == [(5,)]
    assert (journal.load("r").snapshot_seq, journal.load("r").seq) == (10, 11)
    journal.prune("r", Stay(snapshots=3, rounds=2))
    assert sql(state, "SELECT round_id FROM rounds") == [(4,), (5,)]
    assert sql(state, "SELECT seq FROM snapshots") == [(8,), (10,)]


def test_updates_are_found_by_their_digest_however_many(journal):
    rows = {
        f"{k:064x}": UpdateRow("r", f"{k:064x}", f"meta {k}", bytes([k % 256]) if k % 2 else None) for k in range(1201)
    }
    journal.commit(Batch(updates=list(rows.values())))
    journal.commit(Batch(updates=[*list(rows.values())[:3], UpdateRow("other", "d", "meta", b"")]))  # sent again
    assert journal.updates("r", list(rows)) == rows
    assert journal.updates("other", ["d"]) == {"d": UpdateRow("other", "d", "meta", b"")}
    assert journal.updates("r", []) == {}


def test_an_update_that_is_missing_is_named(journal):
    journal.commit(Batch(updates=[UpdateRow("r", "a", "{}", b"")]))
    with pytest.raises(StoreCorrupted, match="run r: the journal has no updates b, c"):
        journal.updates("r", ["c", "a", "b"])
    with pytest.raises(StoreCorrupted, match="run other"):
        journal.updates("other", ["a"])


def test_prune_drops_the_updates_that_are_not_live(journal):
    journal.commit(Batch(updates=[UpdateRow(run, digest, "{}", b"") for run in ("r", "other") for digest in "abc"]))
    journal.prune("r", Stay())
    assert list(journal.updates("r", ["a", "b", "c"])) == ["a", "b", "c"]
    journal.prune("r", Stay(live=["b"]))
    assert list(journal.updates("r", ["b"])) == ["b"]
    for digest in "ac":
        with pytest.raises(StoreCorrupted):
            journal.updates("r", [digest])
    assert list(journal.updates("other", ["a", "b", "c"])) == ["a", "b", "c"]


def test_prune_drops_the_metrics_of_single_sites_of_old_versions(journal, state):
    sources = ("server", "clients", "site:north", "training:north")
    rows = [EvaluationRow("r", v, source, {"a": (1.0, 1.0)}, 1, "", 1.0) for v in (1, 2, 3, 4) for source in sources]
    journal.commit(Batch(versions=[VersionRow("r", v, f"d{v}", 1, 1.0) for v in (1, 2, 3, 4)], evaluations=rows))
    journal.prune("r", Stay(sites=2, pinned=[1]))
    history = History(state.path)
    assert {(row.version, row.source) for row in history.site_evaluations("r")} == {
        (version, source) for version in (1, 3, 4) for source in sources[2:]
    }
    assert {row.version for row in history.site_evaluations("r", 3)} == {3}
    assert [row.version for row in history.evaluations("r")] == [1, 1, 2, 2, 3, 3, 4, 4], "the others always stay"


def test_prune_of_a_run_without_enough_snapshots_drops_nothing(journal):
    journal.commit(Batch(entries=[entry(1)]))
    journal.prune("r", Stay())
    journal.commit(Batch(entries=[entry(2)], snapshots=[snapshot(2)]))
    journal.prune("r", Stay(rounds=1))
    assert (journal.load("r").snapshot_seq, journal.load("r").seq) == (2, 2)


@pytest.mark.slow
@only_sqlite
def test_the_file_and_the_wal_stay_bounded_when_the_journal_is_pruned(journal, state):
    sizes = []
    for number in range(60):
        entries = [entry(number * 20 + i, ev.SamplerFailed(1, "x" * 5000)) for i in range(1, 21)]
        journal.commit(Batch(entries=entries, snapshots=[snapshot(number * 20 + 20)]))
        journal.prune("r", Stay())
        sizes.append(sum((state.path / name).stat().st_size for name in ("state.db", "state.db-wal")))
    assert max(sizes[40:]) <= max(sizes[:40])
    assert max(sizes) < 8 << 20


# ---------------------------------------------------------------- kill -9

WRITER = """
import os, sys
from pathlib import Path
from atoll.server.rounds.events import SamplerFailed
from atoll.server.journal.codec import encode_event, encode_ledger
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, Entry, Snapshot
from atoll.server.rounds.ledger import Ledger
from atoll.server.journal.pruning import Stay
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.views.history import History
journal = Journal(StateDirectory.open(Path(sys.argv[1])))
seq = journal.load("r").seq
while True:
    entries = [Entry("r", seq + i, 1.0, *encode_event(SamplerFailed(1, "x" * (97 * i)))) for i in (1, 2, 3)]
    snapshots = [Snapshot("r", seq + 3, 1.0, encode_ledger(Ledger(now=1.0)))] if seq % 7 == 0 else []
    journal.commit(Batch(entries=entries, snapshots=snapshots))
    seq += 3
    os.write(1, f"{seq}\\n".encode())
    if seq % 60 == 0:
        journal.prune("r", Stay())
"""


@pytest.mark.real
def test_nothing_that_was_committed_is_lost_when_the_process_is_killed(tmp_path):
    random_ = random.Random(7)
    path, last = tmp_path / "state", 0
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        lines = [process.stdout.readline() for _ in range(random_.randrange(1, 120))]
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        told = [int(line) for line in (b"".join(lines) + rest).split(b"\n")[:-1]]
        with StateDirectory.open(path) as state:
            recovered = Journal(state).load("r")
        assert recovered.seq >= told[-1] > last  # what was said is there; what was being written is whole or absent
        assert recovered.seq % 3 == 0
        assert recovered.seq - told[-1] <= 3
        last = recovered.seq


def test_a_copy_of_the_file_and_its_wal_taken_at_any_moment_holds_whole_batches(tmp_path):
    """A copy is what a crash of the machine leaves, if the file system keeps what was synced."""
    with StateDirectory.open(tmp_path / "state") as state:
        journal = Journal(state)
        for seq in range(1, 40, 3):
            journal.commit(Batch(entries=[entry(seq), entry(seq + 1), entry(seq + 2)]))
            copy = tmp_path / f"copy{seq}"
            (copy / "runs").mkdir(parents=True)
            for name in ("state.db", "state.db-wal"):
                shutil.copy(state.path / name, copy / name)
            size = (copy / "state.db-wal").stat().st_size
            if seq > 1:
                os.truncate(copy / "state.db-wal", size - 1000)  # the last commit did not reach the disk
            with StateDirectory.open(copy) as crashed:
                assert Journal(crashed).load("r").seq == (seq - 1 if seq > 1 else seq + 2)


def test_a_wal_is_never_left_behind_by_an_orderly_end(tmp_path):
    with StateDirectory.open(tmp_path / "state") as state:
        Journal(state).commit(Batch(entries=[entry(1)]))
    assert not Path(tmp_path / "state" / "state.db-wal").exists()
    with sqlite3.connect(tmp_path / "state" / "state.db") as connection:
        assert connection.execute("SELECT count(*) FROM journal").fetchone() == (1,)
    connection.close()
