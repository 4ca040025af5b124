"""What of the reason for a failure may leave the site. Pure.

The text of an error can hold whatever the task's code or its data put into it: a record that cannot be parsed, a line
of the source, a path. Where the site keeps such texts to itself, the coordinator is told the reason alone.
"""

from dataclasses import replace

from atoll.client.session.events import ReportEvaluation, ReportFailure
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
    }
)
"""Reasons whose sentence is this agent's own, about what it was asked; it never saw the task's code or the data."""


def disclosed_failure(report: ReportFailure, *, error_details: bool) -> ReportFailure:
    """What the coordinator is told instead of a whole report."""
    return report if error_details or report.reason in OWN_WORDS else replace(report, detail="")


def disclosed_evaluation(report: ReportEvaluation, *, error_details: bool) -> ReportEvaluation:
    """The same of an evaluation that came to nothing; sums go as they are."""
    if error_details or report.reason is None or report.reason in OWN_WORDS:
        return report
    return replace(report, detail=str(report.reason))
