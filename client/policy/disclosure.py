"""The part of a failure report that may leave the site. Pure.

An error message can contain anything that the task's code or its data put into it: a record that cannot be parsed, a
line of source code, a path. Unless the site allows such messages to leave, the coordinator gets only the reason.
"""

from dataclasses import replace
from typing import TypeVar

from atoll.client.session.events import ReportEvaluation, ReportFailure, ReportStatistics
from atoll.protocol.vocabulary import FailureReason

OWN_WORDS = frozenset(
    {
        FailureReason.TASK_NOT_ALLOWED,
        FailureReason.POLICY_REFUSED,
        FailureReason.AWAITS_APPROVAL,
        FailureReason.BAD_SIGNATURE,
        FailureReason.CLOCK_SKEW,
        FailureReason.REPLAYED,
        FailureReason.ROLLBACK,
        FailureReason.SESSION_LOST,
        FailureReason.SESSION_REFUSED,
    }
)
"""Reasons whose text the agent itself writes, about the request alone, without the task's code or data."""


def disclosed_failure(report: ReportFailure, *, error_details: bool) -> ReportFailure:
    """Return the report for the coordinator: without its detail, unless the site allows it to leave."""
    return report if error_details or report.reason in OWN_WORDS else replace(report, detail="")


Report = TypeVar("Report", ReportEvaluation, ReportStatistics)


def disclosed_answer(report: Report, *, error_details: bool) -> Report:
    """Return the answer for the coordinator: results unchanged, a failure without its detail."""
    if error_details or report.reason is None or report.reason in OWN_WORDS:
        return report
    return replace(report, detail=str(report.reason))
