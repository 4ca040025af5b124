"""The vocabulary of both sides: types of identities, states and reasons. Pure.

Every reason is sent to a client or written into a round's record, so each is actionable. `docs/protocol.md` explains
each one, and a test checks this.
"""

from enum import StrEnum
from typing import Literal, NewType

ClientId = NewType("ClientId", str)
RunId = NewType("RunId", str)
RoundId = NewType("RoundId", int)
"""Number of a round in its run: 1, 2, 3, ...; never reused, a retry has a new one."""
Version = NewType("Version", int)
"""Number of a version of the global model: 0 is the initial one, each commit adds 1."""
Digest = NewType("Digest", str)
"""SHA-256 of a canonical manifest or of a piece's bytes, in lower-case hexadecimal."""
Purpose = Literal["update", "evaluation", "statistics"]
"""What a secure sum adds."""


class Phase(StrEnum):
    """Phase of a round; the last two are final."""

    SELECTING = "selecting"
    COLLECTING = "collecting"
    SECURING = "securing"
    AGGREGATING = "aggregating"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class RunState(StrEnum):
    """State of a run; the last three are terminal. `atoll run resume` reopens it, if finished, for more rounds."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


TERMINAL = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
"""States of a run that has ended."""


class Fate(StrEnum):
    """Fate of one invitation."""

    WAITING = "waiting"
    JOINED = "joined"
    REPORTED = "reported"
    FAILED = "failed"
    REFUSED = "refused"
    LOST = "lost"
    STRAGGLER = "straggler"
    RELEASED = "released"
    LATE = "late"
    CARRIED = "carried"


class RejectReason(StrEnum):
    """Reason why an update was not accepted."""

    WRONG_ROUND = "wrong_round"
    NOT_INVITED = "not_invited"
    ALREADY_REPORTED = "already_reported"
    TOO_LATE = "too_late"
    TOO_STALE = "too_stale"
    WRONG_BASE = "wrong_base"
    NO_EXAMPLES = "no_examples"
    TOO_MANY_EXAMPLES = "too_many_examples"
    BAD_WORK = "bad_work"
    PARTIAL_WORK = "partial_work"
    BAD_MANIFEST = "bad_manifest"
    WRONG_LAYOUT = "wrong_layout"
    WRONG_CODEC = "wrong_codec"
    DIGEST_MISMATCH = "digest_mismatch"
    BAD_ENCODING = "bad_encoding"
    NOT_FINITE = "not_finite"
    RUN_ENDED = "run_ended"
    NOT_IN_SESSION = "not_in_session"


class FailureReason(StrEnum):
    """Reason, given by the client, why it gives up on a round."""

    TASK_NOT_ALLOWED = "task_not_allowed"
    POLICY_REFUSED = "policy_refused"
    AWAITS_APPROVAL = "awaits_approval"
    TASK_BROKEN = "task_broken"
    TASK_MISMATCH = "task_mismatch"
    TRAINING_FAILED = "training_failed"
    WORKER_CRASHED = "worker_crashed"
    WORKER_HUNG = "worker_hung"
    OUT_OF_TIME = "out_of_time"
    NOT_FINITE = "not_finite"
    DOWNLOAD_FAILED = "download_failed"
    UPLOAD_FAILED = "upload_failed"
    DISK_FULL = "disk_full"
    SHUTTING_DOWN = "shutting_down"
    BAD_SIGNATURE = "bad_signature"
    CLOCK_SKEW = "clock_skew"
    REPLAYED = "replayed"
    ROLLBACK = "rollback"
    SESSION_LOST = "session_lost"
    SESSION_REFUSED = "session_refused"


DECLINES = (FailureReason.POLICY_REFUSED, FailureReason.AWAITS_APPROVAL, FailureReason.ROLLBACK)
"""Reasons that also hold for the next invitation: the client is not invited until it sends Ready or joins again."""

TROUBLES = (
    FailureReason.TASK_NOT_ALLOWED,
    FailureReason.TASK_BROKEN,
    FailureReason.TASK_MISMATCH,
    FailureReason.TRAINING_FAILED,
    FailureReason.WORKER_CRASHED,
    FailureReason.WORKER_HUNG,
    FailureReason.DOWNLOAD_FAILED,
    FailureReason.UPLOAD_FAILED,
    FailureReason.DISK_FULL,
    FailureReason.BAD_SIGNATURE,
    FailureReason.CLOCK_SKEW,
    FailureReason.SESSION_REFUSED,
)
"""Reasons of a site that needs time or a repair: the client rests before its next invitation (`failure_rest`)."""


AWAY = (FailureReason.DISK_FULL, FailureReason.SHUTTING_DOWN, FailureReason.CLOCK_SKEW, FailureReason.ROLLBACK)
"""Reasons of a site that will return in time or after human action: a round that lacks only such sites has not failed
by itself."""


class LossReason(StrEnum):
    """Reason why the coordinator gives up on a client, which may come back."""

    LEASE_EXPIRED = "lease_expired"
    LEFT = "left"
    REVOKED = "revoked"


class CloseReason(StrEnum):
    """Reason why a round stopped collecting and aggregates."""

    ENOUGH = "enough"
    ALL_ANSWERED = "all_answered"
    LINGER_OVER = "linger_over"
    DEADLINE = "deadline"
    GRACE_OVER = "grace_over"
    FLUSHED = "flushed"


class AbandonReason(StrEnum):
    """Reason why a round ended without a new model."""

    TOO_FEW_CLIENTS = "too_few_clients"
    QUORUM_OUT_OF_REACH = "quorum_out_of_reach"
    BELOW_QUORUM = "below_quorum"
    AGGREGATION_FAILED = "aggregation_failed"
    SAMPLER_FAILED = "sampler_failed"
    STOP_REQUESTED = "stop_requested"
    PAUSE_REQUESTED = "pause_requested"
    AWAITS_APPROVAL = "awaits_approval"
    AWAITS_CLIENTS = "awaits_clients"
    AWAITS_ROOM = "awaits_room"
    FILES_LOST = "files_lost"
    SECURE_FAILED = "secure_failed"
    RESTORED = "restored"


class ReleaseReason(StrEnum):
    """Reason why a client may stop training."""

    ROUND_CLOSED = "round_closed"
    ROUND_ABANDONED = "round_abandoned"
    OUT_OF_TIME = "out_of_time"
    TOO_STALE = "too_stale"
    RUN_ENDED = "run_ended"
    NOT_INVITED = "not_invited"
