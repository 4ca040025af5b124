"""The agent's session, rule by rule: jobs, deadlines, releases, the spool, loss of the connection."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.client.session.events import (
    Answered,
    Asked,
    Connect,
    Connected,
    Discard,
    Disconnected,
    Download,
    Effect,
    Evaluated,
    EvaluationRequest,
    Event,
    Extend,
    Forbidden,
    Invitation,
    JobFailed,
    Key,
    KillWorker,
    ModelReady,
    Released,
    ReportEvaluation,
    ReportFailure,
    ReportStatistics,
    RunEnded,
    StatisticsMade,
    StatisticsRequest,
    StopWork,
    TimePassed,
    Trained,
    Upload,
    UploadCut,
    Work,
)
from atoll.client.session.session import Session, SessionRules, Stage
from atoll.protocol.vocabulary import Digest, FailureReason, ReleaseReason, RoundId, RunId, Version
from atoll.training.statistics.parts import SiteStatistics, count

RUN = RunId("run")
LEASE = 30.0


def key(number: int = 1, kind: str = "round") -> Key:
    return (kind, RUN, number)


def invitation(number: int = 1, time_left: float = 60.0, **fields: Any) -> Invitation:
    return Invitation(RUN, RoundId(number), "task", Version(0), Digest("v0"), time_left, **fields)


def elsewhere(run: str, number: int = 1, time_left: float = 60.0) -> Invitation:
    """Make an invitation of another run."""
    return replace(invitation(number, time_left), run_id=RunId(run))


def question(number: int = 1, time_left: float = 20.0) -> EvaluationRequest:
    return EvaluationRequest(RUN, Version(number), "task", Digest("v1"), time_left)


def survey(number: int = 1, time_left: float = 20.0) -> StatisticsRequest:
    return StatisticsRequest(RunId("run-statistics"), number, "task", time_left)


def spooled(digest: str = "d1") -> Digest:
    return Digest(digest)


class Drive:
    """A session that receives events at instants in seconds since its start."""

    def __init__(self, spool: dict[Key, Digest] | None = None, *, connected: bool = True) -> None:
        rules = SessionRules(tasks=frozenset({"task"}), lease=LEASE)
        self.session = Session(rules, random.Random(1), spool)
        self.now = 0.0
        if connected:
            self.do(Connected())

    def do(self, event: Event, at: float | None = None) -> list[Effect]:
        self.now = self.now if at is None else at
        return list(self.session.receive(event, self.now))

    def training(self, number: int = 1, at: float = 1.0, time_left: float = 60.0) -> list[Effect]:
        """Invite the client and complete its download."""
        self.do(Asked(invitation(number, time_left)), at)
        return self.do(ModelReady(key(number)), at)

    def trained(self, number: int = 1, at: float | None = None) -> list[Effect]:
        return self.do(Trained(key(number), Digest(f"d{number}")), at)

    def release(self, number: int = 1, *, submit: bool = False, at: float | None = None) -> list[Effect]:
        return self.do(Released(RUN, RoundId(number), ReleaseReason.ROUND_CLOSED, submit), at)


def answered(number: int = 1, *, accepted: bool = True, resend: bool = False) -> Answered:
    return Answered(key(number), accepted, resend=resend)


# ---------------------------------------------------------------- the course of a job


def test_an_invitation_becomes_a_download_a_training_an_upload_and_an_answer() -> None:
    drive = Drive()
    asked = invitation()
    assert drive.do(Asked(asked), at=1) == [Download(asked)]
    assert drive.session.working_on == ((RUN, 1),)
    assert drive.do(ModelReady(key()), at=3) == [Work(asked, budget=0.9 * 58.0)]
    assert drive.trained(at=20) == [Upload(key(), Digest("d1"))]
    assert drive.session.job is None
    assert drive.session.working_on == ((RUN, 1),)
    assert drive.do(answered(), at=24) == [Discard(key(), Digest("d1"), accepted=True, is_answered=True)]
    assert drive.session.working_on == ()
    assert drive.session.deadline is None


def test_the_budget_leaves_time_for_an_upload_as_long_as_the_last_ones() -> None:
    drive = Drive()
    drive.training()
    drive.trained(at=10)
    drive.do(answered(), at=18)  # 8 s
    asked = invitation(2)
    drive.do(Asked(asked), at=20)
    assert drive.do(ModelReady(key(2)), at=20) == [Work(asked, budget=60 - 1.5 * 8)]


def test_the_reserve_follows_the_mean_of_the_last_upload_and_those_before() -> None:
    drive = Drive()
    drive.training()
    drive.trained(at=10)
    drive.do(answered(), at=18)  # 8 s
    drive.do(Asked(invitation(2)), at=20)
    drive.do(ModelReady(key(2)), at=20)
    drive.trained(2, at=30)
    drive.do(answered(2), at=34)  # 4 s
    drive.do(Asked(invitation(3)), at=40)
    assert drive.do(ModelReady(key(3)), at=40) == [Work(invitation(3), budget=60 - 1.5 * 6)]


def test_the_budget_leaves_a_twentieth_when_uploads_take_no_time() -> None:
    drive = Drive()
    drive.session.upload_seconds = 0.001
    assert drive.training(time_left=60.0) == [Work(invitation(), budget=57.0)]


def test_the_budget_is_at_least_half_of_the_time_left() -> None:
    drive = Drive()
    drive.session.upload_seconds = 1000.0
    assert drive.training(time_left=60.0) == [Work(invitation(), budget=30.0)]


def test_an_evaluation_is_reported_and_not_spooled() -> None:
    drive = Drive()
    asked = question()
    assert drive.do(Asked(asked), at=1) == [Download(asked)]
    assert drive.session.working_on == ()
    assert drive.do(ModelReady(key(1, "version")), at=2) == [Work(asked, budget=19.0)]
    report = drive.do(Evaluated(key(1, "version"), {"loss": (1.0,)}), at=5)
    assert report == [ReportEvaluation(RUN, Version(1), {"loss": (1.0,)}, "")]


FOUND = SiteStatistics({("train", "examples", ""): count(7)})


def test_statistics_need_no_model_and_are_reported_at_once() -> None:
    drive = Drive()
    asked = survey()
    assert drive.do(Asked(asked), at=1) == [Work(asked, budget=20.0)]
    assert drive.session.working_on == (), "they belong to no round"
    assert drive.do(Asked(survey(time_left=30.0)), at=2) == [Extend(budget=30.0)], "asked again after a reconnection"
    report = drive.do(StatisticsMade(asked.key, FOUND), at=5)
    assert report == [ReportStatistics(asked.run_id, 1, FOUND)]
    assert drive.session.job is None


def test_statistics_wait_for_a_training_and_the_training_for_them() -> None:
    drive = Drive()
    drive.training()
    asked = survey(time_left=50.0)
    assert drive.do(Asked(asked), at=2) == []
    assert drive.trained(at=12) == [Work(asked, budget=40.0), Upload(key(), Digest("d1"))]
    assert drive.do(Asked(elsewhere("other")), at=13) == []
    assert drive.do(StatisticsMade(asked.key, FOUND), at=14) == [
        ReportStatistics(asked.run_id, 1, FOUND),
        Download(elsewhere("other")),
    ]


@pytest.mark.parametrize(
    ("event", "reason", "detail"),
    [
        (JobFailed(survey().key, FailureReason.TASK_BROKEN, "no"), FailureReason.TASK_BROKEN, "task_broken: no"),
        (
            Forbidden(survey(), FailureReason.POLICY_REFUSED, "statistics: no"),
            FailureReason.POLICY_REFUSED,
            "policy_refused: statistics: no",
        ),
    ],
)
def test_no_statistics_are_reported_with_their_reason(event: Event, reason: FailureReason, detail: str) -> None:
    drive = Drive()
    drive.do(Asked(survey()), at=1)
    reports = [effect for effect in drive.do(event, at=2) if isinstance(effect, ReportStatistics)]
    assert reports == [ReportStatistics(survey().run_id, 1, None, detail, reason)]


def test_statistics_that_are_no_longer_allowed_stop_and_are_not_sent() -> None:
    drive = Drive()
    drive.do(Asked(survey()), at=1)
    effects = drive.do(Forbidden(survey(), FailureReason.POLICY_REFUSED, "statistics: no"), at=2)
    assert StopWork(survey().key) in effects
    assert drive.do(StatisticsMade(survey().key, FOUND), at=3) == []


def test_statistics_that_are_not_made_in_time_kill_the_worker() -> None:
    drive = Drive()
    drive.do(Asked(survey()), at=1)
    kill, report = drive.do(TimePassed(), at=21 + LEASE)
    assert kill == KillWorker(survey().key)
    assert isinstance(report, ReportStatistics)
    assert report.reason is FailureReason.WORKER_HUNG


def test_a_task_that_is_not_allowed_is_refused_by_name() -> None:
    drive = Drive()
    asked = Invitation(RUN, RoundId(1), "other", Version(0), Digest("v0"), 60.0)
    [report] = drive.do(Asked(asked))
    assert report == ReportFailure(
        RUN, RoundId(1), FailureReason.TASK_NOT_ALLOWED, "task 'other' is not allowed here (allowed: task)"
    )
    assert drive.session.job is None


def test_a_failed_job_is_reported() -> None:
    drive = Drive()
    drive.training()
    event = JobFailed(key(), FailureReason.WORKER_CRASHED, "exit code 1")
    assert drive.do(event) == [ReportFailure(RUN, RoundId(1), FailureReason.WORKER_CRASHED, "exit code 1")]
    drive.do(Asked(question()))
    [report] = drive.do(JobFailed(key(1, "version"), FailureReason.DOWNLOAD_FAILED, "gone"))
    assert report == ReportEvaluation(RUN, Version(1), None, "download_failed: gone", FailureReason.DOWNLOAD_FAILED)


def test_an_answer_of_a_job_that_is_over_is_ignored_and_its_update_discarded() -> None:
    drive = Drive()
    assert drive.trained(7) == [Discard(key(7), Digest("d7"))]
    assert drive.do(ModelReady(key(7))) == []
    assert drive.do(JobFailed(key(7), FailureReason.TASK_BROKEN)) == []


# ---------------------------------------------------------------- one job at a time


def test_a_newer_request_stops_the_job_and_begins_when_the_worker_has_answered() -> None:
    drive = Drive()
    drive.training()
    assert drive.do(Asked(invitation(2)), at=10) == [StopWork(key())]
    assert drive.session.job is not None
    assert drive.session.job.stage is Stage.STOPPING
    assert drive.trained(at=11) == [Discard(key(), Digest("d1")), Download(invitation(2))]


def test_a_newer_request_begins_when_the_worker_that_hangs_is_killed() -> None:
    drive = Drive()
    drive.training()
    drive.do(Asked(invitation(2)), at=10)
    assert drive.session.deadline == 10 + LEASE
    assert drive.do(TimePassed(), at=40) == [KillWorker(key()), Download(invitation(2))]


def test_a_newer_request_replaces_a_download_at_once() -> None:
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    assert drive.do(Asked(invitation(2)), at=2) == [StopWork(key()), Download(invitation(2))]


def test_an_invitation_repeated_while_its_job_ends_is_not_trained_twice() -> None:
    drive = Drive()
    drive.training()
    assert drive.release(submit=True, at=5) == [StopWork(key())]
    assert drive.do(Asked(invitation()), at=6) == []
    assert drive.trained(at=7) == [Upload(key(), Digest("d1"))]
    assert drive.session.job is None


def test_an_invitation_that_comes_again_after_its_update_leaves_the_next_job_alone() -> None:
    drive = Drive()
    drive.training(1)
    drive.trained(1, at=5)
    drive.training(2, at=6)
    assert drive.do(Asked(invitation(1)), at=7) == []
    assert drive.session.job is not None
    assert drive.session.job.request.key == key(2)
    assert not drive.session.waiting
    assert drive.trained(2, at=8) == [Upload(key(2), Digest("d2"))]


def test_a_request_that_waits_is_dropped_with_its_release_or_the_stream() -> None:
    for withdraw in (Released(RUN, RoundId(2), ReleaseReason.ROUND_CLOSED, False), Disconnected(), RunEnded(RUN)):
        drive = Drive()
        drive.training()
        drive.do(Asked(invitation(2)), at=10)
        drive.do(withdraw, at=11)
        assert not any(isinstance(effect, Download) for effect in drive.trained(at=12))


# ---------------------------------------------------------------- deadlines


def test_a_worker_may_outlive_its_deadline_by_the_lease_and_is_then_killed() -> None:
    drive = Drive()
    drive.training(at=1, time_left=60)
    assert drive.session.deadline == 61 + LEASE
    effects = drive.do(TimePassed(), at=91)
    assert effects[0] == KillWorker(key())
    assert isinstance(effects[1], ReportFailure)
    assert effects[1].reason is FailureReason.WORKER_HUNG


def test_a_release_does_not_prolong_the_lease_of_a_worker_that_is_overdue() -> None:
    drive = Drive()
    drive.training(at=1, time_left=60)
    drive.release(at=80)
    assert drive.session.deadline == 61 + LEASE


def test_an_invitation_repeated_with_a_later_deadline_extends_the_worker() -> None:
    drive = Drive()
    drive.training(at=1, time_left=60)
    assert drive.do(Asked(invitation(time_left=80)), at=21) == [Extend(0.9 * 80.0)]
    assert drive.session.deadline == 101 + LEASE
    assert drive.do(Asked(invitation(time_left=79.99)), at=21) == []  # the same, but for the network


def test_a_download_that_is_not_done_by_the_deadline_is_given_up() -> None:
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    [stop, report] = drive.do(TimePassed(), at=61)
    assert stop == StopWork(key())
    assert isinstance(report, ReportFailure)
    assert report.reason is FailureReason.OUT_OF_TIME


def test_a_download_is_not_given_up_while_the_deadline_may_have_moved() -> None:
    """Extend a round after an outage of the coordinator, which the client learns only after it has reconnected."""
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    drive.do(Disconnected(), at=10)
    assert drive.session.deadline is None
    drive.do(Connected(), at=70)
    assert drive.session.deadline == 70 + LEASE
    assert drive.do(Asked(invitation(time_left=50)), at=70.5) == []
    assert drive.session.deadline == 120.5
    assert drive.do(ModelReady(key()), at=71) == [Work(invitation(), pytest.approx(44.55))]


def test_a_download_without_an_invitation_is_given_up_a_lease_after_a_reconnect() -> None:
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    drive.do(Disconnected(), at=10)
    drive.do(Connected(), at=70)
    assert isinstance(drive.do(TimePassed(), at=100)[1], ReportFailure)


def test_a_model_that_arrives_after_the_deadline_waits_for_a_newer_one() -> None:
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    drive.do(Disconnected(), at=10)
    assert drive.do(ModelReady(key()), at=65) == []
    drive.do(Connected(), at=70)
    assert drive.do(Asked(invitation(time_left=50)), at=71) == [Work(invitation(), budget=0.9 * 50.0)]


def test_what_is_overdue_takes_effect_before_what_arrives_late() -> None:
    drive = Drive()
    drive.training(at=1, time_left=60)
    effects = drive.trained(at=95)
    assert effects[0] == KillWorker(key())
    assert effects[-1] == Discard(key(), Digest("d1"))


# ---------------------------------------------------------------- lost contact


def test_losing_contact_never_ends_a_job() -> None:
    drive = Drive()
    drive.training(at=1, time_left=60)
    [connect] = drive.do(Disconnected(), at=5)
    assert isinstance(connect, Connect)
    assert drive.session.job is not None
    assert drive.session.job.stage is Stage.WORKING
    assert drive.trained(at=20) == []  # it waits in the spool
    assert drive.session.deadline is None
    assert drive.do(Connected(), at=300) == [Upload(key(), Digest("d1"))]


def test_dialing_backs_off_with_jitter_and_starts_afresh_when_connected() -> None:
    drive = Drive(connected=False)
    delays = [effect.delay for _ in range(12) for effect in drive.do(Disconnected()) if isinstance(effect, Connect)]
    for number, delay in enumerate(delays):
        step = min(15.0, 0.2 * 2**number)
        assert 0.5 * step <= delay <= step
    drive.do(Connected())
    [connect] = drive.do(Disconnected())
    assert isinstance(connect, Connect)
    assert connect.delay <= 0.2


# ---------------------------------------------------------------- releases


def test_a_release_with_submit_sends_what_is_done() -> None:
    drive = Drive()
    drive.training()
    assert drive.release(submit=True, at=10) == [StopWork(key())]
    assert drive.trained(at=11) == [Upload(key(), Digest("d1"))]


def test_a_release_without_submit_discards_what_is_done() -> None:
    drive = Drive()
    drive.training()
    assert drive.release(at=10) == [StopWork(key())]
    assert drive.trained(at=11) == [Discard(key(), Digest("d1"))]


def test_after_a_release_no_failure_is_reported() -> None:
    drive = Drive()
    drive.training()
    drive.release(submit=True, at=10)
    assert drive.do(JobFailed(key(), FailureReason.OUT_OF_TIME), at=11) == []
    drive.training(2, at=20)
    drive.release(2, at=21)
    assert drive.do(TimePassed(), at=21 + LEASE) == [KillWorker(key(2))]


def test_a_release_ends_a_download_at_once() -> None:
    drive = Drive()
    drive.do(Asked(invitation()), at=1)
    assert drive.release(submit=True, at=2) == [StopWork(key())]
    assert drive.session.job is None


def test_a_release_without_submit_empties_the_spool_of_that_round() -> None:
    drive = Drive({key(1): Digest("d1"), key(2): Digest("d2")})
    assert drive.release(1) == [Discard(key(1), Digest("d1"))]
    assert drive.release(2, submit=True) == []
    assert drive.session.working_on == ((RUN, 2),)


def test_a_second_release_may_still_take_the_permission_to_submit() -> None:
    drive = Drive()
    drive.training()
    drive.release(submit=True, at=10)
    assert drive.do(RunEnded(RUN), at=10.5) == []
    assert drive.trained(at=11) == [Discard(key(), Digest("d1"))]


def test_the_end_of_a_run_ends_what_belongs_to_it_and_nothing_else() -> None:
    other = ("round", RunId("other"), 1)
    drive = Drive({key(1): Digest("d1"), other: Digest("d9")})
    drive.training(2)
    effects = drive.do(RunEnded(RUN), at=5)
    assert effects == [Discard(key(1), Digest("d1")), StopWork(key(2))]
    assert drive.trained(2, at=6) == [Discard(key(2), Digest("d2"))]
    assert drive.session.working_on == ((RunId("other"), 1),)


# ---------------------------------------------------------------- the spool


def test_what_an_earlier_process_left_in_the_spool_is_uploaded_when_connected() -> None:
    drive = Drive({key(1): Digest("d1"), key(2): Digest("d2")}, connected=False)
    assert drive.session.working_on == ((RUN, 1), (RUN, 2))
    assert drive.session.deadline is None  # nothing can be sent yet
    assert drive.do(Connected()) == [Upload(key(1), Digest("d1")), Upload(key(2), Digest("d2"))]


def test_an_invitation_for_what_lies_in_the_spool_begins_nothing() -> None:
    drive = Drive({key(): Digest("d1")})
    assert drive.do(Asked(invitation())) == []
    assert drive.session.job is None


def test_an_upload_that_was_cut_is_tried_again_after_a_pause_that_grows() -> None:
    drive = Drive({key(): Digest("d1")})
    for number in range(10):
        drive.do(UploadCut(key()))
        assert drive.session.deadline is not None
        step = min(15.0, 0.2 * 2**number)
        assert 0.5 * step <= drive.session.deadline - drive.now <= step
        assert drive.do(TimePassed(), at=drive.session.deadline) == [Upload(key(), Digest("d1"))]


def test_an_update_is_uploaded_once_at_a_time() -> None:
    drive = Drive({key(): Digest("d1")})
    assert drive.do(Disconnected(), at=1)[1:] == []
    assert drive.do(Connected(), at=2) == []  # the upload goes on: it has a stream of its own


@pytest.mark.parametrize("accepted", [True, False])
def test_the_answer_empties_the_spool_whatever_it_is(accepted: bool) -> None:
    drive = Drive({key(): Digest("d1")})
    assert drive.do(answered(accepted=accepted)) == [Discard(key(), Digest("d1"), accepted, is_answered=True)]
    assert drive.do(answered(accepted=accepted)) == []


def test_damaged_bytes_are_sent_again_three_times_and_then_given_up() -> None:
    drive = Drive({key(): Digest("d1")})
    for _ in range(3):
        assert drive.do(answered(accepted=False, resend=True)) == [Upload(key(), Digest("d1"))]
    [discard, report] = drive.do(answered(accepted=False, resend=True))
    assert discard == Discard(key(), Digest("d1"), is_answered=True)
    assert isinstance(report, ReportFailure)
    assert report.reason is FailureReason.UPLOAD_FAILED
    assert report.detail == "damaged on the way 4 times: digest_mismatch"


# ---------------------------------------------------------------- several runs


def test_invitations_of_several_runs_are_begun_one_by_one_in_their_order() -> None:
    drive = Drive()
    drive.training()
    second, third = elsewhere("second"), elsewhere("third")
    assert drive.do(Asked(second), at=2) == []
    assert drive.do(Asked(third), at=3) == []
    assert drive.trained(at=20) == [Upload(key(), Digest("d1")), Download(second)][::-1]
    assert drive.do(Asked(invitation(2)), at=21) == [], "the first run has its turn again behind the third"
    drive.do(ModelReady(second.key), at=21)
    assert Download(third) in drive.do(Trained(second.key, Digest("d2")), at=30)
    drive.do(ModelReady(third.key), at=31)
    assert Download(invitation(2)) in drive.do(Trained(third.key, Digest("d3")), at=40)


def test_the_time_that_a_waiting_invitation_has_left_runs_on() -> None:
    drive = Drive()
    drive.training()
    second = elsewhere("second", time_left=50.0)
    drive.do(Asked(second), at=10)
    drive.trained(at=20)
    [work] = drive.do(ModelReady(second.key), at=22)
    assert isinstance(work, Work)
    assert work.budget < 60 - 22


def test_an_invitation_that_waits_past_its_deadline_is_given_up() -> None:
    drive = Drive()
    drive.training()
    drive.do(Asked(elsewhere("second", 7, time_left=10.0)), at=2)
    assert drive.session.deadline == 12
    assert drive.do(TimePassed(), at=12) == [
        ReportFailure(
            RunId("second"),
            RoundId(7),
            FailureReason.OUT_OF_TIME,
            "the client was busy with run run until the deadline",
        )
    ]
    assert drive.session.job is not None, "the run that it works for does not notice"
    assert Upload(key(), Digest("d1")) in drive.trained(at=20)
    assert drive.session.job is None


def test_of_one_run_the_newest_request_waits_in_the_first_ones_place() -> None:
    drive = Drive()
    drive.training()
    drive.do(Asked(elsewhere("second", 1)))
    drive.do(Asked(elsewhere("third", 1)))
    newer = elsewhere("second", 2)
    assert drive.do(Asked(newer)) == []
    assert Download(newer) in drive.trained()


def test_what_was_withdrawn_while_it_waited_is_not_begun() -> None:
    drive = Drive()
    drive.training()
    second = elsewhere("second")
    drive.do(Asked(second))
    drive.do(Asked(elsewhere("third")))
    drive.do(Released(second.run_id, second.round_id, ReleaseReason.ROUND_CLOSED, False))
    drive.do(RunEnded(RunId("third")))
    assert drive.trained() == [Upload(key(), Digest("d1"))]


# ---------------------------------------------------------------- whatever happens

EVENTS = st.sampled_from(
    [
        Connected(), Disconnected(), TimePassed(), RunEnded(RUN), Asked(invitation(1, 5.0)), Asked(invitation(2, 40.0)),
        Asked(question()), ModelReady(key(1)), ModelReady(key(2)), ModelReady(key(1, "version")), UploadCut(key(1)),
        Trained(key(1), Digest("d1")), Trained(key(2), Digest("d2")), answered(1), answered(2, accepted=False),
        answered(1, accepted=False, resend=True), JobFailed(key(1), FailureReason.WORKER_CRASHED),
        Evaluated(key(1, "version"), {}), Released(RUN, RoundId(1), ReleaseReason.ROUND_CLOSED, True),
        Released(RUN, RoundId(2), ReleaseReason.ROUND_ABANDONED, False), Asked(elsewhere("second", 1, 8.0)),
        ModelReady(elsewhere("second").key), Trained(elsewhere("second").key, Digest("d3")), RunEnded(RunId("second")),
        JobFailed(elsewhere("second").key, FailureReason.WORKER_CRASHED),
    ]
)  # fmt: skip


@given(st.lists(st.tuples(st.floats(0, 20), EVENTS), max_size=60))
def test_any_events_leave_one_worker_one_upload_an_update_and_no_past_deadline(
    happenings: list[tuple[float, Event]],
) -> None:
    drive, busy, uploading = Drive(), False, set[Key]()
    for pause, event in happenings:
        if isinstance(event, Trained | Evaluated | JobFailed):
            busy = False  # the worker is gone before the session hears of it
        if isinstance(event, Answered | UploadCut):
            uploading.discard(event.key)
        for effect in drive.do(event, at=drive.now + pause):
            match effect:
                case Work():
                    assert not busy
                    assert effect.budget > 0
                    busy = True
                case KillWorker():
                    busy = False
                case Upload(upload_key):
                    assert upload_key not in uploading
                    uploading.add(upload_key)
                case Discard(discarded):
                    uploading.discard(discarded)
        deadline = drive.session.deadline
        if deadline is not None and deadline <= drive.now:
            drive.do(TimePassed())
            after = drive.session.deadline
            assert after is None or after > drive.now, "a driver would spin"


# ---------------------------------------------------------------- asynchronous runs


def test_a_client_is_invited_again_while_its_last_update_is_on_its_way() -> None:
    """Continue the upload of an older round, whose answer may come at any time."""
    drive = Drive()
    drive.do(Asked(invitation(1)))
    drive.do(ModelReady(key(1)))
    assert drive.do(Trained(key(1), spooled("d1"))) == [Upload(key(1), Digest("d1"))]
    assert drive.do(Asked(invitation(7))) == [Download(invitation(7))]
    assert drive.session.working_on == ((RUN, 1), (RUN, 7))
    [work] = drive.do(ModelReady(key(7)))
    assert isinstance(work, Work)
    assert drive.do(Answered(key(1), True)) == [Discard(key(1), Digest("d1"), accepted=True, is_answered=True)]
    assert drive.do(Trained(key(7), spooled("d7"))) == [Upload(key(7), Digest("d7"))]


def test_a_client_out_of_its_time_hands_in_what_it_has_before_it_trains_again() -> None:
    drive = Drive()
    drive.do(Asked(invitation(1)))
    drive.do(ModelReady(key(1)))
    assert drive.do(Released(RUN, RoundId(1), ReleaseReason.OUT_OF_TIME, True)) == [StopWork(key(1))]
    assert drive.do(Asked(invitation(2))) == [], "one worker"
    effects = drive.do(Trained(key(1), spooled("d1")))
    assert effects == [Download(invitation(2)), Upload(key(1), Digest("d1"))]


# ---------------------------------------------------------------- the site's own policy


def test_what_the_policy_forbids_is_reported_and_nothing_is_begun() -> None:
    drive = Drive()
    why = FailureReason.AWAITS_APPROVAL, "approval: run 'run' waits"
    assert drive.do(Forbidden(invitation(), *why), at=1) == [ReportFailure(RUN, RoundId(1), *why)]
    assert drive.do(Forbidden(question(), FailureReason.POLICY_REFUSED, "hours: no"), at=2) == [
        ReportEvaluation(RUN, Version(1), None, "policy_refused: hours: no", FailureReason.POLICY_REFUSED)
    ]
    assert drive.session.working_on == ()


def test_work_that_is_no_longer_allowed_ends_and_comes_to_nothing() -> None:
    drive = Drive()
    drive.training()
    forbidden = Forbidden(invitation(), FailureReason.POLICY_REFUSED, "hours: no")
    report = ReportFailure(RUN, RoundId(1), FailureReason.POLICY_REFUSED, "hours: no")
    assert drive.do(forbidden, at=5) == [report, StopWork(key())]
    assert drive.do(TimePassed(), at=5 + LEASE) == [KillWorker(key())]
    drive = Drive()
    drive.training()
    drive.do(forbidden, at=5)
    assert drive.trained(at=6) == [Discard(key(), Digest("d1"))]


def test_what_waits_for_the_worker_and_is_forbidden_is_never_begun() -> None:
    drive = Drive()
    drive.training(1)
    drive.do(Asked(invitation(2)), at=2)
    drive.do(Forbidden(invitation(2), FailureReason.POLICY_REFUSED, "no"), at=3)
    assert drive.trained(1, at=4) == [Discard(key(1), Digest("d1"))]
    assert drive.session.job is None


def test_a_finished_update_is_not_lost_by_what_is_forbidden_now() -> None:
    drive = Drive()
    drive.training()
    drive.trained(at=10)
    assert drive.do(Forbidden(invitation(), FailureReason.POLICY_REFUSED, "hours: no"), at=11) == []
    assert drive.session.outgoing.keys() == {key()}
