"""The agent's session with secure sums: an encoded update joins its session until that is over."""

import random
from dataclasses import replace

from atoll.client.session.events import (
    Answered,
    Asked,
    Connected,
    Discard,
    Encoded,
    Evaluated,
    EvaluationRequest,
    Forget,
    Invitation,
    Join,
    Masked,
    ModelReady,
    Released,
    ReportEvaluation,
    ReportFailure,
    ReportStatistics,
    RunEnded,
    StatisticsMade,
    StatisticsRequest,
    Upload,
    Work,
)
from atoll.client.session.session import Session, SessionRules
from atoll.protocol.vocabulary import FailureReason, ReleaseReason, RoundId, RunId, Version
from atoll.training.statistics.parts import SiteStatistics, count
from atoll.training.statistics.question import Question
from tests.client.session.test_session import RUN, invitation, key, question
from tests.server.sessions.small_federation import terms_of


def asked(number=1, attempt=1) -> Invitation:
    return invitation(number, secure=terms_of(round=number, attempt=attempt))


def started(encoded=()) -> Session:
    session = Session(SessionRules(tasks=frozenset({"task"})), random.Random(1), {}, encoded)
    session.receive(Connected(), 0.0)
    return session


def encoded(session: Session, number=1):
    session.receive(Asked(asked(number)), 1.0)
    session.receive(ModelReady(key(number)), 1.0)
    return session.receive(Encoded(key(number)), 2.0)


def test_an_encoded_update_joins_its_session_and_its_masked_form_is_uploaded():
    session = started()
    assert encoded(session) == (Join(asked()),)
    assert session.receive(Masked(key(), "d1"), 3.0) == (Upload(key(), "d1"),)
    assert session.receive(Answered(key(), accepted=True), 4.0) == (Discard(key(), "d1", True, True),)
    assert session.working_on == ((RUN, RoundId(1)),)


def test_a_repeated_invitation_trains_nothing_and_repeats_the_joining():
    session = started()
    encoded(session)
    assert session.receive(Asked(asked()), 3.0) == (Join(asked()),)


def test_another_attempt_gives_up_what_was_masked_for_the_one_before():
    session = started()
    encoded(session)
    session.receive(Masked(key(), "d1"), 3.0)
    again = asked(attempt=2)
    assert session.receive(Asked(again), 4.0) == (Discard(key(), "d1"), Join(again))
    assert session.receive(Asked(again), 5.0) == (Join(again),)
    assert session.receive(Masked(key(), "d2"), 6.0) == (Upload(key(), "d2"),)


def test_after_a_restart_the_encoded_update_is_still_known():
    session = started([key()])
    assert session.working_on == ((RUN, RoundId(1)),)
    assert session.receive(Asked(asked(attempt=2)), 1.0) == (Join(asked(attempt=2)),)


def test_a_plain_invitation_for_an_encoded_update_is_refused():
    session = started([key()])
    plain = invitation()
    said = "the update was trained for a secure sum"
    assert session.receive(Asked(plain), 1.0) == (ReportFailure(RUN, RoundId(1), FailureReason.SESSION_REFUSED, said),)


def test_a_release_the_next_round_and_the_end_of_the_run_each_forget_it():
    session = started()
    encoded(session)
    session.receive(Masked(key(), "d1"), 3.0)
    released = session.receive(Released(RUN, RoundId(1), ReleaseReason.ROUND_CLOSED, False), 4.0)
    assert released == (Discard(key(), "d1"), Forget(key()))
    session = started()
    encoded(session)
    assert encoded(session, 2) == (Forget(key(1)), Join(asked(2)))
    assert session.receive(RunEnded(RUN), 5.0) == (Forget(key(2)),)


def test_an_update_that_is_encoded_after_its_release_is_forgotten():
    session = started()
    session.receive(Asked(asked()), 1.0)
    session.receive(ModelReady(key()), 1.0)
    session.receive(Released(RUN, RoundId(1), ReleaseReason.ROUND_CLOSED, False), 2.0)
    assert session.receive(Encoded(key()), 3.0) == (Forget(key()),)
    assert session.receive(Masked(key(), "d1"), 4.0) == (Discard(key(), "d1"),)


def test_other_runs_keep_their_encoded_updates():
    session = started()
    encoded(session)
    other = replace(asked(5), run_id=RunId("other"), base_version=Version(0))
    session.receive(Asked(other), 3.0)
    session.receive(ModelReady(other.key), 3.0)
    assert session.receive(Encoded(other.key), 4.0) == (Join(other),)
    assert {*session.encoded} == {key(), other.key}


# ------------------------------------------------------------ evaluations

SUMS = {"loss": (1.0, 2.0)}


def question_of(version=1, attempt=1) -> EvaluationRequest:
    return replace(question(version), secure=terms_of(purpose="evaluation", round=version, attempt=attempt))


def evaluated(session: Session, version=1, sums=SUMS, detail=""):
    session.receive(Asked(question_of(version)), 1.0)
    session.receive(ModelReady(key(version, "version")), 1.0)
    return session.receive(Evaluated(key(version, "version"), sums, detail), 2.0)


def test_the_metrics_of_an_evaluation_join_its_session_and_are_not_reported():
    session = started()
    assert evaluated(session) == (Join(question_of(), SUMS),)
    assert session.working_on == ()
    assert session.receive(Asked(question_of()), 3.0) == (Join(question_of()),)
    assert session.receive(Asked(question_of(attempt=2)), 4.0) == (Join(question_of(attempt=2)),)


def test_a_site_without_test_data_says_so_in_place_of_its_metrics():
    report = ReportEvaluation(RUN, Version(1), None, "this site has no test data")
    assert evaluated(started(), sums=None, detail=report.detail) == (report,)


def test_a_plain_request_for_what_was_measured_for_a_sum_is_refused():
    session = started()
    evaluated(session)
    said = "session_refused: the version was evaluated for a secure sum"
    report = ReportEvaluation(RUN, Version(1), None, said, FailureReason.SESSION_REFUSED)
    assert session.receive(Asked(question()), 3.0) == (report,)


def test_a_newer_evaluation_and_the_end_of_the_run_forget_it_and_an_update_does_not():
    session = started()
    evaluated(session)
    assert encoded(session, 2) == (Join(asked(2)),)
    assert evaluated(session, 2) == (Forget(key(1, "version")), Join(question_of(2), SUMS))
    assert session.receive(RunEnded(RUN), 5.0) == (Forget(key(2)), Forget(key(2, "version")))


QUESTION = Question(("train",), (("target", 2),))
STATISTICS = SiteStatistics({("train", "examples", ""): count(30)})


def request_of(number=1, attempt=1) -> StatisticsRequest:
    terms = terms_of(purpose="statistics", round=number, attempt=attempt)
    return StatisticsRequest(RUN, number, question(1).task, 60.0, secure=terms, question=QUESTION)


def made(session: Session, number=1):
    (work,) = session.receive(Asked(request_of(number)), 1.0)
    assert work == Work(request_of(number), 60.0)
    return session.receive(StatisticsMade(key(number, "statistics"), STATISTICS), 2.0)


def test_statistics_for_a_sum_join_its_session_are_made_once_and_are_not_reported():
    session = started()
    assert made(session) == (Join(request_of(), STATISTICS),)
    assert session.receive(Asked(request_of()), 3.0) == (Join(request_of()),)
    assert session.receive(Asked(request_of(attempt=2)), 4.0) == (Join(request_of(attempt=2)),)
    assert made(session, 2) == (Forget(key(1, "statistics")), Join(request_of(2), STATISTICS))


def test_a_plain_request_for_statistics_that_were_made_for_a_sum_is_refused():
    session = started()
    made(session)
    plain = replace(request_of(), secure=None, question=None)
    detail = "session_refused: the statistics were made for a secure sum"
    refused = ReportStatistics(RUN, 1, None, detail, FailureReason.SESSION_REFUSED)
    assert session.receive(Asked(plain), 3.0) == (refused,)
