"""A paused run, rule by rule: its open round, its evaluation, late updates, and its resumption."""

from atoll.protocol.vocabulary import AbandonReason, ClientId, RejectReason, ReleaseReason, RoundId, RunState, Version
from atoll.server.rounds.events import (
    ClientEvaluated,
    EndRun,
    OpenNextRound,
    PauseRequested,
    PauseRun,
    Release,
    ResumeRequested,
    RoundDue,
    StopRequested,
)
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive, kinds, verdict
from tests.server.rounds.test_run_machine import committed, ready

PAUSE, PAUSED = PauseRequested("lunch"), PauseRun("lunch")


def state(drive: Drive) -> RunState:
    return drive.machine.ledger.state


def test_between_two_rounds_it_pauses_at_once_and_a_resume_opens_the_next() -> None:
    drive = ready()
    committed(drive)
    assert drive.do(PAUSE) == [PAUSED]
    assert (state(drive), drive.machine.ledger.cause, drive.deadline) == (RunState.PAUSED, "lunch", None)
    assert drive.do(RoundDue()) == [], "the pause between two rounds was over just now"
    assert drive.do(PAUSE) == []
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    assert (state(drive), drive.machine.ledger.cause) == (RunState.RUNNING, "")
    assert committed(drive) == ["Commit", "OpenNextRound"]


def test_a_round_that_has_invited_its_cohort_ends_as_it_would() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    assert drive.do(PAUSE) == []
    assert state(drive) is RunState.RUNNING
    drive.update("a")
    drive.update("b")
    assert kinds(drive.fold()) == ["Commit", "PauseRun"]
    assert drive.machine.ledger.version == 1


def test_a_round_that_looks_for_clients_is_abandoned_and_that_is_no_failure() -> None:
    drive = Drive(rounds=3, cohort_size=2, quorum=2, deadline=60.0, retry=0)
    drive.do(RoundDue())
    assert kinds(drive.do(PAUSE)) == ["Abandon", "PauseRun"]
    assert drive.record.abandon_reason is AbandonReason.PAUSE_REQUESTED
    assert (state(drive), drive.machine.ledger.failures) == (RunState.PAUSED, 0)
    drive.join("ab")
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    assert committed(drive) == ["Commit", "OpenNextRound"]


def test_whoever_joins_while_it_is_paused_is_there_when_it_goes_on() -> None:
    drive = Drive(rounds=3, cohort_size=2, quorum=2, deadline=60.0)
    drive.do(PAUSE)
    assert drive.join("ab") == []
    drive.do(ResumeRequested())
    assert kinds(drive.do(RoundDue())) == ["DrawCohort"]


def test_a_late_update_is_taken_while_it_is_paused_and_counts_in_the_next_round() -> None:
    drive = Drive(rounds=3, cohort_size=2, quorum=1, deadline=60.0, late="next_round", max_staleness=2)
    drive.join("ab")
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a")
    drive.do(PAUSE)
    drive.tick(at=60)
    assert kinds(drive.fold()) == ["Commit", "PauseRun"]
    assert verdict(drive.update("b", at=70)) == "carried"
    drive.do(ResumeRequested())
    assert list(drive.machine.ledger.carried) == ["b"]


def test_an_evaluation_by_clients_is_over_before_it_rests() -> None:
    drive = ready(evaluate_clients_every=1)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(PAUSE)
    drive.update("a")
    drive.update("b")
    assert kinds(drive.fold()) == ["Commit", "AskEvaluation", "AskEvaluation"]
    assert drive.do(ClientEvaluated(ClientId("a"), Version(1), {"loss": (1.0, 1.0)})) == []
    assert kinds(drive.do(ClientEvaluated(ClientId("b"), Version(1), {"loss": (1.0, 1.0)}))) == [
        "CloseEvaluation",
        "PauseRun",
    ]


def test_a_resume_before_the_round_is_over_takes_the_pause_back() -> None:
    drive = ready()
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(PAUSE)
    assert drive.do(ResumeRequested()) == []
    drive.update("a")
    drive.update("b")
    assert kinds(drive.fold()) == ["Commit", "OpenNextRound"]


def test_the_last_round_finishes_the_run_whether_it_was_to_pause_or_not() -> None:
    drive = ready(rounds=1)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.do(PAUSE)
    drive.update("a")
    drive.update("b")
    assert kinds(drive.fold()) == ["Commit", "EndRun"]
    assert (state(drive), drive.do(PAUSE), drive.do(ResumeRequested())) == (RunState.FINISHED, [], [])


def test_a_paused_run_can_be_stopped() -> None:
    drive = ready()
    drive.do(PAUSE)
    assert drive.do(StopRequested("enough")) == [EndRun(RunState.STOPPED, "enough")]


def test_without_room_it_waits_its_turn_and_clients_are_heard_meanwhile() -> None:
    drive = ready()
    committed(drive)
    drive.do(PAUSE)
    assert drive.do(ResumeRequested(wait=True)) == []
    assert state(drive) is RunState.QUEUED
    drive.join("c")
    assert drive.do(ResumeRequested()) == [OpenNextRound()]
    drive.do(RoundDue())
    assert drive.record.num_candidates == 3


def test_a_stopped_run_may_wait_its_turn_too_and_be_stopped_there() -> None:
    drive = ready()
    drive.do(StopRequested("enough"))
    drive.do(ResumeRequested(wait=True))
    assert (state(drive), drive.machine.ledger.cause) == (RunState.QUEUED, "")
    assert drive.do(StopRequested("after all")) == [EndRun(RunState.STOPPED, "after all")]


def test_clients_of_an_asynchronous_run_train_on_and_their_updates_wait() -> None:
    flow = Flow(concurrency=3, buffer_size=1)
    flow.join("abc")
    flow.do(PAUSE)
    flow.update("a")
    assert kinds(flow.fold())[-1] == "PauseRun"
    assert flow.deadline is not None, "an invitation has its own deadline, paused or not"
    assert verdict(flow.update("b")) == "accepted"
    assert [update.client_id for update in flow.machine.ledger.waiting] == ["b"]
    released = flow.tick(at=flow.deadline)
    assert released[0] == Release(ClientId("c"), RoundId(1), ReleaseReason.OUT_OF_TIME, submit=True)
    flow.do(StopRequested("enough"))
    assert verdict(flow.update("c")) == RejectReason.RUN_ENDED
