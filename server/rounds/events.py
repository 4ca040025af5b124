"""The events and effects of a run: the inputs and outputs of its state machines. Pure values.

Events, in the past tense, are journaled and reach the machine with the time (seconds since the epoch, never backward).
Effects, as commands, are carried out after their event is on disk. Updates are named by their digests.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import field

from atoll.protocol.disclosure import ANY_SUM, Disclosure
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
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.members.member import Candidate, Profile
from atoll.server.rounds.policy import Mode
from atoll.server.rounds.record import ChargeRecord
from atoll.server.rounds.run_rules import RunRules, Source
from atoll.server.rounds.session_events import SessionEffect, SessionEvent, SessionSum, SumPlace

Sums = Mapping[str, tuple[float, ...]]  # sufficient statistics by metric, merged by addition


@value
class Update:
    """Uploaded update whose bytes are complete, finite and of the expected layout. `num_examples` is n_k."""

    client_id: ClientId
    round_id: RoundId
    base_version: Version
    digest: Digest
    num_examples: int | float
    work: float  # fraction of the requested steps that were done, in (0, 1]
    num_bytes: int = 0
    statistics: Sums = field(default_factory=dict)
    download_seconds: float = 0.0
    train_seconds: float = 0.0
    plain_bytes: int = 0  # `num_bytes` without a codec
    disclosure: Disclosure = ANY_SUM  # of the statistics
    mesh: MeshUse | None = None  # for a client that is a mesh of ranks
    steps: int = 0  # optimizer steps; 0: not known
    attempt: int = 0  # at its secure sum, whose masks it has; 0: it is not masked


@value
class RunStarted:
    """The start of a run: version 0 of its model is on disk."""

    model_digest: Digest


@value
class CoordinatorStarted:
    """The restart of the process, which was last alive at `down_since`. No client is connected.

    Attributes:
        down_since: [s since the epoch].
        allowance: time within which the earlier clients may start and connect [s].
    """

    down_since: float
    allowance: float = 0.0


@value
class ClientJoined:
    """The start of a client's control stream. It replaces an older session of the same client."""

    client_id: ClientId
    session: str
    profile: Profile = Profile()
    working_on: tuple[RoundId, ...] = ()
    software: str = ""  # software of the agent, such as "atoll 0.1.0"
    joins_sessions: bool = True  # whether the agent can take part in secure sums


@value
class ClientDisconnected:
    """The end of a client's control stream. The client is not lost before its lease expires."""

    client_id: ClientId
    session: str


@value
class ClientLost:
    """The loss of a client: its lease expired, it left, or its certificate was revoked."""

    client_id: ClientId
    reason: LossReason
    failure: FailureReason | None = None  # if it decided to leave: it does not trust the coordinator
    detail: str = ""
    silent_for: float = 0.0  # the time since its last sign of life [s]


@value
class RoundDue:
    """The end of the pause after the last round."""


@value
class CohortDrawn:
    """The sampler's answer to DrawCohort."""

    round_id: RoundId
    clients: tuple[ClientId, ...]


@value
class SamplerFailed:
    """A failure of a custom sampler: it raised, or its answer is not a cohort of the candidates."""

    round_id: RoundId
    detail: str


@value
class ClientFailed:
    """A client's report that it gives up on a round, with the reason."""

    client_id: ClientId
    round_id: RoundId
    reason: FailureReason
    detail: str = ""
    waits: bool = False  # its site's policy allows the work later: after an approval, within its hours, tomorrow


@value
class UploadBegun:
    """The arrival of the first bytes of an update."""

    client_id: ClientId
    round_id: RoundId


@value
class UpdateReceived:
    """The arrival of a complete, checked update, for the machine's decision. A small one is written with this event."""

    update: Update


@value
class UpdateRefused:
    """The refusal of an update by a check of its bytes or its manifest, before the machine's decision."""

    client_id: ClientId
    round_id: RoundId
    reason: RejectReason
    detail: str = ""


@value
class Aggregated:
    """The end of a round's aggregation: the next version is on disk.

    Attributes:
        dropped: of a round with secure sums, the sessions that count in no version, each with the reason.
        ranges: exponents of the float tensors' ranges in the next round; empty: no secure sums.
        statistics: sums of the training's metrics over the members of all secure sums that count.
        clip_norm: of the next private round, if it follows the updates; 0: it does not.
    """

    round_id: RoundId
    model_digest: Digest
    dropped: Mapping[int, str] = field(default_factory=dict)
    ranges: tuple[int, ...] = ()
    statistics: Sums = field(default_factory=dict)
    clip_norm: float = 0.0


@value
class AggregationFailed:
    """An error of the fold or of the server optimizer, or secure sums of which none counts: `dropped` says why."""

    round_id: RoundId
    detail: str
    dropped: Mapping[int, str] = field(default_factory=dict)


@value
class ModelEvaluated:
    """The evaluation of a version on the server's data; `statistics` is None after a failure (`detail`)."""

    version: Version
    statistics: Sums | None
    detail: str = ""


@value
class ClientEvaluated:
    """The evaluation of a version by a client on its data; `statistics` is None after a failure (`detail`)."""

    client_id: ClientId
    version: Version
    statistics: Sums | None
    detail: str = ""
    reason: FailureReason | None = None  # for a client that declines or fails; older agents give none
    disclosure: Disclosure = ANY_SUM  # as in Update


@value
class MetricsComputed:
    """The values of an evaluation's metrics, which the task computes from the sums; None: a metric has no value."""

    version: Version
    source: Source
    values: Mapping[str, float | None]


@value
class DiskShort:
    """A full disk, here or at a rank, for an update or a version: until DiskFree no deadline passes."""

    detail: str


@value
class DiskFree:
    """The return of free space on disks that were full: deadlines pass again."""


@value
class FilesLost:
    """The loss of files on the coordinator's disk: no decision relies on them any more.

    Attributes:
        updates: accepted updates that wait for a commit.
        versions: versions of the model; without the current one, or the first, the run ends.
        contents: of a run of messages, the contents of messages that nodes have not answered yet.
        detail: the missing files, in words.
    """

    updates: tuple[Digest, ...] = ()
    versions: tuple[Version, ...] = ()
    contents: tuple[Digest, ...] = ()
    detail: str = ""


@value
class TimePassed:
    """The arrival of the machine's deadline."""


@value
class StopRequested:
    """The operator's request to end the run."""

    reason: str


@value
class PauseRequested:
    """The operator's request to begin no new round."""

    reason: str


@value
class ResumeRequested:
    """The operator's request to continue a paused run, or to reopen an ended one (a finished one with more rounds)."""

    wait: bool = False  # `max_runs` is reached: the driver delivers this event again when the run may start
    rules: RunRules | None = None  # the settings from now on; None: unchanged


@value
class PublishedNamed:
    """The operator's answer after a restoration: the newest round of a private run that was published before it.

    Attributes:
        round_id: that round.
        restoration: the id of the restoration, which is answered once.
    """

    round_id: RoundId
    restoration: str


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
    | SessionEvent
    | Aggregated
    | AggregationFailed
    | ModelEvaluated
    | ClientEvaluated
    | MetricsComputed
    | DiskShort
    | DiskFree
    | FilesLost
    | TimePassed
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | PublishedNamed
)


# ---------------------------------------------------------------- effects


@value
class DrawCohort:
    """Draw at most `count` of the candidates (sorted by client id) with the seeded sampler."""

    round_id: RoundId
    count: int
    candidates: tuple[Candidate, ...]
    number: int = 0  # number of the draw within the round: an asynchronous run has many
    relaxed: int = 0  # `Pacer.relaxed`


@value
class Invite:
    """Invite a client to train from `base_version` and to report by `deadline`. Repeated when it reconnects."""

    client_id: ClientId
    round_id: RoundId
    base_version: Version
    deadline: float
    counted_round: RoundId = RoundId(0)  # the newest round whose model has an update of the client; 0: none
    asked_at: float = 0.0  # the instant of the first such invitation
    sum: SumPlace | None = None  # the secure sum that the update is for; None: the update is plain


@value
class Release:
    """Order a client to stop training; `submit`: it may still send its partial work."""

    client_id: ClientId
    round_id: RoundId
    reason: ReleaseReason
    submit: bool = False


@value
class Accept:
    """Accept a client's update: it counts; `carried`: it is late, and counts in the next committed round."""

    client_id: ClientId
    round_id: RoundId
    digest: Digest
    carried: bool = False


@value
class Reject:
    """Reject a client's update, with the reason: it does not count."""

    client_id: ClientId
    round_id: RoundId
    digest: Digest
    reason: RejectReason
    detail: str


@value
class Contribution:
    """Accepted update in the fold: weight n_k * scale; in an asynchronous run weight 1, update * scale."""

    client_id: ClientId
    digest: Digest
    num_examples: int | float
    scale: float  # staleness discount, times work if partial_work = "scaled", times alpha in "fedasync"; in (0, 1]
    base_version: Version | None = None  # the version that it was trained from, in an asynchronous run


@value
class NoiseRow:
    """The identity of the noise of a version, from which it is drawn again: its key has these, and the run's secret."""

    round_id: RoundId
    base: Digest  # of the version that the updates were added to
    updates: Digest  # of their set: see `set_digest`


def set_digest(digests: Iterable[Digest]) -> Digest:
    """Return the digest of a set of updates."""
    return Digest(hashlib.sha256("".join(sorted(digests)).encode()).hexdigest())


@value
class Aggregate:
    """Fold these updates (sorted by client id) into `base_version` + 1, by the formula of `mode`."""

    round_id: RoundId
    base_version: Version
    contributions: tuple[Contribution, ...]
    mode: Mode = "sync"
    sums: tuple[SessionSum, ...] = ()  # the opened secure sums; empty: the updates are plain
    ranges: tuple[int, ...] = ()  # as in SumPlace
    clip_norm: float = 0.0  # of a private round whose clip norm follows the updates; 0: it does not
    earlier: tuple[NoiseRow, ...] = ()  # of correlated noise: the earlier noises in this round's, the last one first


@value
class Commit:
    """Make the version the global model: publish it, write the round's record, take a snapshot."""

    round_id: RoundId
    version: Version
    model_digest: Digest
    used: tuple[Digest, ...]


@value
class Abandon:
    """Write the record of a round that ended without a model."""

    round_id: RoundId
    reason: AbandonReason


@value
class AmendRecord:
    """Write the record of an ended round again: it has changed."""

    round_id: RoundId


@value
class AuditCharge:
    """Record in the audit log what clients were charged for private sums, which is on disk."""

    rounds: str  # the round, or the rounds after a restored backup
    charge: ChargeRecord


@value
class EvaluateModel:
    """Evaluate a version on the server's data."""

    version: Version


@value
class AskEvaluation:
    """Ask a client to evaluate a version on its data, by `deadline`."""

    client_id: ClientId
    version: Version
    deadline: float
    counted_round: RoundId = RoundId(0)  # as in Invite
    asked_at: float = 0.0  # the instant at which the evaluation began
    sum: SumPlace | None = None  # the secure sum that the metrics are for; None: the answer is plain


@value
class CloseEvaluation:
    """Merge the answers of an evaluation and record the result: all have arrived, or the deadline has passed."""

    version: Version
    answers: Mapping[ClientId, Sums]
    failures: Mapping[ClientId, str]
    refused: Mapping[ClientId, str] = field(default_factory=dict)
    terms: Mapping[ClientId, Disclosure] = field(default_factory=dict)  # terms of the answers; absent: ANY_SUM
    max_share: float = 1.0  # largest share of one client in each metric
    summed: tuple[ClientId, ...] = ()  # the clients in secure sums, whose answers are not known one by one
    sums: Sums | None = None  # over them; None: nothing was summed, or the evaluation is plain


@value
class ComputeMetrics:
    """Compute the values of the metrics of an evaluation with a deciding metric (`RunRules.watches`)."""

    version: Version
    source: Source
    statistics: Sums


@value
class OpenNextRound:
    """Deliver RoundDue after the configured pause, and not before a time [s since the epoch; 0: there is none]."""

    not_before: float = 0.0


@value
class PauseRun:
    """Pause the run: no round opens until it is resumed. Delivered once for each pause."""

    cause: str


@value
class ResumeRun:
    """Deliver ResumeRequested: the clients for which a paused run has waited in vain are back."""


@value
class EndRun:
    """End the run, with this state and cause. Delivered once for each end."""

    state: RunState
    cause: str


Effect = (
    DrawCohort
    | Invite
    | SessionEffect
    | Release
    | Accept
    | Reject
    | Aggregate
    | Commit
    | Abandon
    | AmendRecord
    | AuditCharge
    | EvaluateModel
    | AskEvaluation
    | CloseEvaluation
    | ComputeMetrics
    | OpenNextRound
    | PauseRun
    | ResumeRun
    | EndRun
)
