"""The waits after failures: between an abandoned round and its repetition, and before a failed client's next part."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atoll.protocol.vocabulary import AbandonReason, ClientId, FailureReason, Fate, LossReason, Phase, RoundId, RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.rounds.events import (
    Abandon,
    AskEvaluation,
    ClientEvaluated,
    ClientFailed,
    ClientLost,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    EndRun,
    OpenNextRound,
    PauseRequested,
    PauseRun,
    ResumeRequested,
    RoundDue,
)
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.retries import seconds_of_rest, seconds_to_retry
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.waiting import what_a_run_waits_for
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive, kinds


def waiting(**policy: object) -> Drive:
    """Return a run of two clients, with the waits of the policy."""
    drive = Drive(**({"cohort_size": 2, "deadline": 60.0, "retry_wait": 10.0, "failure_rest": 10.0} | policy))
    drive.join("ab")
    return drive


def fail(
    drive: Drive, client: str, reason: FailureReason = FailureReason.DISK_FULL, at: float | None = None
) -> list[Effect]:
    return drive.do(ClientFailed(ClientId(client), RoundId(drive.newest), reason, "no room"), at)


def next_round(effects: list[Effect]) -> float:
    """Return the earliest beginning of the next round, in seconds since the start of the run."""
    [effect] = [effect for effect in effects if isinstance(effect, OpenNextRound)]
    return effect.not_before - 1000.0


# ---------------------------------------------------------------- the waits


@given(first=st.floats(0, 1e5), most=st.floats(1e5, 3e7), failures=st.integers(1, 2000), seed=st.integers(0, 2**63 - 1))
def test_waits_double_up_to_their_bound_and_lose_at_most_a_half(first: float, most: float, failures: int, seed: int):
    policy = StragglerPolicy(retry_wait=first, retry_wait_max=most, failure_rest=first, failure_rest_max=most)
    whole = min(most, math.ldexp(first, min(failures - 1, 30)))
    waits = (
        seconds_to_retry(policy, failures=failures, seed=seed, round_id=RoundId(failures)),
        seconds_of_rest(policy, failures=failures, seed=seed, client_id=ClientId("a")),
    )
    for wait in waits:
        assert whole / 2 <= wait <= whole


def test_runs_that_lose_the_same_site_do_not_come_back_in_step():
    policy = StragglerPolicy()
    waits = {seconds_to_retry(policy, failures=1, seed=seed, round_id=RoundId(1)) for seed in range(50)}
    assert len(waits) == 50
    assert max(waits) - min(waits) > 0.4 * policy.retry_wait


@pytest.mark.parametrize("name", ["retry_wait", "failure_rest"])
def test_a_first_wait_above_the_longest_is_refused_with_both_numbers(name: str):
    with pytest.raises(ValidationError, match=rf"{name} 700.0 is more than {name}_max \(600.0\)"):
        StragglerPolicy(**{name: 700.0})


# ---------------------------------------------------------------- a run


def test_an_abandoned_round_is_repeated_after_waits_that_double():
    drive, waits = waiting(retry=4, failure_rest=0.0), []
    for _ in range(4):
        drive.do(RoundDue(), drive.now - 1000.0)
        drive.draw("ab")
        begun = drive.now - 1000.0
        waits.append(next_round(fail(drive, "a")) - begun)
        drive.now += waits[-1]
    for number, wait in enumerate(waits):
        assert 5.0 * 2**number <= wait < 10.0 * 2**number
    record = drive.machine.ledger.past[RoundId(4)]
    assert (record.retry, record.retry_max) == (4, 4)


def test_a_commit_ends_the_growth_of_the_wait():
    drive = waiting(failure_rest=0.0, retry=9)
    for _ in range(3):
        drive.do(RoundDue())
        drive.draw("ab")
        fail(drive, "a")
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.update("b")
    drive.fold()
    assert drive.machine.ledger.retry_at == 0.0
    drive.do(RoundDue())
    drive.draw("ab")
    begun = drive.now - 1000.0
    assert 5.0 <= next_round(fail(drive, "a")) - begun < 10.0


def test_a_restart_keeps_the_end_of_the_wait():
    drive = waiting(failure_rest=0.0)
    drive.do(RoundDue())
    drive.draw("ab")
    until = next_round(fail(drive, "a"))
    restored = RunMachine(drive.rules, decode_ledger(encode_ledger(drive.machine.ledger), where="here"))
    assert restored.receive(CoordinatorStarted(drive.now), drive.now + 2) == (OpenNextRound(1000.0 + until),)


def test_a_pause_and_a_resume_end_the_wait_and_all_rests():
    drive = waiting()
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "a")
    assert kinds(drive.do(PauseRequested("lunch"))) == ["PauseRun"]
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    assert kinds(drive.do(RoundDue())) == ["DrawCohort"]


# ---------------------------------------------------------------- a client


def test_a_client_that_has_failed_is_left_alone_and_the_others_go_on():
    drive = waiting(cohort_size=1)
    drive.join("c")
    drive.do(RoundDue())
    drive.draw("a")
    fail(drive, "a")
    rest = drive.row("a").rest
    assert 5.0 <= rest < 10.0
    [draw] = drive.do(RoundDue())
    assert isinstance(draw, DrawCohort)
    assert [candidate.client_id for candidate in draw.candidates] == ["b", "c"]


def test_a_round_that_needs_the_client_waits_for_the_end_of_its_rest():
    drive = waiting()
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "a", at=0.0)
    rest = drive.row("a").rest
    assert drive.do(RoundDue(), 0.0) == []
    assert drive.deadline == pytest.approx(rest)
    assert drive.tick(rest - 1e-3) == []
    assert kinds(drive.tick(rest)) == ["DrawCohort"]


def test_rests_grow_with_failures_in_a_row_and_an_accepted_update_ends_the_row():
    drive, rests = waiting(retry=9, cohort_size=1, late="next_round"), []
    for _ in range(3):
        drive.do(RoundDue())
        drive.draw("a")
        fail(drive, "a")
        rests.append(drive.row("a").rest)
        drive.now += rests[-1]
    assert [5.0 * 2**n <= rest < 10.0 * 2**n for n, rest in enumerate(rests)] == [True] * 3
    drive.do(RoundDue())
    drive.draw("a")
    drive.update("a")
    drive.fold()
    assert drive.machine.ledger.membership.failures(ClientId("a")) == 0


def test_a_rest_never_costs_a_round():
    drive = waiting(failure_rest=600.0, selection_timeout=20.0)
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "a", at=0.0)
    assert drive.do(RoundDue(), 1.0) == []
    assert kinds(drive.tick(21.0)) == ["DrawCohort"]


@pytest.mark.parametrize("reason", [FailureReason.OUT_OF_TIME, FailureReason.NOT_FINITE, FailureReason.SHUTTING_DOWN])
def test_a_slow_client_and_a_diverged_one_are_invited_again_at_once(reason: FailureReason):
    drive = waiting()
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "a", reason)
    assert drive.row("a").rest == 0.0
    assert kinds(drive.do(RoundDue())) == ["DrawCohort"]


def test_a_client_that_leaves_for_a_reason_of_its_own_rests_and_the_round_does_not_wait_for_it():
    drive = waiting(quorum=1)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    gone = ClientLost(ClientId("b"), LossReason.LEFT, FailureReason.CLOCK_SKEW, "3600 s behind")
    assert kinds(drive.do(gone)) == ["Aggregate"]
    assert 5.0 <= drive.row("b").rest < 10.0
    trouble = drive.machine.ledger.membership.members[ClientId("b")].trouble
    assert trouble is not None
    assert (trouble.reason, trouble.detail) == ("clock_skew", "3600 s behind")
    drive.fold()
    drive.join("b")
    assert ClientId("b") in drive.machine.ledger.membership.resting(), "a new connection is no repair"


def test_a_failure_that_is_reported_after_the_round_is_no_reason_to_rest():
    drive = waiting(cohort_size=2, quorum=1)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.tick(60.0)
    assert drive.row("b").fate is Fate.STRAGGLER
    fail(drive, "b")
    assert drive.machine.ledger.membership.resting() == {}


def test_in_a_buffer_a_failed_client_rests_until_the_next_version_may_use_it():
    flow = Flow(failure_rest=100.0, buffer_size=2, concurrency=3)
    flow.join("abc")
    fail(flow, "a")
    flow.update("b")
    flow.update("c")
    flow.fold()
    flow.do(RoundDue())
    assert ClientId("a") not in flow.record.clients


def test_rests_survive_a_restart():
    drive = waiting()
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "a")
    ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
    assert ledger.membership.resting() == drive.machine.ledger.membership.resting() != {}
    assert ledger == drive.machine.ledger


# ---------------------------------------------------------------- approvals


def test_a_client_that_awaits_approval_costs_no_retry_however_long_it_takes():
    drive = waiting(retry=0, selection_timeout=60.0, approval_wait=7 * 86400.0)
    drive.do(RoundDue())
    drive.draw("ab")
    effects = fail(drive, "b", FailureReason.AWAITS_APPROVAL)
    assert Abandon(RoundId(1), AbandonReason.AWAITS_APPROVAL) in effects
    assert drive.machine.ledger.failures == 0
    drive.do(RoundDue())
    for minute in range(1, 2 * 24 * 60):
        assert drive.tick(60.0 * minute) == []
    assert drive.record.phase is Phase.SELECTING
    text = what_a_run_waits_for(drive.machine)
    assert (
        text
        == "round 2 waits for clients: 2 connected, 1 available, 2 wanted (quorum 2): b awaiting approval (no room)"
    )
    assert kinds(drive.join("b")) == ["DrawCohort"], "the operator has approved, and the agent says that it is ready"


def test_the_wait_for_approvals_is_bounded_and_then_uses_up_the_retries():
    drive = waiting(retry=0, retry_wait=0.0, selection_timeout=60.0, approval_wait=150.0)
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "b", FailureReason.AWAITS_APPROVAL, at=0.0)
    drive.do(RoundDue(), 0.0)
    assert [drive.tick(at) for at in (60.0, 120.0)] == [[], []]
    assert kinds(drive.tick(150.0)) == ["Abandon", "EndRun"]
    assert drive.machine.ledger.past[RoundId(2)].abandon_reason is AbandonReason.TOO_FEW_CLIENTS


def test_a_site_outside_its_hours_is_waited_for_and_one_that_refuses_is_not():
    for waits, reason in ((True, AbandonReason.AWAITS_APPROVAL), (False, AbandonReason.QUORUM_OUT_OF_REACH)):
        drive = waiting()
        drive.do(RoundDue())
        drive.draw("ab")
        drive.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.POLICY_REFUSED, "hours: 20-6", waits))
        assert drive.machine.ledger.past[RoundId(1)].abandon_reason is reason


def test_clients_that_await_approval_are_not_waited_for_where_the_others_make_the_quorum():
    drive = waiting(quorum=1)
    drive.do(RoundDue())
    drive.draw("ab")
    fail(drive, "b", FailureReason.AWAITS_APPROVAL)
    assert kinds(drive.update("a")) == ["Accept", "Aggregate"]


def test_a_buffer_without_approvals_costs_no_retry():
    flow = Flow(retry=0, fill_timeout=60.0)
    flow.join("ab")
    for client in "ab":
        fail(flow, client, FailureReason.AWAITS_APPROVAL, at=1.0)
    effects = flow.tick(60.0)
    assert Abandon(RoundId(1), AbandonReason.AWAITS_APPROVAL) in effects
    assert flow.machine.ledger.state is RunState.RUNNING


# ---------------------------------------------------------------- pause on failure


def test_a_run_whose_policy_says_pause_keeps_its_updates_and_goes_on():
    drive = waiting(retry=1, late="next_round", on_failure="pause", retry_wait=0.0, failure_rest=0.0)
    for _ in range(2):
        drive.do(RoundDue())
        drive.draw("ab")
        effects = fail(drive, "a")
    assert isinstance(effects[-1], PauseRun)
    assert effects[-1].cause.startswith("2 rounds in a row were abandoned; the last, round 2: quorum_out_of_reach")
    assert not [effect for effect in effects if isinstance(effect, EndRun)]
    assert kinds(drive.update("b", round_id=2)) == ["Accept", "AmendRecord"], "a paused run takes late updates"
    drive.do(ResumeRequested())
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    assert drive.machine.ledger.failures == 0
    drive.tick(60.0)
    drive.fold()
    assert drive.machine.ledger.version == 1
    assert drive.machine.record_of(RoundId(2)).clients[ClientId("b")].used_in == 3  # type: ignore[union-attr]


# ---------------------------------------------------------------- evaluations


def test_a_refused_evaluation_is_asked_for_once():
    drive = Drive(rules={"evaluate_clients_every": 1}, cohort_size=2, deadline=60.0)
    drive.join("ab")

    def commit() -> set[str]:
        drive.do(RoundDue())
        drive.draw("ab")
        drive.update("a")
        drive.update("b")
        return {e.client_id for e in drive.fold() if isinstance(e, AskEvaluation)}

    assert commit() == {"a", "b"}
    version = drive.machine.ledger.version
    why = "policy_refused: evaluations are not allowed here"
    drive.do(ClientEvaluated(ClientId("b"), version, None, why, FailureReason.POLICY_REFUSED))
    drive.do(ClientEvaluated(ClientId("a"), version, {"loss": (1.0, 2.0)}))
    assert commit() == {"a"}
    drive.do(ClientEvaluated(ClientId("a"), drive.machine.ledger.version, {"loss": (1.0, 2.0)}))
    drive.join("b")
    assert commit() == {"a", "b"}


# ---------------------------------------------------------------- runs of an earlier Atoll


def test_rules_of_an_earlier_atoll_keep_their_behaviour():
    text = encode_rules(RunRules(policy=StragglerPolicy(), rounds=3))
    new = decode_rules(text, where="here")
    assert (new.policy.retry_wait, new.policy.failure_rest) == (10.0, 10.0)
    for field in ("retry_wait", "retry_wait_max", "failure_rest", "failure_rest_max", "approval_wait", "on_failure"):
        before, _, after = text.partition(f'"{field}":')
        text = before + after.split(",", 1)[1]
    old = decode_rules(text, where="here").policy
    assert (old.retry_wait, old.failure_rest, old.approval_wait, old.on_failure) == (0.0, 0.0, 0.0, "fail")
