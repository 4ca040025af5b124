"""What happens to an agent's session, and what is to be done about it. Pure values.

Events are in the past tense, effects are imperatives; updates are referred to by digest, never held.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.protocol.vocabulary import Digest, FailureReason, ReleaseReason, RoundId, RunId, Version

Sums = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
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
    counted_round: RoundId = RoundId(0)  # noqa: RUF009 - the newest whose model has an update of this client; 0: none
    model_seed: int = 0  # of the task's initial model

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Names the job."""
        return ("round", self.run_id, self.round_id)


@dataclass(frozen=True, slots=True)
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
    counted_round: RoundId = RoundId(0)  # noqa: RUF009
    model_seed: int = 0

    @property
    def key(self) -> tuple[str, RunId, int]:
        """Names the job."""
        return ("version", self.run_id, self.version)


Request = Invitation | EvaluationRequest
Key = tuple[str, RunId, int]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator said Welcome."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The control stream ended, or could not be opened."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An invitation or an evaluation request arrived; possibly again, with a newer deadline."""

    request: Request


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The site's own policy does not allow what was asked for, or no longer does."""

    request: Request
    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class Released:
    """The coordinator no longer needs this round; `submit`: what is done may still count in the next one."""

    run_id: RunId
    round_id: RoundId
    reason: ReleaseReason
    submit: bool


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The version lies complete and checked on disk."""

    key: Key


@dataclass(frozen=True, slots=True)
class Trained:
    """The worker is done and the update lies in the spool."""

    key: Key
    digest: Digest


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The worker has evaluated."""

    key: Key
    statistics: Sums | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The download or the worker failed for good."""

    key: Key
    reason: FailureReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The coordinator's verdict on an upload."""

    key: Key
    accepted: bool
    reason: str = ""
    detail: str = ""
    resend: bool = False


@dataclass(frozen=True, slots=True)
class UploadCut:
    """The upload broke off before the verdict."""

    key: Key


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Connect:
    """Dial the coordinator after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Download:
    """Fetch the version that the request names, whatever of it is not here yet."""

    request: Request


@dataclass(frozen=True, slots=True)
class Work:
    """Let the worker train or evaluate; it must stop by itself within `budget` seconds."""

    request: Request
    budget: float


@dataclass(frozen=True, slots=True)
class Extend:
    """The deadline moved: the worker has `budget` seconds from now."""

    budget: float


@dataclass(frozen=True, slots=True)
class StopWork:
    """Cancel the download, or ask the worker to stop at the next step."""

    key: Key


@dataclass(frozen=True, slots=True)
class KillWorker:
    """The worker did not stop in time."""

    key: Key


@dataclass(frozen=True, slots=True)
class Upload:
    """Send a spooled update, from wherever the coordinator's copy ends."""

    key: Key
    digest: Digest


@dataclass(frozen=True, slots=True)
class Discard:
    """The spooled update has been answered, or is not wanted: delete it and end its upload."""

    key: Key
    digest: Digest
    accepted: bool = False  # then what was staged with it becomes current, before it is deleted


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the coordinator that this client's part in the round is given up."""

    run_id: RunId
    round_id: RoundId
    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class ReportEvaluation:
    """Tell the coordinator the sums, or why there are none."""

    run_id: RunId
    version: Version
    statistics: Sums | None
    detail: str


Effect = (
    Connect | Download | Work | Extend | StopWork | KillWorker | Upload | Discard | ReportFailure | ReportEvaluation
)
Effects = tuple[Effect, ...]
