"""The record of a round: the invited clients, the fate of each, and the reason of the round's end. Pure values.

The record is part of the round machine's state, so an operator reads exactly the data of its decisions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from atoll.ground.printable import conclusion, count_of
from atoll.protocol.vocabulary import (
    AWAY,
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    FailureReason,
    Fate,
    Phase,
    RoundId,
    Version,
)
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.invariants import Violation
from atoll.server.rounds.policy import Mode

UPDATE_LOST = "update_lost"
"""Reason of a client's fate whose accepted update was lost on the coordinator's disk."""

DROPPED_SUMS = "dropped_sums"
"""Reason for which a client rests that was only in secure sums that were dropped for what was added."""

OPENED, FAILED = "opened", "failed"
"""Last stages of a secure sum, as those of its session."""

REASONS_MAX = 3
"""Number of reasons in the detail of a round that has missed its quorum."""


@dataclass(slots=True)
class MemberRecord:
    """Part of a client in a secure sum: the session, and the time of each message [s since the epoch]."""

    session: int
    attempt: int = 1
    keys_at: float | None = None
    shares_at: float | None = None
    masked_at: float | None = None
    signed_at: float | None = None
    revealed_at: float | None = None
    left: str = ""  # why it is no member any more


@dataclass(slots=True)
class RefusalRecord:
    """Refusal of other members by one that has left an attempt, with its reason."""

    by: ClientId
    of: list[ClientId]
    detail: str


@dataclass(slots=True)
class SumRecord:
    """Secure sum of a round: its newest attempt, and its result."""

    session: int
    attempt: int = 1
    stage: str = "keys"
    threshold: int = 0  # 0: not known before the roster
    num_members: int = 0  # members of the roster
    detail: str = ""  # why there is no sum, or why it counts in no version; the end of an earlier attempt
    wrong: list[ClientId] = field(default_factory=list)  # members that have revealed a wrong share
    is_dropped: bool = False  # the sum was opened, and counts in no version
    refusals: list[RefusalRecord] = field(default_factory=list)  # of all attempts
    left_out: list[ClientId] = field(default_factory=list)  # for refusals, from the newest attempt


@dataclass(slots=True)
class ClientRecord:
    """Invitation of a client to a round. Times are seconds since the epoch on the coordinator's clock."""

    invited_at: float
    fate: Fate = Fate.WAITING
    fate_at: float = 0.0
    reason: str = ""  # of a failure, refusal or loss
    detail: str = ""
    disconnected_at: float | None = None  # whether the client is away and its lease runs
    num_reconnects: int = 0
    upload_begun_at: float | None = None
    digest: Digest | None = None  # digest of the accepted update, in time or late
    num_examples: int | float = 0
    work: float = 0.0
    num_bytes: int = 0
    download_seconds: float = 0.0
    train_seconds: float = 0.0
    used_in: RoundId | None = None  # the round whose model contains the update
    unused_because: str = ""  # why no model contains the accepted update
    plain_bytes: int = 0  # `num_bytes` without a codec
    deadline: float | None = None  # deadline of this invitation, in an asynchronous run
    extended: float = 0.0  # seconds by which outages have extended it
    rest: float = 0.0  # seconds for which the client is not invited after this failure
    mesh: MeshUse | None = None  # for a client that is a mesh of ranks
    steps: int = 0  # optimizer steps; 0: not known
    is_lost: bool = False  # the accepted update is gone from the coordinator's disk; it counts if it arrives once more
    sum: MemberRecord | None = None  # its part in a secure sum; None: its update is plain

    def has(self, digest: Digest) -> bool:
        """Return whether the update with this digest is accepted, and not lost since."""
        return self.digest == digest and not self.is_lost

    def lose(self, why: str, now: float) -> None:
        """Record that the accepted update is lost."""
        self.is_lost, self.unused_because = True, why
        self.fate, self.fate_at, self.reason, self.detail = Fate.FAILED, now, UPDATE_LOST, why


@dataclass(slots=True)
class CarriedRecord:
    """Update in this round that may be stale: a late one of an earlier round, or one in an asynchronous buffer."""

    client_id: ClientId
    round_id: RoundId
    staleness: int
    digest: Digest
    num_examples: int | float
    scale: float


@dataclass(slots=True)
class TooOldRecord:
    """Invitation of an asynchronous run that ended because its update could no longer count in any version."""

    client_id: ClientId
    round_id: RoundId
    staleness: int


@dataclass(slots=True)
class Outage:
    """Outage of the coordinator of `seconds`, by which the deadlines were extended by `extended` seconds."""

    at: float
    seconds: float
    extended: float


@dataclass(slots=True)
class ChargeRecord:
    """Charge of a private round, made when it closed."""

    clients: int  # clients that were charged, whose updates are in the sum
    uses: int  # of the most used client of the run so far
    epsilon: float  # of that client
    epsilon_max: float  # the budget
    delta: float
    charges: int = 0  # of secure sums to which the clients add noise: one for each client and attempt; 0: one a client


@dataclass(slots=True)
class RoundRecord:
    """All decisions about one round, with their reasons."""

    round_id: RoundId
    base_version: Version
    opened_at: float
    cohort_size: int
    quorum: int
    num_needed_to_draw: int
    late: str = "discard"
    phase: Phase = Phase.SELECTING
    num_candidates: int = 0
    drawn_at: float | None = None
    deadline: float | None = None
    linger_by: float | None = None
    grace_by: float | None = None
    closed_at: float | None = None
    close_reason: CloseReason | None = None
    ended_at: float | None = None
    abandon_reason: AbandonReason | None = None
    detail: str = ""
    version: Version | None = None
    model_digest: Digest | None = None
    clients: dict[ClientId, ClientRecord] = field(default_factory=dict)
    carried: list[CarriedRecord] = field(default_factory=list)
    superseded: list[Digest] = field(default_factory=list)  # late updates whose client sent a fresh one in this round
    mode: Mode = "sync"
    buffer: list[CarriedRecord] = field(default_factory=list)  # asynchronous: the updates in the buffer, in order
    outages: list[Outage] = field(default_factory=list)
    retry: int = 0  # the consecutive abandoned rounds, including this one; 0: the abandonment used no retry
    retry_max: int = 0  # the retries that the policy allows
    retry_at: float | None = None  # the earliest beginning of its repetition
    too_old: list[TooOldRecord] = field(default_factory=list)  # asynchronous: since this round's version, or its buffer
    weight_cap: float | None = None  # to which `max_share` reduced the weights of `capped`; None: none was reduced
    capped: dict[ClientId, float] = field(default_factory=dict)  # the larger weights, by client
    waiting_since: float | None = None  # start time of the current wait for clients, by `RunRules.wait`
    waited: float = 0.0  # total seconds of past such waits
    sums: list[SumRecord] = field(default_factory=list)  # the secure sums; empty: the updates are plain
    ranges: list[int] = field(default_factory=list)  # exponents of the tensors' ranges after this round
    only_dropped: dict[ClientId, int] = field(default_factory=dict)  # clients that rest, as so many of their sums in a
    # row were dropped for what was added
    clip_norm: float | None = None  # of a private round whose clip norm follows the updates
    charge: ChargeRecord | None = None  # of a private round that has closed; None: nothing was charged

    def with_fate(self, *fates: Fate) -> Iterator[tuple[ClientId, ClientRecord]]:
        """Return the invitations with one of these fates, sorted by client id."""
        return ((c, r) for c, r in sorted(self.clients.items()) if r.fate in fates)

    def away(self) -> Iterator[ClientId]:
        """Yield the invited clients without an update that time or human action brings back."""
        for client_id, row in self.with_fate(Fate.LOST, Fate.FAILED, Fate.WAITING):
            is_gone = row.fate is Fate.LOST or (row.fate is Fate.WAITING and row.disconnected_at is not None)
            if is_gone or (row.fate is Fate.FAILED and row.reason in AWAY):
                yield client_id

    def wait_is_over(self, now: float) -> None:
        """Record that enough clients are connected, or that the round has ended."""
        if self.waiting_since is not None:
            self.waited, self.waiting_since = self.waited + now - self.waiting_since, None

    @property
    def why_below_quorum(self) -> str:
        """The most frequent reasons of failed, refused and lost clients, as the end of a detail."""
        gone = [r for _, r in self.with_fate(Fate.REFUSED, Fate.FAILED, Fate.LOST)]
        counts = Counter(f"{r.fate} ({r.reason})" if r.reason else str(r.fate) for r in gone)
        return "".join(f"; {number} {reason}" for reason, number in counts.most_common(REASONS_MAX))

    @property
    def is_misfit(self) -> bool:
        """Return whether the work of each invited client did not fit the run."""
        return bool(self.clients) and all(
            r.fate is Fate.FAILED and r.reason == FailureReason.TASK_MISMATCH for r in self.clients.values()
        )

    def cause_of_end(self, failures: int) -> str:
        """Return the cause of a run's end or pause after this round, the last of `failures` consecutive failed ones."""
        rounds = count_of(failures, "round was", "rounds in a row were")
        text = f"{rounds} abandoned; the last, round {self.round_id}: {self.abandon_reason} ({self.detail})"
        first = next(((c, r.detail) for c, r in self.with_fate(Fate.FAILED) if r.detail), None)
        return f"{text}; {first[0]}: {conclusion(first[1])}" if first else text

    @property
    def num_in(self) -> int:
        """The number of accepted updates that count towards `cohort_size`: of the cohort in time, or in the buffer."""
        return self.num_reported if self.mode == "sync" else len(self.buffer)

    @property
    def num_reported(self) -> int:
        """The number of accepted updates of this round's cohort that were in time."""
        return sum(r.fate is Fate.REPORTED for r in self.clients.values())

    @property
    def counted(self) -> list[tuple[ClientId, RoundId]]:
        """The updates that the closed round counts, each by its client and the round of its invitation."""
        if self.mode != "sync":
            return [(row.client_id, row.round_id) for row in self.buffer]
        reported = self.with_fate(Fate.REPORTED)
        in_time = [(client_id, self.round_id) for client_id, row in reported if not row.unused_because]
        return [*in_time, *((row.client_id, row.round_id) for row in self.carried)]

    @property
    def version_after(self) -> Version:
        """The version of the model after this round."""
        return self.base_version if self.version is None else self.version

    def validate(self) -> None:
        """Check what holds for every round, open or ended; raises Violation."""
        of, ended = f"round {self.round_id}", self.phase in (Phase.COMMITTED, Phase.ABANDONED)
        if ended != (self.ended_at is not None) or (self.phase is Phase.ABANDONED) != (self.abandon_reason is not None):
            raise Violation(4, f"{self.phase}, ended at {self.ended_at}, {self.abandon_reason}", of)
        if self.version != (self.base_version + 1 if self.phase is Phase.COMMITTED else None):
            raise Violation(5, f"version {self.version} after {self.base_version}, {self.phase}", of)
        if self.phase in (Phase.AGGREGATING, Phase.COMMITTED):
            counted = self.counted
            if self.close_reason is None or len(counted) < self.quorum:
                raise Violation(4, f"closed by {self.close_reason}: {len(counted)} accepted, quorum {self.quorum}", of)
            if len({client_id for client_id, _ in counted} if self.mode == "sync" else {*counted}) < len(counted):
                raise Violation(1, f"a client counts twice: {counted}", of)
        for client_id, row in self.clients.items():
            self._validate_row(client_id, row)

    def _validate_row(self, client_id: ClientId, row: ClientRecord) -> None:
        what, is_accepted = f"{client_id} is {row.fate}", row.digest is not None and not row.is_lost
        of = f"round {self.round_id}"
        if is_accepted != (row.fate in (Fate.REPORTED, Fate.CARRIED)):
            raise Violation(2, f"{what} with update {row.digest}, lost: {row.is_lost}", of)
        if row.fate is Fate.WAITING and self.mode == "sync" and self.phase is not Phase.COLLECTING:
            raise Violation(4, f"{what} although the round is {self.phase}", of)
        if row.fate is Fate.JOINED and self.phase not in (Phase.COLLECTING, Phase.SECURING):
            raise Violation(4, f"{what} although the round is {self.phase}", of)
        if row.fate is Fate.CARRIED and self.late == "discard":
            raise Violation(3, f"{what} although late = discard", of)


def cause_of_misfits(misfits: Sequence[tuple[ClientId, str]]) -> str:
    """Return the cause of a run's end because the work of every connected client does not fit it.

    Args:
        misfits: the clients, each with the reason.
    """
    (client_id, detail), *others = misfits
    more = f" ({count_of(len(others), 'other client')} likewise)" if others else ""
    return f"the work of no connected client fits the run: {client_id}: {' '.join(detail.split())}{more}"
