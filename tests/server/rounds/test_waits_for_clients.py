"""The waits of a run for clients that are away and for room on the disk: no failures, with names, and they end."""

from typing import Any

import pytest

from atoll.protocol.vocabulary import AbandonReason, ClientId, FailureReason, Phase, RoundId, RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.rounds.events import (
    Abandon,
    ClientDisconnected,
    ClientFailed,
    CoordinatorStarted,
    DiskFree,
    DiskShort,
    DrawCohort,
    EndRun,
    Invite,
    LossReason,
    OpenNextRound,
    PauseRequested,
    ResumeRequested,
    ResumeRun,
    RoundDue,
    StopRequested,
)
from atoll.server.rounds.run_rules import RunRules, WaitRules
from atoll.server.rounds.waiting import wait_of
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive, kinds

HOUR = 3600.0


def waiting(wait: WaitRules | None = WaitRules(), **policy: Any) -> Drive:  # noqa: B008 - frozen
    fields = {"cohort_size": 2, "selection_timeout": 60.0, "deadline": 600.0, "retry": 0} | policy
    return Drive(rules={"wait": wait}, **fields)


def test_a_run_that_nobody_has_joined_waits_for_days_and_then_begins_its_first_round():
    drive = waiting()
    drive.do(RoundDue())
    at = 0.0
    while at < 3 * 24 * HOUR:
        assert drive.machine.deadline is not None
        at = drive.machine.deadline - 1000.0
        assert drive.tick(at) == []
    assert drive.machine.ledger.next_round == 2, "one round waits, none is abandoned"
    assert len([e for e in drive.effects if isinstance(e, Abandon)]) == 0
    assert kinds(drive.join("a", at + 5)) == []
    assert kinds(drive.join("b", at + 6)) == ["DrawCohort"]
    drive.draw("ab")
    assert drive.record.waiting_since is None
    assert drive.record.waited == at + 6 - 60.0


def test_the_log_has_a_line_an_hour_as_the_machine_looks_again_each_hour():
    drive = waiting()
    drive.do(RoundDue())
    drive.tick(60.0)
    assert drive.machine.deadline == 1000.0 + 60.0 + HOUR


def test_a_wait_names_the_missing_clients_with_the_reason_and_the_time():
    drive = waiting(cohort_size=3)
    drive.join("abc")
    drive.lose("b", at=10.0)
    drive.do(RoundDue())
    drive.do(ClientFailed(ClientId("c"), RoundId(1), FailureReason.POLICY_REFUSED, "tasks: not here"), 20.0)
    drive.tick(70.0)
    wait = wait_of(drive.machine)
    assert wait is not None
    assert (wait.cause, wait.since) == ("too_few_clients", 1070.0)
    assert [(m.client, m.why) for m in wait.missing] == [
        ("b", "no sign of life"),
        ("c", "declining (policy_refused) (tasks: not here)"),
    ]
    assert wait.sentence() == (
        "waiting for clients since 1970-01-01 00:17:50 UTC: "
        "b (no sign of life, since 1970-01-01 00:16:50 UTC), "
        "c (declining (policy_refused) (tasks: not here), since 1970-01-01 00:17:00 UTC)"
    )


def test_clients_that_come_back_within_the_selection_timeout_are_in_the_same_round():
    drive = waiting(cohort_size=3, quorum=2)
    drive.do(RoundDue())
    drive.tick(60.0)
    drive.join("ab", at=5000.0)
    assert drive.machine.deadline == 1000.0 + 5000.0 + 60.0
    (drawn,) = [e for e in drive.join("c", at=5010.0) if isinstance(e, DrawCohort)]
    assert [c.client_id for c in drawn.candidates] == ["a", "b", "c"]


def test_a_client_that_is_away_costs_one_round_its_selection_timeout_and_not_each():
    drive = waiting(cohort_size=3, quorum=2)
    drive.join("ab")
    drive.do(RoundDue())
    assert kinds(drive.tick(60.0)) == ["DrawCohort"]
    drive.draw("ab")
    drive.update("a")
    drive.update("b")
    drive.fold()
    assert kinds(drive.do(RoundDue())) == ["DrawCohort"], "it does not wait again for the third"
    drive.draw("ab")
    drive.join("c")
    drive.update("a")
    drive.update("b")
    drive.fold()
    (drawn,) = drive.do(RoundDue())
    assert isinstance(drawn, DrawCohort)
    assert len(drawn.candidates) == 3, "the third is back"
    drive.draw("abc")
    drive.lose("c")
    for client in "ab":
        drive.update(client)
    drive.fold()
    assert drive.do(RoundDue()) == [], "one that has just gone may come back"


@pytest.mark.parametrize(
    ("reason", "abandoned"),
    [
        (FailureReason.ROLLBACK, AbandonReason.AWAITS_CLIENTS),
        (FailureReason.DISK_FULL, AbandonReason.AWAITS_CLIENTS),
        (FailureReason.CLOCK_SKEW, AbandonReason.AWAITS_CLIENTS),
        (FailureReason.SHUTTING_DOWN, AbandonReason.AWAITS_CLIENTS),
        (FailureReason.TRAINING_FAILED, AbandonReason.QUORUM_OUT_OF_REACH),
    ],
)
def test_only_a_round_that_failed_by_itself_uses_up_a_retry(reason: FailureReason, abandoned: AbandonReason):
    drive = waiting(retry=3)
    drive.begin("ab")
    effects = drive.do(ClientFailed(ClientId("b"), RoundId(1), reason))
    assert Abandon(RoundId(1), abandoned) in effects
    assert drive.machine.ledger.failures == (abandoned is AbandonReason.QUORUM_OUT_OF_REACH)


def test_a_client_that_is_lost_in_each_of_ten_rounds_never_ends_the_run():
    drive = waiting()
    for _ in range(10):
        drive.join("ab")
        drive.do(RoundDue())
        drive.draw("ab")
        assert kinds(drive.lose("b", why=LossReason.LEFT))[-1] == "OpenNextRound"
    assert drive.machine.ledger.failures == 0


def test_a_round_with_a_loss_and_a_failure_has_failed_by_itself():
    drive = waiting(retry=3, cohort_size=3, quorum=3)
    drive.begin("abc")
    drive.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.TRAINING_FAILED))
    assert drive.machine.ledger.failures == 1


def test_a_slow_client_at_the_deadline_is_no_absence_and_one_without_a_connection_is():
    for is_connected in (True, False):
        drive = waiting(retry=3)
        drive.begin("ab")
        drive.update("a", at=5.0)
        if not is_connected:
            drive.do(ClientDisconnected(ClientId("b"), "b@1000.0"), 590.0)
        drive.tick(600.0)
        assert drive.machine.ledger.failures == is_connected


def test_the_longest_wait_ends_in_a_failure_with_the_cause():
    drive = waiting(WaitRules(2 * HOUR, "fail"))
    drive.join("a")
    drive.do(RoundDue())
    assert drive.tick(60.0) == []
    assert drive.tick(60.0 + HOUR) == []
    (*_, end) = drive.tick(60.0 + 2 * HOUR)
    detail = "1 available after 7200 s, 2 needed"
    assert end == EndRun(RunState.FAILED, f"round 1 has waited for clients: {detail}")


def test_the_longest_wait_ends_in_a_pause_from_which_the_run_resumes_by_itself():
    drive = waiting(WaitRules(HOUR))
    drive.join("a")
    drive.do(RoundDue())
    drive.tick(60.0)
    assert kinds(drive.tick(60.0 + HOUR)) == ["Abandon", "PauseRun"]
    wait = wait_of(drive.machine)
    assert wait is not None
    assert wait.since == 1060.0
    ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
    assert ledger == drive.machine.ledger
    drive.do(CoordinatorStarted(drive.now))
    assert drive.join("a", 3 * HOUR) == []
    assert drive.join("b") == [ResumeRun()]
    assert kinds(drive.do(ResumeRequested())) == ["OpenNextRound"]
    assert kinds(drive.do(RoundDue())) == ["DrawCohort"]


def test_a_run_that_its_operator_has_paused_stays_paused():
    drive = waiting()
    drive.do(RoundDue())
    drive.tick(60.0)
    assert kinds(drive.do(PauseRequested("for a while"))) == ["Abandon", "PauseRun"]
    assert drive.join("ab") == []


def test_a_run_without_rules_of_a_wait_does_as_before():
    drive = waiting(None)
    drive.do(RoundDue())
    assert [type(e) for e in drive.tick(60.0)] == [Abandon, EndRun]
    assert drive.machine.ledger.state is RunState.FAILED


def test_rules_of_an_earlier_journal_have_no_wait():
    rules = RunRules(policy=waiting().rules.policy, rounds=3, wait=WaitRules(5.0, "fail"))
    text = encode_rules(rules)
    assert decode_rules(text, where="here") == rules
    earlier = text.replace(',"wait":{"most":5.0,"then":"fail"}', "")
    assert earlier != text
    assert decode_rules(earlier, where="here").wait is None


def test_a_buffer_waits_for_clients_and_fills_when_they_come():
    flow = Flow(buffer_size=2, quorum=2, fill_timeout=60.0, retry=0, rules={"wait": WaitRules()})
    flow.do(RoundDue())
    assert flow.tick(60.0) == []
    assert flow.tick(60.0 + HOUR) == []
    wait = wait_of(flow.machine)
    assert wait is not None
    assert wait.since == 1060.0
    assert kinds(flow.join("a", at=9000.0)) == ["DrawCohort", "Invite"]
    assert flow.record.phase is Phase.COLLECTING
    assert flow.record.waiting_since is None
    assert flow.record.deadline == 1000.0 + 9000.0 + 60.0


def test_the_next_round_after_an_absence_is_due():
    drive = waiting()
    drive.begin("ab")
    assert isinstance(drive.lose("b", why=LossReason.LEFT)[-1], OpenNextRound)


# ---------------------------------------------------------------- the disk


def test_no_deadline_passes_while_the_disk_has_no_room_and_all_move_by_that_time():
    drive = waiting(deadline=60.0)
    drive.begin("ab")
    drive.do(DiskShort("an update of 9 bytes does not fit"), 10.0)
    drive.do(DiskShort("another one"), 11.0)
    wait = wait_of(drive.machine)
    assert wait is not None
    assert (wait.cause, wait.since) == ("disk", 1010.0)
    assert wait.sentence() == (
        "waiting for room on disk since 1970-01-01 00:16:50 UTC: an update of 9 bytes does not fit: "
        "free some, and it continues by itself"
    )
    for hour in (1, 2, 3):
        assert drive.machine.deadline == 1010.0 + hour * HOUR, "a line each hour"
        assert drive.tick(10.0 + hour * HOUR) == []
    effects = drive.do(DiskFree(), 10.0 + 3 * HOUR)
    assert [(e.client_id, e.deadline) for e in effects if isinstance(e, Invite)] == [
        ("a", 1060.0 + 3 * HOUR),
        ("b", 1060.0 + 3 * HOUR),
    ]
    assert wait_of(drive.machine) is None
    drive.update("a")
    assert "Aggregate" in kinds(drive.update("b", at=55.0 + 3 * HOUR))


def test_an_update_that_fits_counts_while_another_does_not():
    drive = waiting(quorum=1, linger=0.0)
    drive.begin("ab")
    drive.do(DiskShort("a large one"), 10.0)
    assert "Aggregate" in kinds(drive.update("a", at=5000.0))


def test_the_disk_is_looked_at_anew_after_a_restart_and_the_time_counts_once():
    drive = waiting(deadline=60.0, outage_max=1000.0)
    drive.begin("ab")
    drive.do(DiskShort("no room"), 10.0)
    drive.do(CoordinatorStarted(1000.0 + 110.0), 130.0)
    assert drive.machine.ledger.short_since is None
    assert drive.record.deadline == 1060.0 + 100.0 + 20.0


def test_an_invitation_of_an_asynchronous_run_moves_with_the_disk():
    flow = Flow(buffer_size=2, quorum=2, fill_timeout=500.0, deadline=60.0, rules={"wait": WaitRules()})
    flow.join("ab")
    flow.do(DiskShort("no room"), 10.0)
    assert flow.tick(400.0) == []
    effects = flow.do(DiskFree(), 410.0)
    assert [(e.client_id, e.deadline) for e in effects if isinstance(e, Invite)] == [("a", 1460.0), ("b", 1460.0)]
    assert flow.record.deadline == 1900.0


def test_a_stop_ends_a_run_that_waits_for_its_disk():
    drive = waiting()
    drive.begin("ab")
    drive.do(DiskShort("no room"))
    assert kinds(drive.do(StopRequested("enough")))[-1] == "EndRun"
    assert wait_of(drive.machine) is None
    assert drive.do(DiskFree()) == []


# ---------------------------------------------------------------- the longest wait for the disk

NO_ROOM = "it has waited for disk space: an update of 9 bytes does not fit"


def full(then: str = "pause", **policy: Any) -> Drive:
    """A round of two clients, with one update in, that has waited for its disk from second 10 on, for an hour."""
    drive = waiting(WaitRules(HOUR, then), **policy)  # type: ignore[arg-type]
    drive.begin("ab")
    drive.update("a", at=5.0)
    drive.do(DiskShort("an update of 9 bytes does not fit"), 10.0)
    assert drive.machine.deadline == 1010.0 + HOUR
    assert drive.tick(9.0 + HOUR) == []
    return drive


def test_the_longest_wait_for_the_disk_ends_in_a_failure_with_the_cause():
    drive = full("fail")
    effects = drive.tick(10.0 + HOUR)
    assert [e for e in effects if isinstance(e, EndRun)] == [EndRun(RunState.FAILED, NO_ROOM)]
    record = drive.machine.ledger.past[RoundId(1)]
    assert (record.abandon_reason, record.detail) == (AbandonReason.AWAITS_ROOM, NO_ROOM)


def test_the_longest_wait_for_the_disk_ends_in_a_pause_from_which_the_run_resumes_when_there_is_room():
    drive = full(late="next_round")
    assert kinds(drive.tick(10.0 + HOUR)) == ["Release", "Abandon", "PauseRun"]
    wait = wait_of(drive.machine)
    assert wait is not None
    assert (wait.cause, wait.since) == ("disk", 1010.0)
    assert drive.machine.ledger.failures == 0
    assert kinds(drive.join("c", at=20.0 + HOUR)) == [], "the clients are not what it lacks"
    assert drive.tick(10.0 + 2 * HOUR) == [], "a line each hour"
    assert kinds(drive.do(DiskFree(), 3 * HOUR)) == ["ResumeRun"]
    assert wait_of(drive.machine) is not None, "for clients, until the driver has resumed it"
    assert kinds(drive.do(ResumeRequested())) == ["OpenNextRound"]
    drive.do(RoundDue())
    assert ClientId("a") in drive.machine.ledger.carried or any(u.client_id == "a" for u in drive.machine.round.held)


def test_a_run_that_is_resumed_on_a_full_disk_waits_as_long_again():
    drive = full()
    drive.tick(10.0 + HOUR)
    assert kinds(drive.do(ResumeRequested(), 2 * HOUR)) == ["OpenNextRound"]
    assert drive.machine.deadline == 1000.0 + 3 * HOUR
    assert kinds(drive.tick(3 * HOUR)) == ["PauseRun"]


def test_a_fold_that_has_waited_in_vain_for_room_ends_with_its_round():
    drive = waiting(WaitRules(HOUR, "fail"))
    drive.begin("ab")
    drive.update("a")
    assert "Aggregate" in kinds(drive.update("b", at=9.0))
    drive.do(DiskShort("a version of 9 bytes does not fit"), 10.0)
    assert kinds(drive.tick(10.0 + HOUR)) == ["Abandon", "EndRun"]


def test_a_wait_for_the_disk_without_an_end_has_none():
    drive = waiting(WaitRules())
    drive.begin("ab")
    drive.do(DiskShort("no room"), 10.0)
    for hour in range(1, 100):
        assert drive.tick(10.0 + hour * HOUR) == []
    assert drive.machine.ledger.state is RunState.RUNNING
