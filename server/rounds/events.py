"""What happens to a run, and what is to be done about it: the words of the machines. Pure values.

Events are in the past tense and are what the journal holds; effects are imperatives and are carried out by the
driver only after their event is on disk. Every event reaches the machine together with the time (seconds since the
epoch, on a clock that never runs backward); updates are referred to by digest, never held.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import NamedTuple

from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    Digest,
    FailureReason,
    LossReason,
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.rounds.policy import Mode

Sums = Mapping[str, tuple[float, ...]]
"""Sufficient statistics by metric; merged by addition."""


@value
class Update:
    """An uploaded update whose bytes were found whole, finite and of the expected layout. `num_examples` is n_k."""

    client_id: ClientId
    round_id: RoundId
    base_version: Version
    digest: Digest
    num_examples: int
    work: float  # fraction of the requested steps that was done, in (0, 1]
    num_bytes: int = 0
    statistics: Sums = field(default_factory=dict)
    download_seconds: float = 0.0
    train_seconds: float = 0.0
    plain_bytes: int = 0  # what `num_bytes` would be without a codec


@value
class Profile:
    """What a client says about itself: for sampling."""

    num_examples: int = 0
    label: str = ""


# ---------------------------------------------------------------- events


@value
class RunStarted:
    """The run exists: version 0 of its model lies in the store."""

    model_digest: Digest


@value
class CoordinatorStarted:
    """The process came up again; it was last known alive at `down_since`. Nobody is connected."""

    down_since: float


@value
class ClientJoined:
    """A control stream was opened. The newest session of a client is the one that counts."""

    client_id: ClientId
    session: str
    profile: Profile = Profile()
    working_on: tuple[RoundId, ...] = ()


@value
class ClientDisconnected:
    """A control stream ended. Not yet a loss: the client has its lease to come back."""

    client_id: ClientId
    session: str


@value
class ClientLost:
    """The lease ran out, or the client said goodbye."""

    client_id: ClientId
    reason: LossReason


@value
class RoundDue:
    """The pause after the last round is over."""


@value
class CohortDrawn:
    """The sampler's answer to DrawCohort."""

    round_id: RoundId
    clients: tuple[ClientId, ...]


@value
class SamplerFailed:
    """The user's own sampler raised, or named someone who is not available."""

    round_id: RoundId
    detail: str


@value
class ClientFailed:
    """A client gives up its part in a round and says why."""

    client_id: ClientId
    round_id: RoundId
    reason: FailureReason
    detail: str = ""


@value
class UploadBegun:
    """The first bytes of an update are on their way."""

    client_id: ClientId
    round_id: RoundId


@value
class UpdateReceived:
    """An update is complete and checked; the machine decides. A small one is written with this very event."""

    update: Update


@value
class UpdateRefused:
    """An update failed a check of its bytes or its manifest before the machine saw it."""

    client_id: ClientId
    round_id: RoundId
    reason: RejectReason
    detail: str = ""


@value
class Aggregated:
    """The next version lies on disk."""

    round_id: RoundId
    model_digest: Digest


@value
class AggregationFailed:
    """The fold or the server optimizer raised."""

    round_id: RoundId
    detail: str


@value
class ModelEvaluated:
    """The server's own data were run through a version; `statistics` is None when that failed, `detail` says why."""

    version: Version
    statistics: Sums | None
    detail: str = ""


@value
class ClientEvaluated:
    """A client ran a version on its own data; None when it could not."""

    client_id: ClientId
    version: Version
    statistics: Sums | None
    detail: str = ""


@value
class TimePassed:
    """The machine's deadline is here."""


@value
class StopRequested:
    """The operator ends the run."""

    reason: str


@value
class PauseRequested:
    """The operator wants no new round to begin."""

    reason: str


@value
class ResumeRequested:
    """The operator lets a paused run go on, or reopens a stopped or failed one; or its turn has come again.

    `wait`: there is no room for it now; this event comes once more when there is.
    """

    wait: bool = False


Event = (
    RunStarted
    | CoordinatorStarted
    | ClientJoined
    | ClientDisconnected
    | ClientLost
    | RoundDue
    | CohortDrawn
    | SamplerFailed
    | ClientFailed
    | UploadBegun
    | UpdateReceived
    | UpdateRefused
    | Aggregated
    | AggregationFailed
    | ModelEvaluated
    | ClientEvaluated
    | TimePassed
    | StopRequested
    | PauseRequested
    | ResumeRequested
)


# ---------------------------------------------------------------- effects


class Candidate(NamedTuple):
    """An available client, with what a sampler may look at."""

    client_id: ClientId
    num_examples: int
    label: str
    loss: float | None = None
    """In the training of its newest accepted update; None: it has told none yet."""
    utility: float = 0.0
    """What it had to teach then (`utility.utility_of`)."""
    seconds: float | None = None
    """That a round is expected to take it; None: nothing was measured."""
    last_round: RoundId = RoundId(0)
    """The newest round with an accepted update of it; 0: there is none."""
    times_chosen: int = 0
    """How often it was invited to a round."""


@value
class DrawCohort:
    """Let the seeded sampler choose `count` of the candidates (sorted by client id)."""

    round_id: RoundId
    count: int
    candidates: tuple[Candidate, ...]
    number: int = 0  # of the round's draws: an asynchronous run has many
    relaxed: int = 0  # see `pacer`


@value
class Invite:
    """Tell a client to train from `base_version` and to report by `deadline`. Repeated when it reconnects."""

    client_id: ClientId
    round_id: RoundId
    base_version: Version
    deadline: float
    counted_round: RoundId = RoundId(0)  # the newest whose model has an update of the client; 0: none


@value
class Release:
    """Tell a client to stop training; `submit`: what it has may still be sent."""

    client_id: ClientId
    round_id: RoundId
    reason: ReleaseReason
    submit: bool = False


@value
class Accept:
    """The update counts; `carried`: it was late and counts in the next round that commits."""

    client_id: ClientId
    round_id: RoundId
    digest: Digest
    carried: bool = False


@value
class Reject:
    """The update does not count; the client is told why."""

    client_id: ClientId
    round_id: RoundId
    digest: Digest
    reason: RejectReason
    detail: str


@value
class Contribution:
    """One accepted update as the fold takes it: weight n_k * scale; in an asynchronous run weight 1, update * scale."""

    client_id: ClientId
    digest: Digest
    num_examples: int
    scale: float  # staleness discount times, under partial_work = "scaled", work, in "fedasync" alpha; in (0, 1]
    base_version: Version | None = None  # that it was trained from; of an asynchronous run


@value
class Aggregate:
    """Fold these updates (sorted by client id) into `base_version` + 1, as `mode` has it."""

    round_id: RoundId
    base_version: Version
    contributions: tuple[Contribution, ...]
    mode: Mode = "sync"


@value
class Commit:
    """The version is the global model from now on: publish it, write the record, take a snapshot."""

    round_id: RoundId
    version: Version
    model_digest: Digest
    used: tuple[Digest, ...]


@value
class Abandon:
    """The round ended without a model: write its record."""

    round_id: RoundId
    reason: AbandonReason


@value
class AmendRecord:
    """Something was learnt about a round that had ended: write its record again."""

    round_id: RoundId


@value
class EvaluateModel:
    """Run a version on the server's own data."""

    version: Version


@value
class AskEvaluation:
    """Ask a client to run a version on its own data, by `deadline`."""

    client_id: ClientId
    version: Version
    deadline: float
    counted_round: RoundId = RoundId(0)  # as in Invite


@value
class CloseEvaluation:
    """All answers are in, or the deadline is over: merge them and write them down."""

    version: Version
    answers: Mapping[ClientId, Sums]
    failures: Mapping[ClientId, str]


@value
class OpenNextRound:
    """Deliver RoundDue after the configured pause."""


@value
class PauseRun:
    """No round is open and none will be until the run is resumed. Delivered once for each pause."""

    cause: str


@value
class EndRun:
    """The run is over, with this cause. Delivered once for each end."""

    state: RunState
    cause: str


Effect = (
    DrawCohort
    | Invite
    | Release
    | Accept
    | Reject
    | Aggregate
    | Commit
    | Abandon
    | AmendRecord
    | EvaluateModel
    | AskEvaluation
    | CloseEvaluation
    | OpenNextRound
    | PauseRun
    | EndRun
)
