"""The follower's machine equals the machine that was fed directly, wherever it begins, and its items tell all."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.json_values import plain
from atoll.protocol.vocabulary import TERMINAL, RunId
from atoll.server.following.follower import RoundFollower
from atoll.server.following.items import Began, Happened, OpenRound, document_of
from atoll.server.journal.codec import decode_event, decode_ledger, encode_event, encode_ledger, encode_record
from atoll.server.rounds import events as ev
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.views.narration import Narrator
from tests.histories.scenario import random_scenario
from tests.histories.world import World
from tests.server.journal.test_codec import RULES, some_history

RUN = RunId("r-1")
SEEDS = 8


@cache
def world(seed):
    """The rules and the journaled entries of a world with faults; seed 0 is a short history by hand."""
    if not seed:
        return RULES, tuple(some_history())
    history = World(seed, random_scenario(seed)).run()
    return history.scenario.rules, tuple((step.at, step.event) for step in history.steps)


@cache
def direct(seed):
    """The machine that was fed directly: after each entry its state, its open round, its records and its lines."""
    rules, entries = world(seed)
    machine, narrator = RunMachine(rules), Narrator()
    states, records, lines = [(encode_ledger(machine.ledger), None)], [], []
    for at, event in entries:
        effects = machine.receive(event, at)
        lines.append(narrator.lines(machine, event, effects))
        states.append((encode_ledger(machine.ledger), machine.round and encode_record(machine.round.record)))
        changed = [e.round_id for e in effects if isinstance(e, ev.Commit | ev.Abandon | ev.AmendRecord)]
        records.append({r: encode_record(machine.record_of(r)) for r in changed if machine.record_of(r) is not None})
    return states, records, lines


@cache
def beginnings(seed):
    """The entries after which a snapshot may be taken, with the ledger as it is stored."""
    rules, entries = world(seed)
    machine = RunMachine(rules)
    found = [(0, encode_ledger(Ledger()))]
    for seq, (at, event) in enumerate(entries, start=1):
        machine.receive(event, at)
        if machine.may_snapshot:
            found.append((seq, encode_ledger(machine.ledger)))
    return found


def feed(follower, entries):
    """Give the follower entries as the journal stores them."""
    for seq, (at, event) in enumerate(entries, start=follower.seq + 1):
        yield follower.receive(seq, at, decode_event(*encode_event(event), where="here"))


@given(st.data())
def test_the_machine_of_a_follower_is_that_of_the_run_wherever_it_begins_and_ends(data):
    seed = data.draw(st.integers(0, SEEDS))
    rules, entries = world(seed)
    states, records, lines = direct(seed)
    begin, ledger = data.draw(st.sampled_from(beginnings(seed)))
    end = data.draw(st.integers(begin, len(entries)))
    follower = RoundFollower(RUN, rules, decode_ledger(ledger, where="here"), begin)
    for item in feed(follower, entries[begin:end]):
        found = {record["round_id"]: without_sentences(record) for record in item.records}
        assert found == {key: json.loads(record) for key, record in records[item.seq - 1].items()}
        assert set(lines[item.seq - 1]) <= set(item.lines)
        assert all(" waits for clients: " in line for line in set(item.lines) - set(lines[item.seq - 1]))
        assert begin or item.lines == lines[item.seq - 1]
    machine = follower.machine
    assert (encode_ledger(machine.ledger), machine.round and encode_record(machine.round.record)) == states[end]
    shown = next(follower.open_rounds(), None)
    if machine.round is None:
        assert shown is None
    else:
        assert without_sentences(shown.record) == json.loads(states[end][1])
    assert follower.has_ended == (machine.ledger.state in TERMINAL)


def without_sentences(record):
    return {key: part for key, part in record.items() if key != "sentences"}


def test_a_follower_takes_each_entry_once_and_in_order():
    follower = RoundFollower(RUN, RULES, Ledger(), 0)
    follower.receive(1, 0.0, ev.RunStarted("m0"))
    for seq in (1, 3):
        with pytest.raises(AssertionError):
            follower.receive(seq, 0.0, ev.RoundDue())


def test_the_items_tell_the_run_its_rounds_and_the_lines_of_the_log():
    entries = list(some_history())
    follower = RoundFollower(RUN, RULES, Ledger(), 0)
    began = follower.began()
    assert isinstance(began, Began)
    assert (began.seq, began.run.state, began.run.rounds, began.run.next_round) == (0, "queued", 9, 1)
    items = list(feed(follower, entries))
    assert [item.seq for item in items] == list(range(1, len(entries) + 1))
    states = [item.run.state for item in items if item.run is not None]
    assert states[0] == "running"
    assert states[-2:] == ["stopped", "running"]
    ended = [(record["round_id"], record["phase"]) for item in items for record in item.records]
    assert sorted(set(ended)) == [(1, "committed"), (2, "committed"), (3, "abandoned"), (4, "committed")]
    said = [line for item in items for line in item.lines]
    assert "round 1: committed as version 1" in said
    assert "the coordinator is back after 14 s" in said
    assert "the run is stopped: enough" in said


def test_an_open_round_is_told_once_for_each_change_and_with_its_wait():
    follower = RoundFollower(RUN, RULES, Ledger(), 0)
    for item in feed(follower, list(some_history())[:6]):
        assert isinstance(item, Happened)
    shown = next(follower.open_rounds(), None)
    assert isinstance(shown, OpenRound)
    assert (shown.seq, shown.record["round_id"], shown.record["phase"]) == (6, 1, "collecting")
    assert shown.record["sentences"][-1].startswith("Round 1 waits for the updates of ")
    assert next(follower.open_rounds(), None) is None
    follower.receive(7, 1.1, ev.ClientJoined("d", "s-d"))
    assert next(follower.open_rounds(), None) is None, "the record is the same"


def test_no_sums_of_metrics_are_in_a_document():
    follower = RoundFollower(RUN, RULES, Ledger(), 0)
    documents = [document_of(item) for item in feed(follower, some_history())]
    texts = json.dumps(plain(documents), allow_nan=False)
    assert "accuracy" not in texts
    assert '"loss"' not in texts
    received = next(document for document in documents if document["event"] == "UpdateReceived")
    assert received["kind"] == "event"
    assert (received["client"], received["round"]) == ("a", 1)
    assert document_of(follower.began())["run"]["run"] == "r-1"
