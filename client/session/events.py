"""The events of an agent's session and its effects. Pure values.

Events are in the past tense, effects are imperatives. An update is referred to by its digest, never contained.
"""

from collections.abc import Mapping
from dataclasses import field

from atoll.protocol.secure.terms import Terms
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import Digest, FailureReason, ReleaseReason, RoundId, RunId, Version
from atoll.training.statistics.parts import SiteStatistics
from atoll.training.statistics.question import Question

Sums = Mapping[str, tuple[float, ...]]


@value
class Invitation:
    """Invitation to train from `base_version` and to report within `time_left` seconds."""

    run_id: RunId
    round_id: RoundId
    task: str
    base_version: Version
    model_digest: Digest
    time_left: float
    seed: int = 0
    local: str = "{}"
    """Overrides of the task's Local, JSON."""
    codec: str = ""
    """Codec of the update; empty: plain."""
    rank: int = 0
    """The aggregation rank that receives the update."""
    spreads: bool = False
    """Whether the parts of an update go to this rank and the following ones, in turn."""
    manifest: bytes = b""
    """Manifest of the base version; empty: download it."""
    data: bytes = b""
    """Bytes of all pieces of the base version if they are few, else empty."""
    algorithm: str = "fedavg"
    """Algorithm of the training."""
    counted_round: RoundId = RoundId(0)
    """The newest round whose model contains an update of this client; 0: none."""
    model_seed: int = 0
    """Seed of the task's initial model."""
    message: str = ""
    """Kind of the server program's message that the version contains; empty: it is a model."""
    group: str = ""
    """Group of the message."""
    run_number: int = 0
    """The number of the run, for Flower apps; 0: not known."""
    asked_at: float = 0.0
    """Instant of the first invitation to this round, for Flower apps [s since the epoch]; 0: not known."""
    secure: Terms | None = None
    """Terms of the secure sum that the update is for; None: a plain update."""
    ranges: tuple[int, ...] = ()
    """Exponents of the ranges of its float tensors, in canonical order; empty: all 0."""
    key: tuple[str, RunId, int] = field(init=False, repr=False, compare=False)
    """Name of the job; stored, because a round of a client uses it eleven times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", ("round", self.run_id, self.round_id))


@value
class EvaluationRequest:
    """Request to evaluate a version on the site's data and to answer within `time_left` seconds."""

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
    run_number: int = 0
    asked_at: float = 0.0
    secure: Terms | None = None
    """Terms of the secure sum that the metrics are for; None: they are sent as they are."""

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Name of the agent's job for the request."""
        return ("version", self.run_id, self.version)


@value
class StatisticsRequest:
    """Request for statistics of the site's data, without a model, within `time_left` seconds."""

    run_id: RunId
    """Name under which the policy records a coordinator's requests for one planned run."""
    number: int
    task: str
    time_left: float
    local: str = "{}"
    """Options of the task, JSON."""
    model_seed: int = 0
    secure: Terms | None = None
    """Terms of the secure sum that the statistics are for; None: they are sent as they are."""
    question: Question | None = None
    """Layout of the sum's numbers; None: the statistics are for no sum."""

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Name of the agent's job for the request."""
        return ("statistics", self.run_id, self.number)


ModelRequest = Invitation | EvaluationRequest
"""A request whose work needs a version of the global model."""

Request = ModelRequest | StatisticsRequest
Key = tuple[str, RunId, int]


# ---------------------------------------------------------------- events


@value
class Connected:
    """The coordinator has answered Hello with Welcome."""


@value
class Disconnected:
    """The control stream ended, or could not be opened."""


@value
class Asked:
    """A request (invitation, evaluation or statistics) arrived, possibly again with a newer deadline."""

    request: Request


@value
class Forbidden:
    """The site's policy does not allow a request, or no longer does."""

    request: Request
    reason: FailureReason
    detail: str
    waits: bool = False
    """Whether the policy will allow the request later: after an approval, within the hours, or on the next day."""


@value
class Released:
    """The coordinator ends the wait for this client in a round; with `submit` its update may count in the next one."""

    run_id: RunId
    round_id: RoundId
    reason: ReleaseReason
    submit: bool


@value
class RunEnded:
    """A run has ended."""

    run_id: RunId


@value
class ModelReady:
    """The version of a job is complete and checked on disk."""

    key: Key


@value
class Trained:
    """The training has ended, and its update is in the spool."""

    key: Key
    digest: Digest


@value
class Encoded:
    """The training has ended, and its update for a secure sum is encoded and durable. It is never sent as it is."""

    key: Key


@value
class Masked:
    """The encoded update is masked for its session, and in the spool."""

    key: Key
    digest: Digest


@value
class Evaluated:
    """The evaluation has ended, with sums or without."""

    key: Key
    statistics: Sums | None
    detail: str = ""
    reason: FailureReason | None = None
    """The failure, if that is why there are no sums."""


@value
class StatisticsMade:
    """The statistics of the site's data are made; the policy is not applied yet."""

    key: Key
    statistics: SiteStatistics


@value
class JobFailed:
    """The download, the training, the evaluation or the making of statistics has failed permanently."""

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
    """The upload was cut before the verdict."""

    key: Key


@value
class TimePassed:
    """The session's deadline has passed."""


Event = (
    Connected
    | Disconnected
    | Asked
    | Forbidden
    | Released
    | RunEnded
    | ModelReady
    | Trained
    | Encoded
    | Masked
    | Evaluated
    | StatisticsMade
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
    """Download the pieces of the request's version that are missing here."""

    request: ModelRequest


@value
class Work:
    """Train, evaluate or make statistics; the worker must stop by itself within `budget` seconds."""

    request: Request
    budget: float


@value
class Extend:
    """Set the worker's deadline to `budget` seconds from now: it has moved."""

    budget: float


@value
class StopWork:
    """Cancel the download, or ask the worker to stop at the next step."""

    key: Key


@value
class KillWorker:
    """Kill the worker: it did not stop in time."""

    key: Key


@value
class Join:
    """Join the session that a request names, with what was encoded for it; again: repeat what it was last told."""

    request: Request
    sums: Sums | SiteStatistics | None = None
    """What the sum adds, of an evaluation or of statistics that have just been made."""


@value
class Forget:
    """Delete what is encoded for a secure sum, and leave its session."""

    key: Key


@value
class Upload:
    """Send a spooled update, starting where the coordinator's copy ends."""

    key: Key
    digest: Digest


@value
class Discard:
    """Delete a spooled update and end its upload: it was answered, or is no longer wanted."""

    key: Key
    digest: Digest
    accepted: bool = False
    """Whether the update was accepted: its staged residual becomes current before the update is deleted."""
    is_answered: bool = False
    """Whether the coordinator answered the update; else it is no longer wanted."""


@value
class ReportFailure:
    """Report to the coordinator that this client gives up on a round."""

    run_id: RunId
    round_id: RoundId
    reason: FailureReason
    detail: str
    waits: bool = False
    """Whether the site's policy will allow the work later."""


@value
class ReportEvaluation:
    """Send the coordinator the sums of an evaluation, or the reason why there are none."""

    run_id: RunId
    version: Version
    statistics: Sums | None
    detail: str
    reason: FailureReason | None = None
    """The failure, if any; the detail begins with it."""


@value
class ReportStatistics:
    """Send the coordinator the statistics that the policy allows, or the reason why there are none."""

    run_id: RunId
    number: int
    statistics: SiteStatistics | None
    detail: str = ""
    reason: FailureReason | None = None
    """The failure, if any; the detail begins with it."""


Effect = (
    Connect
    | Download
    | Work
    | Extend
    | StopWork
    | KillWorker
    | Join
    | Forget
    | Upload
    | Discard
    | ReportFailure
    | ReportEvaluation
    | ReportStatistics
)
Effects = tuple[Effect, ...]
