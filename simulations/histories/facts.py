"""What a referee knows of a run: rounds, fates and accepted updates, as far as the events tell."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import (
    TERMINAL,
    AbandonReason,
    ClientId,
    CloseReason,
    Fate,
    RejectReason,
    RoundId,
    RunState,
)
from atoll.server.rounds.events import Update
from atoll.server.rounds.policy import StragglerPolicy
from atoll.simulations.histories.known import Known

MAY_REPORT = (Fate.WAITING, Fate.LOST, Fate.FAILED)


@dataclass(slots=True)
class Accepted:
    """An update whose acceptance is on disk."""

    update: Update
    was_late: bool
    used_in: list[RoundId] = field(default_factory=list)
    is_left: bool = False  # it was settled that no model will hold it


@dataclass(slots=True)
class RoundFacts:
    """One round."""

    round_id: RoundId
    base: int
    select_by: float
    is_selecting: bool = True
    is_drawing: bool = False
    fates: dict[ClientId, Fate] = field(default_factory=dict)
    late_because: dict[ClientId, RejectReason] = field(default_factory=dict)
    begun: dict[ClientId, float] = field(default_factory=dict)
    deadline: float = 0.0
    linger_by: float | None = None
    grace_by: float = 0.0
    is_in_grace: bool = False
    extended: float = 0.0
    reported: dict[ClientId, Update] = field(default_factory=dict)
    late: dict[ClientId, Update] = field(default_factory=dict)  # accepted updates of earlier rounds
    close_reason: CloseReason | None = None
    abandon_reason: AbandonReason | None = None
    is_committed: bool = False
    is_forgotten: bool = False  # it is so long ago that the coordinator no longer knows who was in it

    @property
    def is_collecting(self) -> bool:
        """Whether updates are awaited."""
        return not self.is_selecting and self.close_reason is None and self.abandon_reason is None

    @property
    def is_aggregating(self) -> bool:
        """Whether the fold is under way."""
        return self.close_reason is not None and self.abandon_reason is None and not self.is_committed

    @property
    def is_untouched(self) -> bool:
        """Whether nobody was invited to it."""
        return self.is_selecting

    @property
    def is_awaiting_draw(self) -> bool:
        """Whether the sampler's answer matters."""
        return self.is_drawing and (self.is_selecting or self.is_collecting)

    def with_fate(self, fate: Fate) -> list[ClientId]:
        """Clients in order of name."""
        return sorted(c for c, f in self.fates.items() if f is fate)

    def may_report(self, client_id: ClientId) -> bool:
        """Whether the client has not had a verdict."""
        return self.is_collecting and self.fates.get(client_id) in MAY_REPORT

    def began_in_time(self, client_id: ClientId) -> bool:
        """Whether the client's upload had begun by the deadline."""
        return client_id in self.begun and self.begun[client_id] <= self.deadline

    @property
    def awaited(self) -> list[ClientId]:
        """Whose update may still come in time."""
        waiting = self.with_fate(Fate.WAITING)
        return [c for c in waiting if self.began_in_time(c)] if self.is_in_grace else waiting

    def contributions(self) -> list[Update]:
        """What the closed round aggregates: one update of each client, a fresh one before a late one."""
        return [*self.reported.values(), *(u for c, u in self.late.items() if c not in self.reported)]


@dataclass(slots=True)
class BufferFacts(RoundFacts):
    """One fill of an asynchronous run's buffer, and the invitations that were given meanwhile."""

    is_selecting: bool = False
    filled: list[Update] = field(default_factory=list)  # as they came
    is_overdue: bool = False
    due: dict[ClientId, float] = field(default_factory=dict)  # each invitation's own deadline
    moved: dict[ClientId, float] = field(default_factory=dict)  # by outages
    num_draws: int = 0

    @property
    def is_untouched(self) -> bool:
        """Whether nobody was invited to it, and nothing is in."""
        return not self.filled and not self.fates

    def contributions(self) -> list[Update]:
        """What is in."""
        return self.filled


@dataclass(slots=True)
class Books:
    """The state of a run."""

    state: RunState = RunState.QUEUED
    version: int = 0
    has_begun: bool = False
    is_stop_wanted: bool = False
    is_pause_wanted: bool = False
    connected: dict[ClientId, str] = field(default_factory=dict)
    lost: set[ClientId] = field(default_factory=set)
    round: RoundFacts | None = None
    rounds: dict[RoundId, RoundFacts] = field(default_factory=dict)
    accepted: dict[tuple[ClientId, RoundId], Accepted] = field(default_factory=dict)
    carried: dict[ClientId, Update] = field(default_factory=dict)
    waiting: list[Update] = field(default_factory=list)  # for the next buffers of an asynchronous run
    known: Known = field(default_factory=Known)

    @property
    def is_open(self) -> bool:
        """Whether clients matter to it: it has begun, and not ended."""
        return self.has_begun and self.state not in TERMINAL

    def open(self, round_id: RoundId) -> RoundFacts | None:
        """The round, if it is the open one."""
        return self.round if self.round is not None and self.round.round_id == round_id else None

    def forget_old_rounds(self, *, most: int) -> None:
        """A round opens: the last `most` are remembered, and those with an update that still waits for a commit."""
        waiting = {update.round_id for update in self.carried.values()}
        for round_id in sorted(self.rounds)[:-most]:
            self.rounds[round_id].is_forgotten |= round_id not in waiting

    def forget_rounds_before(self, version: int) -> None:
        """A buffer opens: the last three rounds are remembered, and those of which an update may still count."""
        for round_id in sorted(self.rounds)[:-3]:
            self.rounds[round_id].is_forgotten |= self.rounds[round_id].base < version

    def carry(self, update: Update) -> None:
        """Let an update count in the first commit that it can; of two by one client for one commit the newer stays."""
        table, round_ = self.carried, self.round
        if round_ is not None and round_.close_reason is None and update.round_id < round_.round_id:
            table = round_.late
        both = [u for u in (update, table.get(update.client_id)) if u is not None]
        *older, table[update.client_id] = sorted(both, key=lambda u: u.round_id)
        for superseded in older:
            self.leave(superseded)

    def accept(self, update: Update, *, was_late: bool) -> None:
        """The update's acceptance is on disk."""
        self.accepted[update.client_id, update.round_id] = Accepted(update, was_late)
        self.known.accepted(update)

    def leave(self, update: Update) -> None:
        """No model will hold the update."""
        self.accepted[update.client_id, update.round_id].is_left = True

    def adaptive_seconds(self, clients: Iterable[ClientId], policy: StragglerPolicy) -> float:
        """The deadline of those that are needed, from what was measured."""
        unknown, seconds = policy.deadline_max / policy.adaptive_margin, self.known.seconds
        expected = sorted(sum(seconds[c]) if c in seconds else unknown for c in clients)
        needed = expected[: policy.cohort_size][-1]
        return min(policy.deadline_max, max(policy.deadline_min, needed * policy.adaptive_margin))
