"""The budget of a run with a guarantee for examples: what a use costs, and where an update counts late or at once."""

from atoll.protocol.privacy.subsampled import epsilon_bound
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.rounds.events import (
    AuditCharge,
    CohortDrawn,
    DrawCohort,
    Effect,
    EndRun,
    FilesLost,
    RoundDue,
    StopRequested,
)
from atoll.server.rounds.privacy_rules import ExampleRules
from atoll.server.views.sentences import sentences
from tests.server.rounds.test_buffer_round import Flow, invited
from tests.server.rounds.test_cohort_round import Drive
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


def test_a_restored_buffer_charges_a_version_that_a_resume_may_have_made_young_enough_since() -> None:
    """At the backup a's work was too old; a resume with a larger `max_staleness` may have taken its update."""
    flow = Flow(rules={"privacy": rules(uses=9)}, buffer_size=1, quorum=1, max_staleness=0, concurrency=2)
    flow.join("abc")
    flow.update("b")
    flow.commit()
    assert flow.machine.ledger.num_too_old == 1
    named(flow, 2)
    assert uses(flow) == {"a": 1 + 1, "b": 1 + 1, "c": 1}


def test_a_draw_that_was_under_way_while_a_client_spent_its_budget_does_not_invite_it() -> None:
    """Its site would pay for a training whose update is refused."""
    flow = Flow(rules={"privacy": rules(uses=1)}, buffer_size=2, quorum=1, concurrency=2, deadline=60.0)
    flow.join("ab")
    flow.update("b")
    flow.tick(at=60)  # a is out of time, and may still send its update; b's makes the version
    flow.join("c")
    flow.fold()
    [draw] = [effect for effect in Drive.do(flow, RoundDue()) if isinstance(effect, DrawCohort)]
    assert [candidate.client_id for candidate in draw.candidates] == ["a", "c"]
    flow.update("a", round_id=1)
    assert uses(flow)["a"] == 1
    assert invited(Drive.do(flow, CohortDrawn(draw.round_id, (ClientId("a"), ClientId("c"))))) == {"c": 1}


def audited(effects: list[Effect]) -> list[tuple[str, int]]:
    return [(each.rounds, each.charge.clients) for each in effects if isinstance(each, AuditCharge)]


def test_an_update_that_waits_at_the_end_of_the_run_is_charged_in_its_record_and_in_the_audit_log() -> None:
    flow = Flow(rules={"privacy": rules()}, concurrency=4)
    flow.join("abcd")
    for client in "abc":
        flow.update(client)
    flow.do(StopRequested("enough"))
    flow.fold()
    assert flow.machine.ledger.state is RunState.STOPPED
    assert audited(flow.effects) == [("round 1", 2), ("updates in no round", 1)]
    [of_c] = [line for line in sentences(flow.machine.ledger.past[RoundId(1)]) if line.startswith("c (")]
    assert of_c.endswith("no model contains it: the run ended first (stopped), and its charge stays.")


def test_a_buffer_that_is_stopped_below_its_quorum_has_its_charge_in_the_audit_log() -> None:
    flow = Flow(rules={"privacy": rules()}, concurrency=4)
    flow.join("abcd")
    flow.update("a")
    assert audited(flow.do(StopRequested("enough"))) == [("round 1", 1)]


def test_a_charge_of_an_update_that_is_lost_is_in_the_audit_log_once() -> None:
    flow = Flow(rules={"privacy": rules()}, concurrency=4, buffer_size=3, quorum=2)
    flow.join("abcd")
    flow.update("a")
    flow.update("b")
    assert audited(flow.do(FilesLost((Digest("a1"),), (), "disk"))) == [("updates in no round", 1)]
    flow.update("a")  # sent again, and charged again
    flow.update("c")
    flow.update("d")
    assert audited(flow.do(FilesLost((Digest("d1"),), (), "disk"))) == [("updates in no round", 1)], "d waits"
    assert audited(flow.effects)[1] == ("round 1", 3)
    assert uses(flow) == {"a": 2, "b": 1, "c": 1, "d": 1}
