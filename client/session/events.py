"""What happens to an agent's session, and what is to be done about it. Pure values.

Events are in the past tense, effects are imperatives; updates are referred to by digest, never held.
"""

from collections.abc import Mapping

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import Digest, FailureReason, ReleaseReason, RoundId, RunId, Version

Sums = Mapping[str, tuple[float, ...]]


@value
class Invitation:
    """Train from `base_version` and report within `time_left` seconds."""

    run_id: RunId
    round_id: RoundId
    task: str
    base_version: Version
    model_digest: Digest
    time_left: float
    seed: int = 0
    local: str = "{}"  # JSON: overrides of the task's Local
    codec: str = ""  # what the update is to be encoded with; empty: plain
    rank: int = 0  # of the aggregation, that the update is to go to
    manifest: bytes = b""
    data: bytes = b""  # of all pieces, when they are small
    algorithm: str = "fedavg"  # what training has to do for the run
    counted_round: RoundId = RoundId(0)  # the newest whose model has an update of this client; 0: none
    model_seed: int = 0  # of the task's initial model

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Names the job."""
        return ("round", self.run_id, self.round_id)


@value
class EvaluationRequest:
    """Run a version on your own data and answer within `time_left` seconds."""

    run_id: RunId
    version: Version
    task: str
    model_digest: Digest
    time_left: float
    manifest: bytes = b""
    data: bytes = b""
    local: str = "{}"
    counted_round: RoundId = RoundId(0)
    model_seed: int = 0

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Names the job."""
        return ("version", self.run_id, self.version)


Request = Invitation | EvaluationRequest
Key = tuple[str, RunId, int]


# ---------------------------------------------------------------- events


@value
class Connected:
    """The coordinator said Welcome."""


@value
class Disconnected:
    """The control stream ended, or could not be opened."""


@value
class Asked:
    """An invitation or an evaluation request arrived; possibly again, with a newer deadline."""

    request: Request


@value
class Forbidden:
    """The site's own policy does not allow what was asked for, or no longer does."""

    request: Request
    reason: FailureReason
    detail: str


@value
class Released:
    """The coordinator no longer needs this round; `submit`: what is done may still count in the next one."""

    run_id: RunId
    round_id: RoundId
    reason: ReleaseReason
    submit: bool


@value
class RunEnded:
    """The run is over."""

    run_id: RunId


@value
class ModelReady:
    """The version lies complete and checked on disk."""

    key: Key


@value
class Trained:
    """The worker is done and the update lies in the spool."""

    key: Key
    digest: Digest


@value
class Evaluated:
    """The worker has evaluated."""

    key: Key
    statistics: Sums | None
    detail: str = ""
    reason: FailureReason | None = None  # why there are none; None: nothing went wrong


@value
class JobFailed:
    """The download or the worker failed for good."""

    key: Key
    reason: FailureReason
    detail: str = ""


@value
class Answered:
    """The coordinator's verdict on an upload."""

    key: Key
    accepted: bool
    reason: str = ""
    detail: str = ""
    resend: bool = False


@value
class UploadCut:
    """The upload broke off before the verdict."""

    key: Key


@value
class TimePassed:
    """The session's deadline is here."""


Event = (
    Connected
    | Disconnected
    | Asked
    | Forbidden
    | Released
    | RunEnded
    | ModelReady
    | Trained
    | Evaluated
    | JobFailed
    | Answered
    | UploadCut
    | TimePassed
)


# ---------------------------------------------------------------- effects


@value
class Connect:
    """Dial the coordinator after `delay` seconds."""

    delay: float


@value
class Download:
    """Fetch the version that the request names, whatever of it is not here yet."""

    request: Request


@value
class Work:
    """Let the worker train or evaluate; it must stop by itself within `budget` seconds."""

    request: Request
    budget: float


@value
class Extend:
    """The deadline moved: the worker has `budget` seconds from now."""

    budget: float


@value
class StopWork:
    """Cancel the download, or ask the worker to stop at the next step."""

    key: Key


@value
class KillWorker:
    """The worker did not stop in time."""

    key: Key


@value
class Upload:
    """Send a spooled update, from wherever the coordinator's copy ends."""

    key: Key
    digest: Digest


@value
class Discard:
    """The spooled update has been answered, or is not wanted: delete it and end its upload."""

    key: Key
    digest: Digest
    accepted: bool = False  # then what was staged with it becomes current, before it is deleted
    is_answered: bool = False  # else it is not wanted any more


@value
class ReportFailure:
    """Tell the coordinator that this client's part in the round is given up."""

    run_id: RunId
    round_id: RoundId
    reason: FailureReason
    detail: str


@value
class ReportEvaluation:
    """Tell the coordinator the sums, or why there are none."""

    run_id: RunId
    version: Version
    statistics: Sums | None
    detail: str
    reason: FailureReason | None = None  # what the detail begins with, when something went wrong


Effect = (
    Connect | Download | Work | Extend | StopWork | KillWorker | Upload | Discard | ReportFailure | ReportEvaluation
)
Effects = tuple[Effect, ...]
