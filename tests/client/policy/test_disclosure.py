"""The part of a failure's reason that leaves the site."""

import pytest

from atoll.client.policy.disclosure import OWN_WORDS, disclosed_answer, disclosed_failure
from atoll.client.session.events import ReportEvaluation, ReportFailure
from atoll.protocol.vocabulary import FailureReason, RoundId, RunId, Version

SECRET = "ValueError: cannot parse record: patient 4711"


def failure(reason: FailureReason) -> ReportFailure:
    return ReportFailure(RunId("r-1"), RoundId(1), reason, SECRET)


def evaluation(reason: FailureReason | None) -> ReportEvaluation:
    return ReportEvaluation(RunId("r-1"), Version(1), None, f"{reason}: {SECRET}", reason)


@pytest.mark.parametrize("reason", FailureReason)
def test_where_error_details_may_leave_everything_does(reason: FailureReason) -> None:
    assert disclosed_failure(failure(reason), error_details=True) == failure(reason)
    assert disclosed_answer(evaluation(reason), error_details=True) == evaluation(reason)


@pytest.mark.parametrize("reason", sorted(set(FailureReason) - OWN_WORDS))
def test_elsewhere_only_the_reason_does(reason: FailureReason) -> None:
    failed = disclosed_failure(failure(reason), error_details=False)
    assert (failed.reason, failed.detail) == (reason, "")
    assert disclosed_answer(evaluation(reason), error_details=False).detail == str(reason)


@pytest.mark.parametrize("reason", sorted(OWN_WORDS))
def test_what_the_agent_says_of_its_own_policy_and_checks_is_always_told(reason: FailureReason) -> None:
    assert disclosed_failure(failure(reason), error_details=False) == failure(reason)
    assert disclosed_answer(evaluation(reason), error_details=False) == evaluation(reason)


def test_sums_and_a_site_without_data_go_as_they_are() -> None:
    found = ReportEvaluation(RunId("r-1"), Version(1), {"accuracy": (7.0, 10.0)}, "")
    assert disclosed_answer(found, error_details=False) == found
    none = ReportEvaluation(RunId("r-1"), Version(1), None, "this site has no test data")
    assert disclosed_answer(none, error_details=False) == none
