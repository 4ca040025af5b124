"""The budget of a run with a guarantee for examples: what a use costs, and where an update counts late or at once."""

from atoll.protocol.privacy.subsampled import epsilon_bound
from atoll.protocol.vocabulary import RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.rounds.events import EndRun
from atoll.server.rounds.privacy_rules import ExampleRules
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_privacy import closed, named, private, uses

DELTA, RATE, Z, STEPS = 1e-5, 0.04, 1.5, 15


def rules(uses: int = 3) -> ExampleRules:
    last = epsilon_bound(RATE, Z, uses * STEPS, DELTA)
    return ExampleRules(last, DELTA, Z, 1.0, uses, float(uses * STEPS), RATE, STEPS, last)


def test_each_use_costs_the_steps_of_a_training_and_the_run_ends_by_its_budget() -> None:
    privacy = rules()
    drive = private(privacy)
    for number in range(1, 4):
        closed(drive)
        drive.fold()
        assert drive.record.charge is not None
        assert drive.record.charge.epsilon == epsilon_bound(RATE, Z, number * STEPS, DELTA)
        assert (drive.record.charge.clients, drive.record.charge.uses) == (2, number)
    end = drive.effects[-1]
    assert isinstance(end, EndRun)
    assert end.state is RunState.FINISHED
    assert end.cause.startswith("the privacy budget is spent: epsilon")
    ledger = drive.machine.ledger
    assert ledger.membership.most_spent == 3 * STEPS
    assert decode_ledger(encode_ledger(ledger), where="") == ledger
    assert decode_rules(encode_rules(drive.machine.rules), where="").privacy == privacy


def test_a_buffer_charges_an_update_when_it_comes_and_once() -> None:
    flow = Flow(rules={"privacy": rules(uses=2)}, concurrency=3)
    flow.join("abc")
    flow.update("a")
    assert uses(flow) == {"a": 1, "b": 0, "c": 0}, "before its client is asked again, which may be at once"
    flow.update("b")
    assert flow.record.charge is not None
    assert (flow.record.charge.clients, flow.record.charge.uses) == (2, 1)
    flow.commit()
    flow.update("c", round_id=1)
    assert uses(flow) == {"a": 1, "b": 1, "c": 1}
    flow.update("a")
    assert uses(flow) == {"a": 2, "b": 1, "c": 1}
    flow.commit()
    assert "a" not in flow.training, "its budget is spent"
    assert {"b", "c"} & flow.training.keys()


def test_an_update_that_waits_for_the_next_buffer_is_charged_when_it_comes_and_is_told_by_that_buffer() -> None:
    flow = Flow(rules={"privacy": rules(uses=1)}, concurrency=4)
    flow.join("abcd")
    for client in "ab":
        flow.update(client)
    flow.update("c")  # while the buffer is aggregated
    assert uses(flow) == {"a": 1, "b": 1, "c": 1, "d": 0}
    flow.commit()
    assert flow.machine.ledger.state is RunState.RUNNING, "c's update and d make the quorum"
    assert flow.record.charge is not None
    assert flow.record.charge.clients == 1
    flow.update("d", round_id=1)
    assert flow.record.charge.clients == 2
    flow.commit()
    assert flow.machine.ledger.cause.startswith("the privacy budget is spent")


def test_a_restored_buffer_charges_also_what_trained_at_the_backup() -> None:
    flow = Flow(rules={"privacy": rules(uses=9)}, concurrency=3)
    flow.join("abc")
    for client in "ab":
        flow.update(client)
    flow.commit()
    named(flow, 4)
    assert uses(flow) == {"a": 1 + 3, "b": 1 + 3, "c": 3 + 1}, "c was training since round 1, from version 0"
    flow.join("d")
    assert uses(flow)["d"] == 3


def test_a_restored_buffer_charges_each_older_version_from_which_an_update_may_have_come() -> None:
    """Client a was out of time twice: after the backup one buffer may have had all three of its updates."""
    flow = Flow(rules={"privacy": rules(uses=9)}, buffer_size=1, quorum=1, deadline=60.0, max_staleness=4)
    flow.join("ab")
    for at, deadline in ((10, 60), (65, 120)):
        flow.update("b", at=at)
        flow.commit()
        flow.tick(at=deadline)  # of a, which is asked again from the next version
    assert (flow.machine.ledger.version, flow.training["a"]) == (2, 3)
    assert uses(flow) == {"a": 0, "b": 2}
    named(flow, 3)
    assert uses(flow) == {"a": 1 + 2, "b": 2 + 1}
