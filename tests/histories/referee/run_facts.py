"""The facts of a run that a referee derives from its events: rounds, fates and accepted updates."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import (
    TERMINAL,
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    Fate,
    RejectReason,
    RoundId,
    RunState,
)
from atoll.server.rounds.events import Update
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_rules import WaitRules
from tests.histories.referee.sampler_view import SamplerView

MAY_REPORT = (Fate.WAITING, Fate.LOST, Fate.FAILED)


@dataclass(slots=True)
class Accepted:
    """An update whose acceptance is on disk."""

    update: Update
    is_used: bool = False  # a model contains it
    is_left: bool = False  # it is settled that no model will contain it
    is_lost: bool = False  # on the coordinator's disk; it counts if it comes once more


@dataclass(slots=True)
class RoundFacts:
    """The facts of one round."""

    round_id: RoundId
    base: int
    select_by: float
    first_by: float = 0.0  # the end of the wait for `first_available` clients; 0: it is over
    is_selecting: bool = True
    is_drawing: bool = False
    gone_for_now: set[ClientId] = field(default_factory=set)  # those that failed for a reason of time or of a person
    quorum: int = 1
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
    waiting_since: float | None = None  # the beginning of a wait for clients
    lost: list[ClientId] = field(default_factory=list)  # the client of each update that was lost on the disk meanwhile
    is_forgotten: bool = False  # the coordinator no longer remembers its clients

    @property
    def is_collecting(self) -> bool:
        """Return whether updates are awaited."""
        return not self.is_selecting and self.close_reason is None and self.abandon_reason is None

    @property
    def is_aggregating(self) -> bool:
        """Return whether the fold is in progress."""
        return self.close_reason is not None and self.abandon_reason is None and not self.is_committed

    @property
    def is_untouched(self) -> bool:
        """Return whether no client has been invited to the round."""
        return self.is_selecting

    @property
    def is_awaiting_clients(self) -> bool:
        """Return whether the round selects, and has waited in vain for enough clients."""
        return self.is_selecting and not self.is_drawing and self.waiting_since is not None

    @property
    def is_awaiting_draw(self) -> bool:
        """Return whether the sampler's answer is awaited."""
        return self.is_drawing and (self.is_selecting or self.is_collecting)

    def with_fate(self, fate: Fate) -> list[ClientId]:
        """Return the clients with a fate, in order of name."""
        return sorted(c for c, f in self.fates.items() if f is fate)

    def may_report(self, client_id: ClientId) -> bool:
        """Return whether the round collects and the client has no verdict yet."""
        return self.is_collecting and self.fates.get(client_id) in MAY_REPORT

    def began_in_time(self, client_id: ClientId) -> bool:
        """Return whether the client's upload began by the deadline."""
        return client_id in self.begun and self.begun[client_id] <= self.deadline

    @property
    def awaited(self) -> list[ClientId]:
        """The clients whose updates may still arrive in time."""
        waiting = self.with_fate(Fate.WAITING)
        return [c for c in waiting if self.began_in_time(c)] if self.is_in_grace else waiting

    def contributions(self) -> list[Update]:
        """Return the updates that the closed round aggregates: one of each client, a fresh one before a late one."""
        return [*self.reported.values(), *(u for c, u in self.late.items() if c not in self.reported)]


@dataclass(slots=True)
class BufferFacts(RoundFacts):
    """The facts of one fill of an asynchronous run's buffer, with the invitations during it."""

    is_selecting: bool = False
    filled: list[Update] = field(default_factory=list)  # in the order of their arrival
    is_overdue: bool = False
    due: dict[ClientId, float] = field(default_factory=dict)  # deadline of each invitation
    moved: dict[ClientId, float] = field(default_factory=dict)  # extension of each deadline by outages
    num_draws: int = 0

    @property
    def is_untouched(self) -> bool:
        """Return whether no client has been invited, and the buffer is empty."""
        return not self.filled and not self.fates

    def contributions(self) -> list[Update]:
        """Return the updates in the buffer."""
        return self.filled


@dataclass(slots=True)
class RunFacts:
    """The facts of a run."""

    state: RunState = RunState.QUEUED
    version: int = 0
    has_begun: bool = False
    is_stop_wanted: bool = False
    is_pause_wanted: bool = False
    connected: dict[ClientId, str] = field(default_factory=dict)
    declined: dict[ClientId, bool] = field(default_factory=dict)  # connected ones; whether they wait for their site
    resting: dict[ClientId, float] = field(default_factory=dict)  # the end of each rest after a failure
    num_failures: Counter[ClientId] = field(default_factory=Counter)  # in a row
    settled_for: int = 0  # the connected clients with which a round has begun after `selection_timeout`
    resumes_itself: bool = False  # it is paused, or about to be, for want of clients
    approval_by: float | None = None  # the end of the wait for approvals
    lost: set[ClientId] = field(default_factory=set)
    silent: set[ClientId] = field(default_factory=set)  # whose last loss was the end of their lease
    round: RoundFacts | None = None
    rounds: dict[RoundId, RoundFacts] = field(default_factory=dict)
    accepted: dict[tuple[ClientId, RoundId], Accepted] = field(default_factory=dict)
    carried: dict[ClientId, Update] = field(default_factory=dict)
    lost_on_disk: set[Digest] = field(default_factory=set)
    waiting: list[Update] = field(default_factory=list)  # for the next buffers of an asynchronous run
    sampler_view: SamplerView = field(default_factory=SamplerView)

    @property
    def is_open(self) -> bool:
        """Return whether the run has begun and not ended, so that it has clients."""
        return self.has_begun and self.state not in TERMINAL

    @property
    def available(self) -> list[ClientId]:
        """The clients that can be invited now."""
        return [c for c in self.connected if c not in self.declined and c not in self.resting]

    def left(self, client_id: ClientId) -> None:
        """Record the end of a client's newest connection."""
        self.connected.pop(client_id, None)
        self.declined.pop(client_id, None)

    def all_left(self) -> None:
        """Record the end of all connections."""
        self.connected.clear()
        self.declined.clear()

    def next_wake(self) -> float:
        """Return the earliest end of a rest; infinity if no client rests."""
        return min(self.resting.values(), default=math.inf)

    def wake(self, now: float = math.inf) -> None:
        """End the rests until a time."""
        self.resting = {c: until for c, until in self.resting.items() if until > now}

    def may_wait_for_approvals(self, counted: Iterable[ClientId], now: float, policy: StragglerPolicy) -> bool:
        """Return whether the quorum is in reach with the clients that wait for their sites, and the wait not over."""
        waiting = {client_id for client_id, waits in self.declined.items() if waits}
        if not waiting or policy.approval_wait == 0 or len(waiting.union(counted)) < policy.quorum_count:
            return False
        self.approval_by = self.approval_by or now + policy.approval_wait
        return now < self.approval_by

    def may_wait(self, round_: RoundFacts, now: float, wait: WaitRules | None) -> float | None:
        """Return until when a round waits for clients before the next look, an hour at most; None: it does not."""
        if wait is None:
            return None
        if round_.waiting_since is None:
            round_.waiting_since = now
        most = math.inf if wait.most is None else wait.most
        return min(now + 3600.0, round_.waiting_since + most) if now < round_.waiting_since + most else None

    def lacks_only_the_away(self, round_: RoundFacts, counted: Iterable[ClientId], wait: WaitRules | None) -> bool:
        """Return whether those that are gone from a round would make its quorum with the `counted`."""
        away = {*round_.with_fate(Fate.LOST), *round_.gone_for_now.intersection(round_.with_fate(Fate.FAILED))}
        away |= {c for c in round_.with_fate(Fate.WAITING) if c not in self.connected}
        return wait is not None and bool(away) and len(away.union(counted)) >= round_.quorum

    def open(self, round_id: RoundId) -> RoundFacts | None:
        """Return the round, if it is the open one."""
        return self.round if self.round is not None and self.round.round_id == round_id else None

    def invitation(self, client_id: ClientId, round_id: RoundId) -> RoundFacts | None:
        """Return the round, if the client was invited to it and it is not forgotten."""
        round_ = self.rounds.get(round_id)
        return None if round_ is None or round_.is_forgotten or client_id not in round_.fates else round_

    def forget_old_rounds(self, *, most: int) -> None:
        """Forget rounds when one opens, except the last `most` and those with an update that waits for a commit."""
        waiting = {update.round_id for update in self.carried.values()}
        for round_id in sorted(self.rounds)[:-most]:
            self.rounds[round_id].is_forgotten |= round_id not in waiting

    def forget_rounds_before(self, version: int) -> None:
        """Forget rounds when a buffer opens, except the last three and those whose updates may still count."""
        for round_id in sorted(self.rounds)[:-3]:
            self.rounds[round_id].is_forgotten |= self.rounds[round_id].base < version

    def carry(self, update: Update) -> None:
        """Carry a late update to the first possible commit, for which a client's newer update replaces an older."""
        table, round_ = self.carried, self.round
        if round_ is not None and round_.close_reason is None and update.round_id < round_.round_id:
            table = round_.late
        both = [u for u in (update, table.get(update.client_id)) if u is not None]
        *older, table[update.client_id] = sorted(both, key=lambda u: u.round_id)
        for superseded in older:
            self.leave(superseded)

    def accept(self, update: Update) -> None:
        """Record an update's acceptance, which is on disk."""
        self.accepted[update.client_id, update.round_id] = Accepted(update)
        self.num_failures[update.client_id] = 0
        self.resting.pop(update.client_id, None)
        self.sampler_view.accepted(update)

    def leave(self, update: Update) -> None:
        """Record that no model will contain the update."""
        self.accepted[update.client_id, update.round_id].is_left = True

    def lose(self, digests: set[Digest]) -> None:
        """Record that updates which wait for a commit are lost on the disk."""
        self.lost_on_disk |= digests
        for (client_id, round_id), accepted in self.accepted.items():
            if accepted.update.digest in digests and not accepted.is_used and not accepted.is_left:
                accepted.is_left = accepted.is_lost = True
                self.rounds[round_id].fates[client_id] = Fate.FAILED
                self.rounds[round_id].gone_for_now -= {client_id}
        self.carried = {c: update for c, update in self.carried.items() if update.digest not in digests}
        self.waiting = [update for update in self.waiting if update.digest not in digests]

    def adaptive_seconds(self, clients: Iterable[ClientId], policy: StragglerPolicy) -> float:
        """Compute the adaptive deadline of a cohort from its clients' measured durations [s]."""
        unknown, seconds = policy.deadline_max / policy.adaptive_margin, self.sampler_view.seconds
        expected = sorted(sum(seconds[c]) if c in seconds else unknown for c in clients)
        needed = expected[: policy.cohort_size][-1]
        return min(policy.deadline_max, max(policy.deadline_min, needed * policy.adaptive_margin))
