"""The record of a round: who was invited, what became of each, and why the round ended as it did. Pure values.

The record is the round machine's own memory, so what an operator reads is what the machine decided by.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    Fate,
    Phase,
    RoundId,
    Version,
)
from atoll.server.rounds.policy import Mode


@dataclass(slots=True)
class ClientRecord:
    """One invitation. Times are seconds since the epoch on the coordinator's clock."""

    invited_at: float
    fate: Fate = Fate.WAITING
    fate_at: float = 0.0
    reason: str = ""  # of a failure, refusal or loss
    detail: str = ""
    disconnected_at: float | None = None  # while the client is away and its lease runs
    num_reconnects: int = 0
    upload_begun_at: float | None = None
    digest: Digest | None = None  # of the update that was accepted, also when it was late
    num_examples: int = 0
    work: float = 0.0
    num_bytes: int = 0
    download_seconds: float = 0.0
    train_seconds: float = 0.0
    used_in: RoundId | None = None  # the round whose model holds the update
    unused_because: str = ""  # why no model holds it although it was accepted
    plain_bytes: int = 0  # what `num_bytes` would be without a codec
    deadline: float | None = None  # its own, in an asynchronous run
    extended: float = 0.0  # by how much outages have moved it


@dataclass(slots=True)
class CarriedRecord:
    """An update that counts in this round: a late one of an earlier round, or any that an asynchronous run commits."""

    client_id: ClientId
    round_id: RoundId
    staleness: int
    digest: Digest
    num_examples: int
    scale: float


@dataclass(slots=True)
class Outage:
    """The coordinator was down for `seconds`; the deadlines moved by `extended`."""

    at: float
    seconds: float
    extended: float


@dataclass(slots=True)
class RoundRecord:
    """Everything that was decided about one round, with its reason."""

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
    buffer: list[CarriedRecord] = field(default_factory=list)  # of an asynchronous run: what was in, as it came
    outages: list[Outage] = field(default_factory=list)

    def with_fate(self, *fates: Fate) -> Iterator[tuple[ClientId, ClientRecord]]:
        """The invitations with one of these fates, in order of client id."""
        return ((c, r) for c, r in sorted(self.clients.items()) if r.fate in fates)

    @property
    def num_in(self) -> int:
        """Accepted updates among those that are wanted: of the cohort on time, or in the buffer."""
        return self.num_reported if self.mode == "sync" else len(self.buffer)

    @property
    def num_reported(self) -> int:
        """Accepted updates of this round's own cohort that were on time."""
        return sum(r.fate is Fate.REPORTED for r in self.clients.values())
