"""The waits of a run in the log and in the views: for whom, and why."""

from typing import Any

from atoll.protocol.vocabulary import ClientId, FailureReason, LossReason, RoundId
from atoll.server.members.member import Profile
from atoll.server.rounds.events import (
    ClientEvaluated,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CoordinatorStarted,
    Event,
    ResumeRequested,
    RoundDue,
    StopRequested,
)
from atoll.server.rounds.waiting import what_a_run_waits_for, why_not
from atoll.server.views.narration import Narrator, narrate, wait_for_clients
from atoll.server.views.sentences import sentences
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive


def said(drive: Drive, event: Event, at: float | None = None) -> list[str]:
    """Deliver an event and return the lines of the log."""
    effects = drive.do(event, at)
    return [*narrate(drive.machine, event, tuple(effects))]


def failed(client: str, reason: FailureReason, detail: str = "", round_id: int = 1, *, waits: bool = False) -> Event:
    return ClientFailed(ClientId(client), RoundId(round_id), reason, detail, waits)


def four_unavailable() -> Drive:
    """Return a run of four clients in round 2, of which none is available, for three reasons."""
    drive = Drive(cohort_size=4, deadline=60.0, failure_rest=10.0, retry_wait=10.0)
    drive.join("abcd")
    drive.do(RoundDue())
    drive.draw("abcd")
    detail = "approval: its site's operator approves it with `atoll site approve r --terms 3f2a`"
    drive.do(failed("a", FailureReason.DISK_FULL, "no space left"))
    for client in "bc":
        drive.do(failed(client, FailureReason.AWAITS_APPROVAL, detail))
    drive.do(failed("d", FailureReason.POLICY_REFUSED, "tasks: not allowed here"))
    drive.do(RoundDue())
    return drive


def test_a_round_without_available_clients_names_them_and_their_reasons():
    drive = four_unavailable()
    assert wait_for_clients(drive.machine) == (
        "round 2 waits for clients: 4 connected, none available, 4 wanted (quorum 4): "
        "a not invited for a while after disk_full; "
        "b, c awaiting approval (approval: its site's operator approves it with `atoll site approve r --terms 3f2a`); "
        "d declining (policy_refused) (tasks: not allowed here)"
    )
    assert what_a_run_waits_for(drive.machine) == wait_for_clients(drive.machine)


def test_a_client_is_asked_after_by_name():
    membership = four_unavailable().machine.ledger.membership
    assert why_not(membership, ClientId("a")) == "not invited for a while after disk_full"
    membership.wake()
    assert why_not(membership, ClientId("a")) == ""
    membership.disconnected(ClientId("a"), "a@1000.0")
    assert why_not(membership, ClientId("a")) == "not connected"
    membership.lost(ClientId("a"), LossReason.LEASE_EXPIRED)
    assert why_not(membership, ClientId("a")) == "no sign of life"


def test_a_collecting_round_names_those_whose_updates_are_awaited_and_the_disconnected():
    drive = Drive(cohort_size=3, deadline=60.0)
    drive.begin("abc")
    drive.update("a")
    assert what_a_run_waits_for(drive.machine) == "round 1 waits for the updates of b, c"
    drive.machine.ledger.membership.disconnected(ClientId("c"), "c@1000.0")
    assert what_a_run_waits_for(drive.machine) == "round 1 waits for the updates of b, c; not connected: c"
    drive.update("b")
    drive.update("c")
    assert what_a_run_waits_for(drive.machine) == "round 1 is being aggregated"


def test_many_names_are_counted():
    drive = Drive(cohort_size=12, deadline=60.0)
    drive.begin("abcdefghijkl")
    assert what_a_run_waits_for(drive.machine) == "round 1 waits for the updates of a, b, c, d, e, f, g, h and 4 more"


def test_between_two_rounds_the_retry_and_its_number_are_named():
    drive = Drive(cohort_size=2, deadline=60.0, retry_wait=10.0, failure_rest=10.0, retry=5)
    drive.begin("ab")
    lines = said(drive, failed("a", FailureReason.DISK_FULL, "no space left"))
    wait, rest = drive.machine.ledger.retry_at - drive.now, drive.row("a").rest
    assert lines == [
        f"round 1: a failed: disk_full: no space left; it is not invited for {rest:.1f} s",
        "round 1: abandoned: the quorum could no longer be reached (quorum_out_of_reach): 0 accepted, quorum 2; "
        "1 failed (disk_full); "
        f"retry 1 of 5 follows {wait:.1f} s later",
    ]
    why = "quorum_out_of_reach: 0 accepted, quorum 2; 1 failed (disk_full)"
    told = f"round 1 was abandoned ({why}); retry 1 of 5 follows {wait:.1f} s later"
    assert what_a_run_waits_for(drive.machine) == told
    assert sentences(drive.record)[0].endswith(f"; retry 1 of 5 follows {wait:.1f} s later.")
    assert any(f"it was then not invited for {rest:.1f} s" in sentence for sentence in sentences(drive.record))
    back = said(drive, CoordinatorStarted(drive.now), drive.now - 1000.0 + 1.0)
    assert back == [f"the coordinator is back after 1 s; the next round begins in {wait - 1:.1f} s"]


def test_a_line_about_a_failure_has_the_exception_and_not_the_head_of_its_traceback():
    drive = Drive(cohort_size=2, deadline=60.0, retry_wait=10.0, failure_rest=0.0, retry=5)
    drive.begin("ab")
    trace = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss\n    raise ValueError("odd")\n'
    lines = said(drive, failed("a", FailureReason.TRAINING_FAILED, f"{trace}ValueError: odd\n"))
    assert lines[0] == "round 1: a failed: training_failed: ValueError: odd"
    drive.begin("c")
    on_one_line = trace.replace("\n", "\\u000a") + "ValueError: odd"
    assert not any("Traceback" in line for line in said(drive, failed("b", FailureReason.TRAINING_FAILED, on_one_line)))


def test_a_buffer_that_nobody_fills_says_whom_it_waits_for():
    flow = Flow()
    assert wait_for_clients(flow.machine) == "round 1 waits for clients: none connected, 1 wanted (quorum 2)"
    flow.join("a")
    assert what_a_run_waits_for(flow.machine) == "round 1 waits for the updates of a"
    assert wait_for_clients(flow.machine) == ""


def evaluated(**rules: Any) -> Drive:
    drive = Drive(rules={"evaluate_clients_every": 1} | rules, cohort_size=2, deadline=60.0)
    drive.begin("ab")
    drive.update("a")
    drive.update("b")
    return drive


def test_an_evaluation_tells_whom_it_asks_who_declines_and_how_it_ends():
    drive = evaluated()
    effects = drive.fold()
    assert "version 1: asked a, b to evaluate it (deadline 60.0 s)" in narrate(
        drive.machine, RoundDue(), tuple(effects)
    )
    assert what_a_run_waits_for(drive.machine) == "version 1 is being evaluated by a, b"
    why = "policy_refused: evaluations are not allowed here"
    declined = ClientEvaluated(ClientId("b"), drive.machine.ledger.version, None, why, FailureReason.POLICY_REFUSED)
    assert said(drive, declined) == [
        f"version 1: b did not evaluate it: {why}; it is not asked again until it reports that it is ready"
    ]
    [row] = [client for client in "ab" if not drive.machine.ledger.membership.evaluates(ClientId(client))]
    assert row == "b"
    drive.tick(60.0)
    assert what_a_run_waits_for(drive.machine) == ""


def test_a_run_that_is_not_running_waits_for_nobody():
    drive = Drive(cohort_size=2)
    drive.do(RoundDue())
    assert what_a_run_waits_for(drive.machine).startswith("round 1 waits for clients: none connected")
    drive.do(StopRequested("enough"))
    assert what_a_run_waits_for(drive.machine) == wait_for_clients(drive.machine) == ""
    assert said(drive, ResumeRequested(wait=True)) == ["the run is resumed, and waits until there is room"]


def test_a_member_keeps_its_software_its_newest_sign_of_life_and_its_newest_failure():
    drive = Drive(cohort_size=1, failure_rest=10.0)
    drive.do(ClientJoined(ClientId("a"), "s", Profile(), (), "atoll 0.1.0"), 5.0)
    drive.do(RoundDue())
    drive.draw("a")
    drive.do(failed("a", FailureReason.TRAINING_FAILED, "Traceback\n  ...\nValueError: no such column"), 7.0)
    member = drive.machine.ledger.membership.members[ClientId("a")]
    assert (member.software, member.seen_at) == ("atoll 0.1.0", 1007.0)
    assert member.trouble is not None
    assert (member.trouble.reason, member.trouble.at) == ("training_failed", 1007.0)
    assert member.trouble.detail.endswith("ValueError: no such column")
    drive.do(ClientLost(ClientId("a"), LossReason.LEASE_EXPIRED, silent_for=60.0), 90.0)
    assert member.seen_at == 1030.0, "its loss is no sign of life"


def test_a_round_that_waits_has_a_line_for_each_reason_and_none_for_each_client_that_comes():
    drive, narrator = Drive(cohort_size=4, deadline=60.0), Narrator()

    def lines(event: Event) -> list[str]:
        effects = drive.do(event)
        return [*narrator.lines(drive.machine, event, tuple(effects))]

    assert lines(RoundDue()) == ["round 1 waits for clients: none connected, 4 wanted (quorum 4)"]
    joined = [ClientJoined(ClientId(client), "s", Profile(), ()) for client in "abc"]
    assert [line for event in joined for line in lines(event)] == []
    (line,) = lines(failed("a", FailureReason.POLICY_REFUSED, "tasks: not allowed here"))[1:]
    assert line.startswith("round 1 waits for clients: 3 connected, 2 available, 4 wanted (quorum 4): a declining")


def test_a_member_is_away_since_its_goodbye_its_silence_or_the_end_of_the_coordinator_that_it_was_connected_to():
    drive = Drive(cohort_size=4)
    drive.join("abcd", at=5.0)
    drive.do(ClientLost(ClientId("a"), LossReason.LEFT), 1000.0)
    drive.do(ClientLost(ClientId("b"), LossReason.LEASE_EXPIRED, silent_for=60.0), 2000.0)
    drive.do(CoordinatorStarted(4000.0), 5000.0)
    membership = drive.machine.ledger.membership
    assert {client: membership.away_since(client) for client in membership.members} == {
        "a": 2000.0,
        "b": 2940.0,
        "c": 4000.0,
        "d": 4000.0,
    }
    drive.do(ClientLost(ClientId("c"), LossReason.LEASE_EXPIRED, silent_for=60.0), 5060.0)  # it has not come back
    drive.do(CoordinatorStarted(7000.0), 7000.0)
    assert membership.away_since(ClientId("c")) == 4000.0
