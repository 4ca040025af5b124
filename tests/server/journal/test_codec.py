import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.vocabulary import FailureReason, LossReason
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import (
    StoredUpdateMeta,
    decode_event,
    decode_ledger,
    decode_meta,
    decode_record,
    decode_rules,
    encode_event,
    encode_ledger,
    encode_meta,
    encode_record,
    encode_rules,
    lies_at,
)
from atoll.server.members.member import Profile
from atoll.server.rounds import events as ev
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules

EVENTS = get_args(ev.Event)
finite = st.floats(allow_nan=False)
sums = st.dictionaries(st.text(), st.lists(finite, max_size=3).map(tuple), max_size=3)
uses = st.builds(MeshUse, num_ranks=st.integers(1, 64), peak_bytes=st.integers(0, 2**40), flops_per_s=finite)
meshes = st.none() | uses
times = dict.fromkeys(("work", "download_seconds", "train_seconds"), finite)
updates = st.builds(ev.Update, num_examples=st.integers(0) | finite, statistics=sums, mesh=meshes, **times)
RULES = RunRules(
    StragglerPolicy(cohort_size=2, quorum=1, over_selection=1.5, deadline=10.0, late="next_round", retry=5),
    rounds=9,
    evaluate_server_every=1,
    evaluate_clients_every=2,
    pacer_window=2,
)


def events_of(kind):
    if kind is ev.UpdateReceived:
        return st.builds(kind, update=updates)
    if kind in (ev.ModelEvaluated, ev.ClientEvaluated):
        return st.builds(kind, statistics=st.none() | sums)
    if kind is ev.MetricsComputed:
        return st.builds(kind, values=st.dictionaries(st.text(), st.none() | finite, max_size=3))
    if kind is ev.ResumeRequested:
        policies = st.builds(StragglerPolicy, cohort_size=st.integers(1, 9), retry_wait=st.floats(0, 600))
        rules = st.builds(RunRules, policy=policies, rounds=st.integers(1, 9), evaluation_deadline=finite)
        return st.builds(kind, rules=st.none() | rules)
    types = get_type_hints(kind)  # a NaN is no time and equals nothing, itself included
    return st.builds(kind, **{name: finite for name in types if types[name] is float})


@settings(max_examples=400)
@given(event=st.one_of([events_of(kind) for kind in EVENTS]))
def test_every_event_comes_back_identical(event):
    kind, body = encode_event(event)
    back = decode_event(kind, body, where="here")
    assert type(back) is type(event)
    assert back == event
    assert repr(back) == repr(event)  # enums, tuples and -0.0 too
    assert encode_event(back) == (kind, body)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 5e-324, -0.0, 0.1 + 0.2, 1.7976931348623157e308])
def test_floats_come_back_bit_for_bit(value):
    event = ev.ModelEvaluated(1, {"loss": (value,)})
    back = decode_event(*encode_event(event), where="here")
    assert back.statistics["loss"][0].hex() == value.hex()


def test_nan_comes_back_as_nan():
    body = encode_event(ev.ModelEvaluated(1, {"loss": (float("nan"),)}))
    assert str(decode_event(*body, where="here").statistics["loss"]) == "(nan,)"


@settings(max_examples=100)
@given(record=st.from_type(RoundRecord))
def test_records_come_back_identical(record):
    if any(value != value for value in map_floats(dataclasses.asdict(record))):
        return
    assert decode_record(encode_record(record), where="here") == record


def map_floats(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in map_floats(item)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("NoSuchEvent", "{}"),
        ("RoundDue", ""),
        ("RoundDue", "[]"),
        ("RoundDue", '{"more": 1}'),
        ("RoundDue", "{}, {}"),
        ("UploadBegun", '{"client_id": "a"}'),
        ("UploadBegun", '{"client_id": "a", "round_id": "7"}'),
        ("UploadBegun", '{"client_id": 7, "round_id": 7}'),
        ("ClientLost", '{"client_id": "a", "reason": "bored"}'),
        ("CoordinatorStarted", '{"down_since": null}'),
    ],
)
def test_malformed_bodies_are_refused_and_the_place_is_named(kind, body):
    with pytest.raises(StoreCorrupted, match="run r, entry 7: "):
        decode_event(kind, body, where="run r, entry 7")


def test_text_that_no_wire_carries_is_refused_when_it_is_written():
    with pytest.raises(ValueError, match="SamplerFailed cannot be encoded as JSON"):
        encode_event(ev.SamplerFailed(1, "\ud800"))


@pytest.mark.parametrize("quorum", [1, 1.0, 2, 0.5])
def test_rules_come_back_with_a_count_as_a_count_and_a_fraction_as_a_fraction(quorum):
    rules = RunRules(StragglerPolicy(quorum=quorum, deadline="adaptive", linger=0.0), rounds=3, seed=2**62)
    back = decode_rules(encode_rules(rules), where="here")
    assert back == rules
    assert type(back.policy.quorum) is type(quorum)


def test_what_is_known_of_an_update_keeps_integers_and_floats_apart():
    meta = StoredUpdateMeta(b'{"a":1}', {"w": 1.0, "steps": 2**53 + 1}, {"w": 9.0, "steps": 16.0})
    back = decode_meta(encode_meta(meta), where="here")
    assert back == meta
    assert [type(value) for value in back.magnitudes.values()] == [float, int]
    assert back.norm == 5.0


@pytest.mark.parametrize(
    ("ranks", "here"), [((), [3]), ((0, 2), [0, 2]), ((12, 3) * 512, [3, 12])], ids=["whole", "two", "a thousand"]
)
def test_the_ranks_that_have_an_update_are_read_from_the_end_of_what_is_known_of_it(ranks, here):
    encoded = encode_meta(StoredUpdateMeta(b'{"rank":7}', {"w": 1.0}, {"w": 9.0}, 3, ranks))
    assert [rank for rank in range(40) if lies_at(encoded, rank)] == here
    assert decode_meta(encoded, where="here").ranks == ranks


def test_what_an_earlier_atoll_wrote_of_an_update_lies_at_its_one_rank():
    encoded = encode_meta(StoredUpdateMeta(b"{}", {"w": 1.0}, {"w": 9.0}, 2)).replace(',"ranks":[]', "")
    assert encoded.endswith('"rank":2}')
    assert [rank for rank in range(4) if lies_at(encoded, rank)] == [2]
    assert decode_meta(encoded, where="here").parts_at(2) is None


# ---------------------------------------------------------------- a machine goes on after a round trip


def some_history():
    """Four rounds: a commit, late updates, failures, a loss, an outage, an abandoned round, evaluations."""
    update = lambda client, round_id, base, n=5: ev.UpdateReceived(  # noqa: E731
        ev.Update(client, round_id, base, f"{client}{round_id}", n, 1.0, 10, {"loss": (0.1, 3.0)}, 0.3, 1.7)
    )
    clients = ("a", "b", "c")
    yield 0.0, ev.RunStarted("m0")
    for client in clients:
        yield 0.5, ev.ClientJoined(client, f"s-{client}", Profile(7, "x"))
    yield 1.0, ev.RoundDue()
    yield 1.0, ev.CohortDrawn(1, clients)
    yield 1.5, ev.UploadBegun("a", 1)
    yield 2.25, update("a", 1, 0)
    yield 2.5, update("b", 1, 0)
    yield 2.75, ev.Aggregated(1, "m1")
    yield 2.8, update("c", 1, 0)
    yield 2.9, ev.ModelEvaluated(1, {"accuracy": (3.0, 4.0)})
    yield 3.0, ev.RoundDue()
    yield 3.0, ev.CohortDrawn(2, clients)
    yield 3.5, ev.ClientFailed("a", 2, FailureReason.TRAINING_FAILED, "boom")
    yield 4.0, ev.ClientDisconnected("b", "s-b")
    yield 5.0, ev.ClientLost("b", LossReason.LEASE_EXPIRED)
    yield 20.0, ev.CoordinatorStarted(6.0)
    yield 21.0, ev.ClientJoined("c", "s-c2", Profile(7), (2,))
    yield 22.0, update("c", 2, 1)
    yield 23.0, ev.Aggregated(2, "m2")
    yield 23.5, ev.ClientEvaluated("c", 2, {"accuracy": (1.0, 2.0)})
    yield 23.6, ev.ModelEvaluated(2, None, "no data")
    yield 23.7, ev.ClientJoined("a", "s-a2")
    yield 23.8, ev.ClientJoined("b", "s-b2")
    yield 24.0, ev.RoundDue()
    yield 24.5, ev.CohortDrawn(3, clients)
    yield 40.0, ev.TimePassed()
    yield 40.5, update("c", 3, 2, n=9)
    yield 41.0, ev.RoundDue()
    yield 42.0, ev.CohortDrawn(4, clients)
    yield 43.0, update("a", 4, 2, n=9)
    yield 43.2, update("b", 4, 2, n=9)
    yield 44.0, ev.Aggregated(4, "m3")
    yield 45.0, ev.StopRequested("enough")
    yield 46.0, ev.ResumeRequested()


def test_a_ledger_that_is_encoded_and_decoded_at_any_moment_changes_nothing():
    history = list(some_history())
    straight = RunMachine(RULES)
    moments = 0
    expected = []
    for at, event in history:
        expected.append(straight.receive(event, at))
    assert straight.ledger.version == 3
    assert len(straight.ledger.past) >= 3
    for cut in range(len(history)):
        machine = RunMachine(RULES)
        for at, event in history[:cut]:
            machine.receive(event, at)
        if not machine.may_snapshot:
            continue
        moments += 1
        body = encode_ledger(machine.ledger)
        ledger = decode_ledger(body, where="here")
        assert ledger == machine.ledger
        assert encode_ledger(ledger) == body
        assert all(type(round_id) is int for round_id in ledger.past)
        resumed = RunMachine(RULES, ledger)
        assert [resumed.receive(event, at) for at, event in history[cut:]] == expected[cut:]
        assert encode_ledger(resumed.ledger) == encode_ledger(straight.ledger)
    assert moments > 8


def test_an_empty_ledger_comes_back():
    assert decode_ledger(encode_ledger(Ledger()), where="here") == Ledger()
    assert json.loads(encode_ledger(Ledger()))["state"] == "queued"


def test_a_ledger_that_was_written_before_members_had_a_history_is_read():
    machine = RunMachine(RULES)
    for at, event in some_history():
        machine.receive(event, at)
    document = json.loads(encode_ledger(machine.ledger))
    membership = document["membership"]
    assert membership["members"]["a"]["loss"] == pytest.approx(0.1 / 3)
    del membership["pacer"], membership["start"]
    for member in membership["members"].values():
        for name in ("loss", "utility", "last_round", "times_chosen", "start"):
            del member[name]
    ledger = decode_ledger(json.dumps(document), where="here")
    assert ledger.membership.members["a"].loss is None
    assert ledger.membership.members["a"].expected_seconds == machine.ledger.membership.expected_seconds("a")
    rules = json.loads(encode_rules(RULES))
    del rules["pacer_window"]
    assert decode_rules(json.dumps(rules), where="here") == dataclasses.replace(RULES, pacer_window=0)
