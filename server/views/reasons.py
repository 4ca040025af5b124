"""The reasons of the vocabulary as clauses of a sentence. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from atoll.protocol.vocabulary import (
    AbandonReason,
    CloseReason,
    FailureReason,
    Fate,
    LossReason,
    RejectReason,
    ReleaseReason,
)
from atoll.server.exchanges.exchange import FILES_LOST
from atoll.server.rounds.record import DROPPED_SUMS, UPDATE_LOST

_REJECTIONS = {
    RejectReason.WRONG_ROUND: "it names a round that does not exist",
    RejectReason.NOT_INVITED: "the client was not invited to this round",
    RejectReason.ALREADY_REPORTED: "the client had reported before",
    RejectReason.TOO_LATE: "it arrived after the round had closed",
    RejectReason.TOO_STALE: "it was trained from a version that is too old",
    RejectReason.WRONG_BASE: "it was trained from a version other than the round's",
    RejectReason.NO_EXAMPLES: "it claims to come from no examples",
    RejectReason.TOO_MANY_EXAMPLES: "it claims more examples than max_examples allows",
    RejectReason.BAD_WORK: "the fraction of the work that it claims is not in (0, 1]",
    RejectReason.PARTIAL_WORK: "not all of the work was done, and the run accepts no partial work",
    RejectReason.BAD_MANIFEST: "its manifest is malformed",
    RejectReason.WRONG_LAYOUT: "its tensors do not match the model",
    RejectReason.WRONG_CODEC: "it is encoded with a codec that the run does not use",
    RejectReason.BAD_ENCODING: "its bytes are not valid for its codec",
    RejectReason.DIGEST_MISMATCH: "its bytes do not match its manifest",
    RejectReason.NOT_FINITE: "it has values that are NaN or infinite",
    RejectReason.RUN_ENDED: "the run had ended",
    RejectReason.NOT_IN_SESSION: "it is masked for a session that takes no more updates",
}
_FAILURES: dict[str, str] = {
    DROPPED_SUMS: "the secure sums with its updates were dropped in several rounds in a row",
    UPDATE_LOST: "its accepted update was lost on the coordinator's disk",
    FailureReason.TASK_NOT_ALLOWED: "its operator does not allow this task",
    FailureReason.POLICY_REFUSED: "its site's own policy does not allow it",
    FailureReason.AWAITS_APPROVAL: "the run waits for the approval of its site's operator",
    FailureReason.TASK_BROKEN: "its copy of the task cannot be loaded",
    FailureReason.TASK_MISMATCH: "its work, or its copy of the task, does not fit the model of the run",
    FailureReason.TRAINING_FAILED: "its training raised an error",
    FailureReason.WORKER_CRASHED: "its training process died",
    FailureReason.WORKER_HUNG: "its training process gave no sign of life",
    FailureReason.OUT_OF_TIME: "it had done no work by the deadline",
    FailureReason.NOT_FINITE: "its training diverged to NaN or infinite values",
    FailureReason.DOWNLOAD_FAILED: "it could not download the model",
    FailureReason.UPLOAD_FAILED: "it could not upload its update",
    FailureReason.DISK_FULL: "its disk is full",
    FailureReason.SHUTTING_DOWN: "it was shut down",
    FailureReason.BAD_SIGNATURE: "the invitation's signature is not this coordinator's, or the invitation was changed",
    FailureReason.CLOCK_SKEW: "the invitation was signed at another time than its clock shows",
    FailureReason.REPLAYED: "it had seen the invitation, or a newer one, before",
    FailureReason.ROLLBACK: "it had seen a newer round or version of the run",
    FailureReason.SESSION_LOST: "its agent was restarted, and the secrets of its session were in memory",
    FailureReason.SESSION_REFUSED: "it has left the session of its secure sum",
}
_LOSSES: dict[str, str] = {
    FILES_LOST: "the message, or its reply, was lost on the coordinator's disk",
    LossReason.LEASE_EXPIRED: "it was silent for longer than its lease",
    LossReason.LEFT: "it left the run",
    LossReason.REVOKED: "its certificate was revoked",
}
_CLOSES = {
    CloseReason.ENOUGH: "all wanted updates had arrived",
    CloseReason.ALL_ANSWERED: "all invited clients had answered",
    CloseReason.LINGER_OVER: "the quorum was reached and the linger time over",
    CloseReason.DEADLINE: "the deadline had passed",
    CloseReason.GRACE_OVER: "the grace period after the deadline was over",
    CloseReason.FLUSHED: "the operator stopped the run",
}
_ABANDONS = {
    AbandonReason.TOO_FEW_CLIENTS: "too few clients were available",
    AbandonReason.QUORUM_OUT_OF_REACH: "the quorum could no longer be reached",
    AbandonReason.BELOW_QUORUM: "the quorum was not reached by the deadline",
    AbandonReason.AGGREGATION_FAILED: "the aggregation failed",
    AbandonReason.SAMPLER_FAILED: "the sampler failed",
    AbandonReason.STOP_REQUESTED: "the operator stopped the run",
    AbandonReason.PAUSE_REQUESTED: "the operator paused the run before the first invitation",
    AbandonReason.AWAITS_APPROVAL: "clients that the quorum needs wait for their sites",
    AbandonReason.RESTORED: "the state was restored from a backup, and later rounds were charged",
    AbandonReason.SECURE_FAILED: "no secure sum of enough sites was opened",
    AbandonReason.FILES_LOST: "files of it were lost on the coordinator's disk",
    AbandonReason.AWAITS_CLIENTS: "clients that the quorum needs are away",
    AbandonReason.AWAITS_ROOM: "a disk has had no room for as long as the run waits for it",
}
_RELEASES = {
    ReleaseReason.ROUND_CLOSED: "the round had closed",
    ReleaseReason.ROUND_ABANDONED: "the round was abandoned",
    ReleaseReason.OUT_OF_TIME: "its time was over",
    ReleaseReason.TOO_STALE: "it trains from a version that is too old",
    ReleaseReason.RUN_ENDED: "the run had ended",
    ReleaseReason.NOT_INVITED: "the client was not invited to this round",
}
_WORDS: Mapping[type[StrEnum], Mapping[Any, str]] = {  # by type: a failure and a refusal may share a value
    RejectReason: _REJECTIONS,
    FailureReason: _FAILURES,
    LossReason: _LOSSES,
    CloseReason: _CLOSES,
    AbandonReason: _ABANDONS,
    ReleaseReason: _RELEASES,
}


def explain(reason: StrEnum) -> str:
    """Return any reason of the vocabulary as a clause."""
    return _WORDS[type(reason)][reason]


def explain_named(fate: Fate, reason: str) -> str:
    """Return the clause for a reason by its name in the record of an invitation with this fate."""
    order: Iterable[Mapping[Any, str]] = (_REJECTIONS, _FAILURES)
    if fate in (Fate.LOST, Fate.FAILED):
        order = (_LOSSES,) if fate is Fate.LOST else (_FAILURES,)
    return next((words[reason] for words in order if reason in words), "for a reason that this Atoll does not know")
