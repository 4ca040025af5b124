"""The reader of a growing journal: bounded batches, interruptions, entries that are gone, and no process at work."""

import time
from dataclasses import replace

import pytest

from atoll.protocol.vocabulary import RunId
from atoll.server.errors import DatabaseAway, StoreCorrupted
from atoll.server.following import reader as reading
from atoll.server.following.items import Began, Happened, Jumped, OpenRound, Waiting
from atoll.server.following.reader import Reader, follow
from atoll.server.journal.codec import encode_ledger
from atoll.server.journal.journal import Journal
from atoll.server.journal.pruning import Stay, kept_snapshots
from atoll.server.journal.rows import Batch, Snapshot
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.rounds import events as ev
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.views.history import History
from tests.server.journal.test_codec import RULES, some_history
from tests.server.journal.test_journal import entry, run_row, sql
from tests.waiting import BOUND_S

HISTORY = list(some_history())
ALL = list(range(1, len(HISTORY) + 1))
ENDED = len(HISTORY) - 1  # the last entry resumes the run


@pytest.fixture
def state(tmp_path, database_url):
    with StateDirectory.open(tmp_path / "state", database=database_url) as opened:
        yield opened


class Written:
    """A journal that grows entry by entry, with a snapshot wherever no round is open."""

    def __init__(self, state):
        self.journal, self.machine, self.seq = Journal(state), RunMachine(RULES), 0
        self.journal.add_run(run_row())
        self.history = History(state.path)
        self.run = self.history.run("r")

    def grow(self, upto):
        for at, event in HISTORY[self.seq : upto]:
            self.seq += 1
            effects = self.machine.receive(event, at)
            batch = Batch(entries=[entry(self.seq, event, at=at)])
            if any(isinstance(e, ev.Commit | ev.Abandon | ev.EndRun) for e in effects) and self.machine.may_snapshot:
                batch.snapshots.append(Snapshot("r", self.seq, at, encode_ledger(self.machine.ledger)))
            self.journal.commit(batch)

    def reader(self, after=None, **options):
        return Reader(self.history, self.run, after, **options)

    def equals(self, reader):
        machine = reader.follower.machine
        return encode_ledger(machine.ledger) == encode_ledger(self.machine.ledger)


@pytest.fixture
def written(state):
    return Written(state)


def seqs(items):
    return [item.seq for item in items if isinstance(item, Happened)]


def test_a_reader_yields_each_entry_once_as_the_journal_grows(written):
    reader, found = written.reader(), []
    assert [type(item) for item in reader.items()] == [Began]
    for upto in (1, 1, 4, 20, ENDED):
        before = written.seq
        written.grow(upto)
        items = list(reader.items())
        found += seqs(items)
        is_open = upto > before and written.machine.round is not None
        assert [isinstance(item, OpenRound) for item in items] == [False] * (upto - before) + [True] * is_open
        assert written.equals(reader)
    assert found == ALL[:ENDED]
    assert reader.has_ended


@pytest.mark.parametrize("after", [0, 1, 7, 20, ENDED])
def test_a_reader_that_was_interrupted_goes_on_where_it_stopped(written, after):
    written.grow(ENDED)
    items = list(written.reader(after, at_once=3).items())
    assert isinstance(items[0], Began)
    assert items[0].seq == after
    assert seqs(items) == ALL[after:ENDED]


def test_without_a_place_it_begins_at_the_newest_snapshot(written):
    written.grow(19)  # round 2 is open
    items = list(written.reader().items())
    assert items[0].seq == 10
    assert seqs(items) == ALL[10:19]
    assert items[-1].record["round_id"] == 2


def test_a_batch_is_bounded_and_leaves_no_transaction_open(written, monkeypatch):
    written.grow(ENDED)
    sizes = []
    look = Reader._look_in

    def counted(self, connection, seq):
        entries, last = look(self, connection, seq)
        sizes.append(len(entries))
        return entries, last

    monkeypatch.setattr(Reader, "_look_in", counted)
    reader = written.reader(0, at_once=4)
    for item in reader.items():
        if isinstance(item, Happened) and item.seq == 2:
            written.grow(len(HISTORY))  # a writer waits for no reader
    assert max(sizes) == 4
    assert written.equals(reader)


def test_a_reader_that_was_too_slow_says_so_and_goes_on_from_the_newest_snapshot(written):
    written.grow(5)
    slow = written.reader(0)
    assert seqs(slow.items()) == ALL[:5]
    written.grow(ENDED)
    written.journal.prune("r", Stay(snapshots=1))
    jumped, began = list(slow.items())[:2]
    assert isinstance(jumped, Jumped)
    assert jumped.after == 5
    assert jumped.seq == began.seq == ENDED
    assert f"{ENDED - 5} entries after entry 5 had been deleted" in jumped.why
    assert written.equals(slow)
    resumed = list(written.reader(5).items())
    assert [type(item) for item in resumed] == [Jumped, Began]
    assert resumed[0] == jumped


def test_a_journal_that_ends_before_the_reader_s_place_is_no_silent_wait(written):
    written.grow(12)
    for reader in (written.reader(400), written.reader(13)):
        jumped, began, *rest = reader.items()
        assert "the journal ends with entry 12, before entry " in jumped.why
        assert (jumped.seq, began.seq) == (10, 10)
        assert seqs(rest) == [11, 12]


def test_an_entry_that_is_missing_without_a_snapshot_after_it_is_damage(written, state):
    written.grow(12)
    reader = written.reader()
    list(reader.items())
    written.grow(18)
    sql(state, "DELETE FROM journal WHERE seq = 13")
    with pytest.raises(StoreCorrupted, match="run r: an entry between 10 and 18 is missing"):
        list(reader.items())
    with pytest.raises(StoreCorrupted, match="run r: entry 13 is missing before 14"):
        list(written.reader(12).items())


def test_a_run_that_is_deleted_meanwhile_is_named(written):
    written.grow(8)
    reader = written.reader()
    list(reader.items())
    written.journal.delete_run(RunId("r"))
    with pytest.raises(LookupError, match="run r has been deleted"):
        list(reader.items())


# ---------------------------------------------------------------- the wait for more


def test_it_follows_to_the_end_and_says_once_that_no_process_runs_the_run(written, monkeypatch):
    waits = []

    def wait(seconds):
        waits.append(seconds)
        written.grow({3: 9, 6: ENDED}.get(len(waits), written.seq))
        attended["now"] = len(waits) >= 5

    attended = {"now": False}
    monkeypatch.setattr(History, "is_attended", lambda self: attended["now"])
    items = list(follow(written.history, written.run, wait=wait))
    assert seqs(items) == ALL[:ENDED]
    assert [item.why for item in items if isinstance(item, Waiting)] == [
        "no coordinator runs this run: start it, and the run continues",
        "",
    ]
    assert waits == [0.1, 0.2, 0.4, 0.1, 0.2, 0.4]


def test_a_database_that_is_away_is_waited_for_without_a_loss(written, monkeypatch):
    written.grow(12)
    look, away = Reader._look_in, [3, 4]

    def broken(self, connection, seq):
        away[:] = [left - 1 for left in away]
        if 0 in away:
            raise DatabaseAway("gone")
        return look(self, connection, seq)

    monkeypatch.setattr(Reader, "_look_in", broken)
    monkeypatch.setattr(reading, "ENTRIES_AT_ONCE", 5)
    monkeypatch.setattr(History, "is_attended", lambda self: True)
    items = list(follow(written.history, written.run, 2, wait=lambda _: written.grow(ENDED)))
    assert seqs(items) == ALL[2:ENDED]
    assert [item.why for item in items if isinstance(item, Waiting)] == ["gone"]


def test_a_run_is_attended_while_a_process_holds_its_directory_or_else_its_database(tmp_path, database_url):
    with StateDirectory.open(tmp_path / "state", database=database_url):
        histories = [History(tmp_path / "state")]
        if database_url:
            histories.append(History(tmp_path / "nowhere", database_url))
        assert all(history.is_attended() for history in histories)
    until = time.monotonic() + BOUND_S  # PostgreSQL frees a closed connection's lock when its own process sees the end
    while any(history.is_attended() for history in histories):
        assert time.monotonic() < until
        time.sleep(0.01)


# ---------------------------------------------------------------- what stays for followers


def test_the_snapshots_that_stay_are_few_and_reach_back_as_far_as_is_promised():
    stay = Stay(since=0.0)
    kept: list[tuple[int, float]] = []
    begin = 0
    for seq in range(1, 400):
        at = float(seq)
        kept = [(seq, at), *kept]
        found, begin = kept_snapshots(kept, replace(stay, since=at - 60))
        assert found[:2] == [s for s, _ in kept[:2]]
        assert len(found) <= 4
        assert begin <= max(0, at - 60)
        assert at - begin <= 121
        kept = [row for row in kept if row[0] in found]
        assert begin in (0, kept[-1][0])
    assert kept_snapshots(kept, stay)[1] == 0


def test_slow_rounds_keep_the_newest_snapshots_alone():
    assert kept_snapshots([(30, 900.0), (20, 600.0), (10, 300.0)], Stay(since=840.0)) == ([30, 20], 20)
    assert kept_snapshots([(30, 900.0)], Stay(since=840.0)) == ([30], 0)
    assert kept_snapshots([], Stay(since=840.0)) == ([], 0)


def test_a_pruned_journal_can_be_followed_from_any_entry_of_the_promised_time(written):
    written.grow(ENDED)
    written.journal.prune("r", Stay(since=20.0))
    first = next(seq for seq, (at, _) in enumerate(HISTORY, start=1) if at > 20.0)
    for after in range(first, ENDED):
        assert seqs(written.reader(after).items()) == ALL[after:ENDED]
    assert isinstance(next(written.reader(0).items()), Jumped)
