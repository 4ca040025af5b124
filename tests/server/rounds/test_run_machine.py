"""A run: its sequence of rounds, its end, its evaluations, its records, and its recovery after a crash."""

from dataclasses import replace
from typing import get_args

import pytest

from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    Digest,
    FailureReason,
    Fate,
    LossReason,
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.journal.codec import decode_ledger, encode_ledger
from atoll.server.rounds.events import (
    AggregationFailed,
    AmendRecord,
    AskEvaluation,
    ClientDisconnected,
    ClientEvaluated,
    ClientFailed,
    ClientLost,
    CloseEvaluation,
    CoordinatorStarted,
    EndRun,
    EvaluateModel,
    Event,
    ModelEvaluated,
    OpenNextRound,
    PublishedNamed,
    Release,
    ResumeRequested,
    RoundDue,
    StopRequested,
    TimePassed,
    Update,
)
from atoll.server.rounds.run_machine import HANDLERS, RunMachine
from tests.server.rounds.test_cohort_round import Drive, kinds, released, scales, verdict


def committed(drive: Drive, clients: str = "ab") -> list[str]:
    """Open a round, let all clients answer, commit it, and return the kinds of the commit's effects."""
    drive.do(RoundDue())
    drive.draw(clients)
    for client in clients:
        drive.update(client)
    return kinds(drive.fold())


def ready(rounds: int = 3, **rules: object) -> Drive:
    """Return a run with two connected clients."""
    drive = Drive(rounds=rounds, rules=dict(rules), cohort_size=2, quorum=1, deadline=60.0)
    drive.join("ab")
    return drive


def test_every_event_has_one_handler() -> None:
    assert set(get_args(Event)) == {*HANDLERS, CoordinatorStarted, PublishedNamed, TimePassed}


# ---------------------------------------------------------------- the end


def test_run_finishes_with_its_last_commit() -> None:
    drive = ready(rounds=2)
    assert committed(drive) == ["Commit", "OpenNextRound"]
    assert committed(drive) == ["Commit", "EndRun"]
    assert drive.effects[-1] == EndRun(RunState.FINISHED, "2 rounds are committed")
    assert (drive.machine.ledger.state, drive.machine.ledger.cause) == (RunState.FINISHED, "2 rounds are committed")
    assert drive.deadline is None


def test_a_finished_run_goes_on_only_with_more_rounds_and_a_replay_follows_both_rules() -> None:
    drive = ready(rounds=1)
    committed(drive)
    assert drive.machine.ledger.state is RunState.FINISHED
    assert drive.do(ResumeRequested()) == []
    assert drive.do(ResumeRequested(rules=drive.rules)) == []
    more = replace(drive.rules, rounds=2, policy=drive.rules.policy.model_copy(update={"quorum": 2}))
    assert kinds(drive.do(ResumeRequested(rules=more))) == ["OpenNextRound"]
    assert drive.machine.rules == more
    drive.join("ab")
    assert committed(drive) == ["Commit", "EndRun"]
    assert drive.record.quorum == 2
    ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
    assert RunMachine(drive.rules, ledger).rules == more, "the changed rules are in the snapshot"


def test_a_failed_run_goes_on_with_changed_settings() -> None:
    drive = Drive(cohort_size=2, quorum=2, retry=0)
    drive.join("ab")
    abandon(drive)
    assert drive.machine.ledger.state is RunState.FAILED
    easier = replace(drive.rules, policy=drive.rules.policy.model_copy(update={"quorum": 1, "retry": 9}))
    drive.do(ResumeRequested(rules=easier))
    drive.join("a")
    drive.join("b")
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(ClientFailed(ClientId("a"), RoundId(drive.newest), FailureReason.TRAINING_FAILED))
    assert kinds(drive.update("b")) == ["Accept", "Aggregate"]


def abandon(drive: Drive) -> list[str]:
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(ClientFailed(ClientId("a"), RoundId(drive.newest), FailureReason.TRAINING_FAILED))
    return kinds(drive.do(ClientFailed(ClientId("b"), RoundId(drive.newest), FailureReason.TRAINING_FAILED)))


MISFIT = "head is missing; it can run hosted"


def test_work_that_fits_at_no_connected_client_ends_the_run_at_once_with_the_reason() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, retry=3)
    drive.join("ab")
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.TASK_MISMATCH, MISFIT))
    *_, end = drive.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.TASK_MISMATCH, MISFIT))
    assert isinstance(end, EndRun)
    assert end.state is RunState.FAILED
    assert end.cause == f"the work of no connected client fits the run: a: {MISFIT} (1 other client likewise)"


@pytest.mark.parametrize("others", ["connected", "fit", "fail"])
def test_one_connected_client_whose_work_may_fit_is_reason_enough_to_go_on(others: str) -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=60.0, retry=3)
    drive.join("abc" if others == "connected" else "ab")
    drive.do(RoundDue())
    drive.draw("ab")
    if others == "fit":
        drive.update("b")
    elif others == "fail":
        drive.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.TRAINING_FAILED, "no data today"))
    else:
        drive.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.TASK_MISMATCH, MISFIT))
    effects = drive.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.TASK_MISMATCH, MISFIT))
    assert not any(isinstance(effect, EndRun) for effect in effects)


def test_retry_lets_that_many_rounds_fail_and_one_more_fails_the_run() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, retry=2)
    drive.join("ab")
    assert [abandon(drive) for _ in range(2)] == [["Abandon", "OpenNextRound"]] * 2
    assert abandon(drive) == ["Abandon", "EndRun"]
    end = drive.effects[-1]
    assert isinstance(end, EndRun)
    assert end.state is RunState.FAILED
    assert end.cause == (
        "3 rounds in a row were abandoned; the last, round 3: quorum_out_of_reach "
        "(0 accepted, quorum 1; 2 failed (training_failed))"
    )


def test_retry_counts_rounds_in_a_row() -> None:
    drive = Drive(rounds=9, cohort_size=2, quorum=1, deadline=60.0, retry=1)
    drive.join("ab")
    for _ in range(3):
        assert abandon(drive) == ["Abandon", "OpenNextRound"]
        committed(drive)
    assert drive.machine.ledger.failures == 0
    assert drive.machine.ledger.version == 3


def test_retry_of_nothing_fails_at_once_and_a_retried_round_has_a_number_of_its_own() -> None:
    drive = Drive(cohort_size=2, quorum=1, retry=0)
    drive.join("ab")
    assert abandon(drive) == ["Abandon", "EndRun"]
    drive.do(ResumeRequested())
    drive.join("ab")
    drive.do(RoundDue())
    assert drive.newest == 2
    assert drive.record.base_version == 0


def test_stop_abandons_the_open_round_and_ends_the_run() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    effects = drive.do(StopRequested("enough"))
    assert kinds(effects) == ["Release", "Abandon", "EndRun"]
    assert effects[0] == Release(ClientId("b"), RoundId(1), ReleaseReason.RUN_ENDED, submit=False)
    assert drive.record.abandon_reason is AbandonReason.STOP_REQUESTED
    assert drive.row("a").unused_because == "the round was abandoned: stop_requested"
    assert drive.effects[-1] == EndRun(RunState.STOPPED, "enough")
    assert drive.do(StopRequested("again")) == []


def test_stop_lets_a_round_that_aggregates_commit_first() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.update("b")
    assert drive.do(StopRequested("enough")) == []
    assert kinds(drive.fold()) == ["Commit", "EndRun"]
    assert drive.machine.ledger.state is RunState.STOPPED
    assert drive.machine.ledger.version == 1


def test_stop_while_an_aggregation_fails_ends_as_stopped_also_without_retries() -> None:
    drive = Drive(cohort_size=1, retry=0, late="next_round")
    drive.begin("a")
    drive.update("a")
    drive.do(StopRequested("enough"))
    effects = drive.do(AggregationFailed(RoundId(1), "oom"))
    assert effects[-1] == EndRun(RunState.STOPPED, "enough")
    assert drive.row("a", 1).unused_because == "the round was abandoned: aggregation_failed"


def test_stop_between_two_rounds_ends_at_once() -> None:
    drive = ready()
    assert drive.do(StopRequested("enough")) == [EndRun(RunState.STOPPED, "enough")]
    assert drive.do(RoundDue()) == []


def test_resume_reopens_a_stopped_run_and_not_a_finished_one() -> None:
    drive = ready(rounds=1)
    drive.do(StopRequested("enough"))
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    drive.join("ab")
    assert committed(drive) == ["Commit", "EndRun"]
    assert drive.do(ResumeRequested()) == []


def test_resume_counts_only_clients_that_were_introduced_again() -> None:
    """A run that has ended receives no events about connections."""
    drive = ready()
    drive.do(StopRequested("enough"))
    drive.join("b")
    drive.do(ResumeRequested())
    drive.join("a")
    assert drive.do(RoundDue()) == []
    assert drive.machine.ledger.membership.num_connected == 1


def test_client_that_joins_as_the_run_ends_is_not_there_after_a_resume() -> None:
    """The event that it joins may apply a deadline that ends the run, which then learns of no disconnection."""
    drive = Drive(cohort_size=1, retry=0, selection_timeout=5.0)
    drive.do(RoundDue())
    assert kinds(drive.join("a", at=10))[-1] == "EndRun"
    assert drive.machine.ledger.state is RunState.FAILED
    drive.do(ResumeRequested())
    assert drive.do(RoundDue()) == []
    assert drive.machine.ledger.membership.num_connected == 0


def test_late_updates_that_wait_when_the_run_ends_are_explained() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, late="next_round")
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    drive.fold(at=61)
    drive.update("b", at=62, round_id=1)
    effects = drive.do(StopRequested("enough"))
    assert effects == [AmendRecord(RoundId(1)), EndRun(RunState.STOPPED, "enough")]
    assert drive.row("b", 1).unused_because == "the run ended first (stopped)"
    assert drive.machine.ledger.carried == {}


def test_an_update_after_the_end_is_told_so_and_an_accepted_one_is_still_accepted() -> None:
    drive = ready(rounds=1)
    committed(drive)
    assert verdict(drive.update("a", round_id=1)) == "accepted"
    assert verdict(drive.update("a", round_id=1, digest="new")) is RejectReason.RUN_ENDED


# ---------------------------------------------------------------- records


def test_the_record_of_a_round_is_kept_until_its_late_updates_are_settled() -> None:
    """Five rounds are abandoned between an update and the commit that uses it; its record must still be amended."""
    drive = Drive(cohort_size=2, quorum=2, deadline=10.0, late="next_round", retry=9)
    drive.begin("ab")
    drive.update("a", at=1)
    for number in range(5):
        drive.tick(at=10 + 20 * number)
        drive.do(RoundDue(), at=20 + 20 * number)
        drive.draw("b")
    effects = drive.update("b", at=105)
    assert list(scales(effects)) == ["a", "b"]
    effects = drive.fold(at=106)
    assert AmendRecord(RoundId(1)) in effects
    assert drive.row("a", 1).used_in == 6


def test_old_records_are_forgotten_when_a_round_opens() -> None:
    drive = ready(rounds=9)
    for _ in range(6):
        committed(drive)
    drive.do(RoundDue())
    assert sorted(drive.machine.ledger.past) == [4, 5, 6]
    assert verdict(drive.update("a", round_id=1)) is RejectReason.TOO_LATE
    assert drive.join("a", working_on=(1,)) == [Release(ClientId("a"), RoundId(1), ReleaseReason.ROUND_CLOSED)]


def test_a_failure_learnt_after_the_round_is_written_into_its_record() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    drive.fold(at=61)
    event = ClientFailed(ClientId("b"), RoundId(1), FailureReason.OUT_OF_TIME, "slow disk")
    assert drive.do(event) == [AmendRecord(RoundId(1))]
    assert (drive.row("b", 1).fate, drive.row("b", 1).reason) == (Fate.STRAGGLER, "out_of_time")


# ---------------------------------------------------------------- clients that reconnect


def test_a_returning_client_is_told_whether_its_work_is_still_wanted() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, late="next_round")
    drive.begin("ab")
    drive.update("a", at=1)
    assert released(drive.join("a", at=2, working_on=(1,))) == {}  # it counts: the client asks for its answer
    assert released(drive.join("b", at=3, working_on=(1,))) == {}  # still wanted
    drive.tick(at=60)
    assert released(drive.join("b", at=61, working_on=(1,))) == {"b": True}
    stranger = ClientId("c")
    assert drive.join("c", at=62, working_on=(1,)) == [Release(stranger, RoundId(1), ReleaseReason.NOT_INVITED)]
    assert drive.join("c", at=63, working_on=(5,)) == [Release(stranger, RoundId(5), ReleaseReason.NOT_INVITED)]
    drive.do(StopRequested("enough"))
    drive.fold(at=64)
    assert released(drive.join("b", at=65, working_on=(1,))) == {"b": False}


def test_the_end_of_a_replaced_stream_changes_nothing() -> None:
    drive = ready()
    drive.join("a", at=5)
    assert drive.do(ClientDisconnected(ClientId("a"), "a@1000.0"), at=6) == []
    assert drive.machine.ledger.membership.is_connected(ClientId("a"))
    drive.do(ClientDisconnected(ClientId("a"), "a@1005.0"), at=7)
    assert not drive.machine.ledger.membership.is_connected(ClientId("a"))


# ---------------------------------------------------------------- evaluation


def test_the_server_evaluates_every_nth_version_and_the_last() -> None:
    drive = ready(rounds=3, evaluate_server_every=2)
    committed(drive)
    committed(drive)
    committed(drive)
    assert [e.version for e in drive.effects if isinstance(e, EvaluateModel)] == [2, 3]
    assert drive.machine.ledger.state is RunState.RUNNING  # it waits for both
    assert drive.do(ModelEvaluated(Version(2), None, "no test data")) == []
    assert kinds(drive.do(ModelEvaluated(Version(3), {"loss": (1.0,)}))) == ["EndRun"]
    assert drive.do(ModelEvaluated(Version(3), {"loss": (1.0,)})) == []


def test_rounds_do_not_wait_for_the_servers_evaluation() -> None:
    drive = ready(rounds=3, evaluate_server_every=1)
    assert committed(drive) == ["Commit", "EvaluateModel", "OpenNextRound"]


def test_clients_evaluate_before_the_next_round_opens() -> None:
    drive = ready(evaluate_clients_every=1, evaluation_deadline=30.0)
    assert committed(drive) == ["Commit", "AskEvaluation", "AskEvaluation"]
    assert drive.deadline == 30
    assert drive.do(ClientEvaluated(ClientId("a"), Version(1), {"loss": (2.0,)}), at=5) == []
    assert drive.do(ClientEvaluated(ClientId("a"), Version(1), {"loss": (9.0,)}), at=5) == []  # the first counts
    assert drive.do(ClientEvaluated(ClientId("b"), Version(0), {"loss": (9.0,)}), at=5) == []  # another version
    effects = drive.do(ClientEvaluated(ClientId("b"), Version(1), None, "no data"), at=6)
    assert effects == [CloseEvaluation(Version(1), {"a": {"loss": (2.0,)}}, {"b": "no data"}), OpenNextRound()]


def test_an_evaluation_ends_at_its_deadline_and_names_the_silent() -> None:
    drive = ready(evaluate_clients_every=1, evaluation_deadline=30.0)
    committed(drive)
    drive.do(ClientEvaluated(ClientId("a"), Version(1), {"loss": (2.0,)}), at=5)
    [closed, following] = drive.tick(at=30)
    assert closed == CloseEvaluation(Version(1), {"a": {"loss": (2.0,)}}, {"b": "did not answer in time"})
    assert following == OpenNextRound()


def test_an_evaluation_does_not_wait_for_the_lost_and_asks_those_who_return() -> None:
    drive = ready(evaluate_clients_every=1, evaluation_deadline=30.0)
    committed(drive)
    drive.do(ClientDisconnected(ClientId("b"), "b@1000.0"), at=2)
    assert drive.join("b", at=3) == [AskEvaluation(ClientId("b"), Version(1), 1030.0, RoundId(1), 1000.0)]
    drive.do(ClientEvaluated(ClientId("a"), Version(1), {"loss": (2.0,)}), at=5)
    [closed, _] = drive.do(ClientLost(ClientId("b"), LossReason.LEFT), at=6)
    assert closed == CloseEvaluation(Version(1), {"a": {"loss": (2.0,)}}, {"b": "lost: left"})


def test_seed_and_version_alone_choose_the_few_clients_that_evaluate() -> None:
    asked = []
    for _ in range(2):
        drive = Drive(rounds=3, rules={"evaluate_clients_every": 1, "evaluate_clients_max": 2}, cohort_size=1)
        drive.join("abcdef")
        committed(drive, "a")
        asked.append([e.client_id for e in drive.effects if isinstance(e, AskEvaluation)])
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2


def test_the_last_version_is_evaluated_by_clients_before_the_run_finishes() -> None:
    drive = ready(rounds=1, evaluate_clients_every=5, evaluation_deadline=30.0)
    assert committed(drive) == ["Commit", "AskEvaluation", "AskEvaluation"]
    assert kinds(drive.tick(at=30)) == ["CloseEvaluation", "EndRun"]


def test_nobody_is_asked_when_nobody_is_there() -> None:
    drive = ready(rounds=1, evaluate_clients_every=1)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.update("b")
    for client in "ab":
        drive.do(ClientDisconnected(ClientId(client), f"{client}@1000.0"))
    assert kinds(drive.fold()) == ["Commit", "EndRun"]


# ---------------------------------------------------------------- a crash


def test_what_was_under_way_is_given_out_again_after_a_crash() -> None:
    drive = ready(evaluate_server_every=1)
    committed(drive)
    assert drive.do(CoordinatorStarted(1001.0), at=4) == [EvaluateModel(Version(1)), OpenNextRound()]
    assert drive.machine.ledger.membership.num_connected == 0
    drive.do(ModelEvaluated(Version(1), None))
    drive.do(RoundDue())
    assert drive.do(CoordinatorStarted(1005.0), at=6) == []


def test_an_evaluation_is_extended_by_the_downtime() -> None:
    drive = ready(evaluate_clients_every=1, evaluation_deadline=30.0)
    committed(drive)
    drive.do(CoordinatorStarted(1010.0), at=15)
    assert drive.deadline == 35
    assert drive.join("a", at=16) == [AskEvaluation(ClientId("a"), Version(1), 1035.0, RoundId(1), 1000.0)]


def test_nothing_is_given_out_again_when_the_run_is_over() -> None:
    drive = ready()
    drive.do(StopRequested("enough"))
    assert drive.do(CoordinatorStarted(1000.0), at=5) == []


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_a_snapshot_and_the_events_since_are_the_state(num_rounds: int) -> None:
    drive = ready(rounds=5)
    for _ in range(num_rounds):
        committed(drive)
    assert drive.machine.may_snapshot
    snapshot = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
    assert snapshot == drive.machine.ledger
    original, drive.machine = drive.machine, RunMachine(drive.rules, snapshot)
    kinds_again = committed(drive)
    drive.machine, restored = original, drive.machine
    drive.now = 1000.0
    assert committed(drive) == kinds_again
    assert restored.ledger == drive.machine.ledger
    drive.do(RoundDue())
    assert not drive.machine.may_snapshot


# ---------------------------------------------------------------- what the service asks before it takes the bytes


def of(client: str, round_id: int, **claims: object) -> Update:
    fields = {"digest": Digest(f"{client}{round_id}"), "num_examples": 10, "work": 1.0, "base_version": Version(0)}
    return Update(ClientId(client), RoundId(round_id), **{**fields, **claims})  # type: ignore[arg-type]


def test_refusals_that_need_no_bytes() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    machine = drive.machine
    assert machine.refusal(of("b", 1)) is None
    assert machine.refusal(of("a", 1)) is None  # it is the accepted one: only its answer was lost
    assert machine.is_accepted(of("a", 1))
    assert not machine.is_accepted(of("b", 1))
    for update, reason in (
        (of("a", 1, digest="other"), RejectReason.ALREADY_REPORTED),
        (of("z", 1), RejectReason.NOT_INVITED),
        (of("b", 2), RejectReason.WRONG_ROUND),
        (of("b", 0), RejectReason.WRONG_ROUND),
    ):
        refusal = machine.refusal(update)
        assert refusal is not None
        assert refusal[0] is reason
    assert not machine.is_hopeless(of("b", 1))
    assert machine.is_hopeless(of("b", 1, num_examples=0))
    assert machine.is_hopeless(of("b", 7))


# ---------------------------------------------------------------- sites with a policy of their own


@pytest.mark.parametrize(
    "reason", [FailureReason.POLICY_REFUSED, FailureReason.AWAITS_APPROVAL, FailureReason.ROLLBACK]
)
def test_who_declines_costs_one_round_nothing_and_is_invited_again_once_it_is_ready(reason: FailureReason) -> None:
    drive = ready(rounds=9)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(ClientFailed(ClientId("a"), RoundId(1), reason, "hours: at night"))
    drive.update("b")
    assert (drive.record.phase, drive.record.close_reason) == ("aggregating", "all_answered")
    assert (drive.record.clients[ClientId("a")].fate, drive.record.clients[ClientId("a")].reason) == ("failed", reason)
    drive.fold()
    drive.do(RoundDue())
    assert drive.record.num_candidates == 1, "nobody waits for who has declined, as long as there is a quorum"
    drive.draw("b")
    drive.join("a")
    drive.update("b")
    drive.fold()
    drive.do(RoundDue())
    assert drive.record.num_candidates == 2


def test_a_run_whose_clients_all_wait_for_approval_goes_on_when_one_is_ready() -> None:
    drive = Drive(rounds=1, cohort_size=1, quorum=1, deadline=60.0, retry=1)
    drive.join("a")
    drive.do(RoundDue())
    drive.draw("a")
    assert kinds(drive.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.AWAITS_APPROVAL))) == [
        "Abandon",
        "OpenNextRound",
    ]
    drive.do(RoundDue())
    assert drive.record.phase == "selecting", "nobody can be drawn yet"
    drive.join("a")
    drive.draw("a")
    drive.update("a")
    assert kinds(drive.fold()) == ["Commit", "EndRun"]
