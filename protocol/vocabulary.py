"""The words that both sides use: identities, reasons, states. Pure.

Every reason is sent to a client or written into a round's record, so each one is actionable; `docs/protocol.md`
explains every one, and a test holds it to that.
"""

from enum import StrEnum
from typing import NewType

ClientId = NewType("ClientId", str)
RunId = NewType("RunId", str)
RoundId = NewType("RoundId", int)  # 1, 2, 3, ... of one run; never reused, also not by a retry
Version = NewType("Version", int)  # of the global model: 0 is the initial one, +1 per commit
Digest = NewType("Digest", str)  # lower-case hexadecimal SHA-256 of a canonical manifest or of a piece's bytes


class Phase(StrEnum):
    """Where a round stands. The last two are final."""

    SELECTING = "selecting"
    COLLECTING = "collecting"
    AGGREGATING = "aggregating"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


class RunState(StrEnum):
    """Where a run stands. The last three are terminal; `atoll run resume` reopens a stopped or failed one."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


TERMINAL = frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})
"""The states of a run that has ended."""


class Fate(StrEnum):
    """What became of one invitation."""

    WAITING = "waiting"
    REPORTED = "reported"
    FAILED = "failed"
    REFUSED = "refused"
    LOST = "lost"
    STRAGGLER = "straggler"
    RELEASED = "released"
    LATE = "late"
    CARRIED = "carried"


class RejectReason(StrEnum):
    """Why an update was not accepted."""

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


class FailureReason(StrEnum):
    """Why a client gives up its part in a round; the client says it."""

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


DECLINES = (FailureReason.POLICY_REFUSED, FailureReason.AWAITS_APPROVAL, FailureReason.ROLLBACK)
"""Who gives up for such a reason would do so again: it is not invited until it says Ready, or joins again."""


class LossReason(StrEnum):
    """Why the coordinator gives up a client; it may come back."""

    LEASE_EXPIRED = "lease_expired"
    LEFT = "left"
    REVOKED = "revoked"


class CloseReason(StrEnum):
    """Why a round stopped collecting and aggregates."""

    ENOUGH = "enough"
    ALL_ANSWERED = "all_answered"
    LINGER_OVER = "linger_over"
    DEADLINE = "deadline"
    GRACE_OVER = "grace_over"
    FLUSHED = "flushed"


class AbandonReason(StrEnum):
    """Why a round ended without a new model."""

    TOO_FEW_CLIENTS = "too_few_clients"
    QUORUM_OUT_OF_REACH = "quorum_out_of_reach"
    BELOW_QUORUM = "below_quorum"
    AGGREGATION_FAILED = "aggregation_failed"
    SAMPLER_FAILED = "sampler_failed"
    STOP_REQUESTED = "stop_requested"
    PAUSE_REQUESTED = "pause_requested"


class ReleaseReason(StrEnum):
    """Why a client may stop training."""

    ROUND_CLOSED = "round_closed"
    ROUND_ABANDONED = "round_abandoned"
    OUT_OF_TIME = "out_of_time"
    TOO_STALE = "too_stale"
    RUN_ENDED = "run_ended"
    NOT_INVITED = "not_invited"
