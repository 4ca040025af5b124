"""One federated round with its cohort as a pure state machine: events in, effects out.

No sockets, no clock, no tensors, no randomness, no await. The driver of the machine (the gRPC service, the simulator,
a test) delivers events together with the time, and carries out the effects.

    SELECTING ---enough clients available: DrawCohort, CohortDrawn-------> COLLECTING
    SELECTING ---selection_timeout, fewer available than the quorum------> ABANDONED, or the round waits: for
                 approvals that can make it, or by `RunRules.wait` until there are enough
    COLLECTING --enough updates, all clients have answered, linger over,
                 deadline (+ grace) with the quorum----------------------> AGGREGATING
    COLLECTING --quorum out of reach, deadline below the quorum----------> ABANDONED; but a quorum that silent clients
                 can still make, and no other cohort, waits for the deadline
    AGGREGATING --Aggregated---------------------------------------------> COMMITTED
    AGGREGATING --AggregationFailed, FilesLost below the quorum----------> ABANDONED
    SELECTING, COLLECTING --stop-----------------------------------------> ABANDONED

Source: Bonawitz et al., "Towards Federated Learning at Scale: System Design", MLSys 2019, section 2.2 (Selection,
Configuration, Reporting). `StragglerPolicy` has the rules for late updates.
"""

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from atoll.aggregation.fold.weights import weight_cap
from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    Fate,
    LossReason,
    Phase,
    ReleaseReason,
    RoundId,
    Version,
)
from atoll.server.invariants import Violation
from atoll.server.members.membership import Membership
from atoll.server.rounds.events import (
    Accept,
    Aggregate,
    Aggregated,
    Contribution,
    DrawCohort,
    Invite,
    NoiseRow,
    Release,
    Update,
)
from atoll.server.rounds.open_round import Effects, OpenRound
from atoll.server.rounds.policy import FIRST_WAIT_S
from atoll.server.rounds.record import ClientRecord
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.update_claims import fault_of, learn, measure, note_accepted, reject, work_scale

MAY_REPORT = (Fate.WAITING, Fate.LOST, Fate.FAILED)
"""Fates with which an update in time is accepted: a client that was given up may still report."""


class Round(OpenRound):
    """Round from SELECTING to COMMITTED or ABANDONED. A new round is a new machine.

    `late` are the accepted updates of earlier rounds that wait for a commit, by client: they count in this round. The
    run's intake adds more to the same dictionary until the round closes.
    """

    def __init__(
        self,
        round_id: RoundId,
        base_version: Version,
        rules: RunRules,
        membership: Membership,
        late: dict[ClientId, Update],
        now: float,
    ) -> None:
        super().__init__(round_id, base_version, rules, membership, now)
        policy = rules.policy
        self.late, self._max_share = late, policy.max_share if rules.weighs else 1.0
        self._select_by = now + policy.selection_timeout
        self._first_by = math.inf
        if policy.waits_first(round_id):
            self._first_by, self.record.num_needed_to_draw = now + FIRST_WAIT_S, policy.first_available
        self._waiting: set[ClientId] = set()
        self._reported: dict[ClientId, Update] = {}
        self._in_grace = self._is_held = False
        self.noises: tuple[NoiseRow, ...] = ()
        """Of correlated noise: the noises of earlier versions that are in this round's, the last one first."""

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """The time at which `time_passed` must be called [s since the epoch]; None: no timer runs."""
        record = self.record
        if record.phase is Phase.SELECTING:
            return None if self._is_drawing else min(self._select_by, self._first_by)
        if record.phase is not Phase.COLLECTING:
            return None
        limit = record.grace_by if self._in_grace else record.deadline
        assert limit is not None
        return limit if record.linger_by is None else min(record.linger_by, limit)

    def time_passed(self, now: float) -> Effects:
        """Apply the deadline: draw from fewer clients, close, begin the grace period, or abandon."""
        record = self.record
        if record.phase is Phase.SELECTING and now < self._select_by:
            self._first_by, record.num_needed_to_draw = math.inf, self.policy.num_needed_to_draw
            return ()  # the round looks for clients after each event
        if record.phase is Phase.SELECTING:
            return self._selecting_is_over(now)
        assert record.deadline is not None
        by = record.linger_by
        if by is not None and now >= by and (self._in_grace or by < record.deadline):
            return self._close(CloseReason.LINGER_OVER, now)
        if self._in_grace:
            return self._close_or_abandon(CloseReason.GRACE_OVER, now)
        if self.policy.grace and self._uploading():
            self._in_grace, record.grace_by = True, record.deadline + self.policy.grace
            return self._settle(now)  # only the uploads under way are still awaited: the quorum may be out of reach
        return self._close_or_abandon(CloseReason.DEADLINE, now)

    def stood_still(self, seconds: float) -> Effects:
        """Move every deadline by `seconds` during which time stood still, and repeat the invitations."""
        record = self.record
        self._select_by += seconds
        self._first_by += seconds
        for instant in ("deadline", "linger_by", "grace_by"):
            if (value := getattr(record, instant)) is not None:
                setattr(record, instant, value + seconds)
        if record.phase is not Phase.COLLECTING or record.deadline is None:
            return ()
        there = [client_id for client_id in sorted(self._waiting) if self.membership.is_connected(client_id)]
        return tuple(self._invitation(client_id, record.deadline) for client_id in there)

    def _extend(self, seconds: float, now: float) -> None:
        record = self.record
        self.stood_still(seconds)
        for client in record.clients.values():
            if client.fate is Fate.WAITING and client.disconnected_at is None:
                client.disconnected_at = now

    # ------------------------------------------------------------ selecting

    def look_for_clients(self, now: float) -> Effects:
        """Draw a cohort as soon as enough clients are available, or end the wait for silent ones if it is over."""
        if self._is_held:
            return self._settle(now) if self.record.phase is Phase.COLLECTING else ()
        if self.record.phase is not Phase.SELECTING or self._is_drawing:
            return ()
        if self.record.waiting_since is not None and self._can_make_quorum():
            self.record.wait_is_over(now)
            self._select_by = now + self.policy.selection_timeout  # clients that connect together take part together
        needed = self.membership.enough_of(self.record.num_needed_to_draw)
        if self.membership.num_connected < needed:
            return ()
        if self.membership.num_available < needed and not self._can_make_quorum():
            return ()  # connected clients that decline count towards a draw, but it must be able to reach the quorum
        return self._draw()

    @property
    def may_draw(self) -> bool:
        """Return whether the round is selecting and no draw is under way."""
        return self.phase is Phase.SELECTING and not self._is_drawing

    def _selecting_is_over(self, now: float) -> Effects:
        """Draw from fewer clients, or from resting ones, or keep waiting for approvals, or abandon the round."""
        if not self._can_make_quorum() and any(map(self.membership.is_connected, self.membership.resting())):
            self.membership.wake()  # a rest must not fail a round
        if self._can_make_quorum():
            if self._wait is not None:
                self.membership.settle_for_these()
            return self._draw()
        counted = {*self._answered, *self.late, *self.membership.available()}
        if self._may_wait_for_approvals(counted, now):
            assert self.membership.approval_by is not None
            self._select_by = min(now + self.policy.selection_timeout, self.membership.approval_by)
            return ()
        are_approvals_late = len(counted.union(self.membership.awaiting())) >= self.record.quorum
        if not are_approvals_late and (look_again := self._wait_on(now)) is not None:
            self._select_by = look_again
            return ()
        return self._too_few_clients(now)

    def _can_make_quorum(self) -> bool:
        return self.membership.num_available > 0 and self._reachable(self.membership.available()) >= self.record.quorum

    def _draw(self) -> Effects:
        candidates = self.membership.candidates()
        if self._privacy is not None and self._privacy.hides_clients:
            candidates = tuple(candidate.without_values for candidate in candidates)
        self._is_drawing = True
        self.record.num_candidates = len(candidates)
        count, relaxed = min(self.policy.num_invited, len(candidates)), self.membership.pacer.relaxed
        return (DrawCohort(self.record.round_id, count, candidates, relaxed=relaxed),)

    def _too_few_clients(self, now: float) -> Effects:
        available, needed = self.membership.num_available, self.record.quorum
        seconds = max(self.policy.selection_timeout, now - (self.record.waiting_since or now))
        detail = f"{available} available after {seconds:g} s, {needed} needed"
        return self._abandon(AbandonReason.TOO_FEW_CLIENTS, now, detail)

    def cohort_drawn(self, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Invite the drawn cohort, unless the round no longer waits for a draw."""
        if self.phase is not Phase.SELECTING or not self._is_drawing:
            return ()
        record = self.record
        self._is_drawing = False
        record.phase, record.drawn_at = Phase.COLLECTING, now
        record.wait_is_over(now)
        record.clients = {c: ClientRecord(invited_at=now) for c in sorted(clients)}
        for client_id, client in record.clients.items():
            self.membership.chosen(client_id)
            if not self.membership.is_connected(client_id):
                client.disconnected_at = now
        self._waiting = set(clients)
        deadline = record.deadline = now + self._seconds_to_deadline()
        for client_id in record.clients:
            if reason := self.membership.lost_because(client_id):  # lost since the draw began
                self._set_fate(client_id, Fate.LOST, now, reason)
        invited = sorted(self._waiting)
        return (*(self._invitation(c, deadline) for c in invited), *self._settle(now))

    def _invitation(self, client_id: ClientId, deadline: float) -> Invite:
        record, counted = self.record, self.membership.counted_round(client_id)
        asked_at = record.clients[client_id].invited_at
        return Invite(client_id, record.round_id, record.base_version, deadline, counted, asked_at)

    def _seconds_to_deadline(self) -> float:
        """Return the seconds from the invitation to the deadline.

        An adaptive deadline is `adaptive_margin` times the expected time of the slowest needed client: the
        `cohort_size`-th fastest of the invited. A client without measurements counts as needing `deadline_max`.
        """
        policy = self.policy
        if policy.deadline != "adaptive":
            return policy.deadline
        unknown = policy.deadline_max / policy.adaptive_margin
        expected = (self.membership.expected_seconds(c) for c in self.record.clients)
        seconds = sorted(unknown if e is None else e for e in expected)
        slowest_needed = seconds[min(policy.cohort_size, len(seconds)) - 1]
        return min(max(slowest_needed * policy.adaptive_margin, policy.deadline_min), policy.deadline_max)

    # ------------------------------------------------------------ collecting

    def client_joined(self, client_id: ClientId, now: float) -> Effects:
        """Repeat the invitation of a client that has (re)connected, with the current deadline."""
        record = self.record
        client = record.clients.get(client_id)
        if self.phase is not Phase.COLLECTING or client is None or client.fate not in (Fate.WAITING, Fate.LOST):
            return ()
        client.num_reconnects += client.disconnected_at is not None
        client.disconnected_at = None
        self._set_fate(client_id, Fate.WAITING, now)
        assert record.deadline is not None
        return (self._invitation(client_id, record.deadline),)

    def client_disconnected(self, client_id: ClientId, now: float) -> None:
        """Record that the client's control stream has ended; its lease still runs."""
        client = self.record.clients.get(client_id)
        if client is not None and client.fate is Fate.WAITING:
            client.disconnected_at = now

    def client_gave_up(self, client_id: ClientId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """Record that a client has FAILED, was REFUSED or is LOST, and stop waiting for it."""
        client = self.record.clients.get(client_id)
        if self.phase is not Phase.COLLECTING or client is None or client.fate is not Fate.WAITING:
            return ()
        self._set_fate(client_id, fate, now, reason, detail)
        return self._settle(now)

    def upload_begun(self, client_id: ClientId, now: float) -> None:
        """Record the start of an upload: one that begins before the deadline may end in the grace period."""
        client = self.record.clients.get(client_id)
        if self.phase is Phase.COLLECTING and client is not None and client.fate in MAY_REPORT:
            client.upload_begun_at = client.upload_begun_at or now

    def is_open_for(self, update: Update) -> bool:
        """Return whether this update is in time for its round."""
        if self.phase is not Phase.COLLECTING:
            return False
        if not self._in_grace:
            return True
        client = self.record.clients.get(update.client_id)
        return client is None or self._began_in_time(client)

    def update_received(self, update: Update, now: float) -> Effects:
        """Accept or reject an update that is in time (`is_open_for`)."""
        client = self.record.clients.get(update.client_id)
        assert client is not None
        assert self.phase is Phase.COLLECTING
        assert client.fate in MAY_REPORT, client.fate
        if fault := fault_of(
            update, base_version=self.record.base_version, policy=self.policy, membership=self.membership
        ):
            self._set_fate(update.client_id, Fate.REFUSED, now, *fault)
            return (reject(update, *fault), *self._settle(now))
        self._set_fate(update.client_id, Fate.REPORTED, now)
        self._reported[update.client_id] = update
        note_accepted(client, update)
        measure(self.membership, client, update, now)
        learn(self.membership, update)
        return (Accept(update.client_id, update.round_id, update.digest), *self._settle(now))

    def _set_fate(self, client_id: ClientId, fate: Fate, now: float, reason: str = "", detail: str = "") -> None:
        client = self.record.clients[client_id]
        client.fate, client.fate_at, client.reason, client.detail = fate, now, reason, detail
        if fate is Fate.WAITING:
            self._waiting.add(client_id)
        else:
            self._waiting.discard(client_id)

    def _began_in_time(self, client: ClientRecord) -> bool:
        deadline = self.record.deadline
        return client.upload_begun_at is not None and deadline is not None and client.upload_begun_at <= deadline

    def _uploading(self) -> list[ClientId]:
        return [c for c in self._waiting if self._began_in_time(self.record.clients[c])]

    def _reachable(self, more: Iterable[ClientId] = ()) -> int:
        """Return the number of distinct clients with an accepted update in this round, or in `more`."""
        return len({*self._answered, *self.late, *more})

    @property
    def _answered(self) -> Collection[ClientId]:
        """The clients of the cohort that count towards the quorum: their updates are in."""
        return self._reported

    def _settle(self, now: float) -> Effects:
        """Close or abandon the round if no further answer can change that; begin the linger time at the quorum."""
        record, policy, self._is_held = self.record, self.policy, False
        if len(self._answered) >= policy.cohort_size:
            return self._close(CloseReason.ENOUGH, now)
        expected = self._uploading() if self._in_grace else self._waiting
        if self._reachable(expected) < record.quorum and self._may_return(expected):
            self._is_held = True
            return ()
        if not expected:
            reason = CloseReason.DEADLINE if self._in_grace and self._waiting else CloseReason.ALL_ANSWERED
            return self._close_or_abandon(reason, now)
        if len(self._answered) + len(expected) < record.quorum and self._reachable(expected) < record.quorum:
            return self._below_quorum(AbandonReason.QUORUM_OUT_OF_REACH, now)
        if policy.linger is not None and record.linger_by is None and len(self._answered) >= record.quorum:
            record.linger_by = now + policy.linger
            if policy.linger == 0:
                return self._close(CloseReason.LINGER_OVER, now)
        return ()

    def _may_return(self, expected: Iterable[ClientId]) -> bool:
        """Return whether silent clients of this cohort can still make the quorum by the deadline, and no new draw can.

        Their work continues after their lease has expired: an update that is finished by the deadline counts.
        """
        record, membership = self.record, self.membership
        if self._in_grace or len({*self.late, *membership.available()}) >= record.quorum:
            return False
        lost = (client_id for client_id, _ in record.with_fate(Fate.LOST))
        silent = [c for c in lost if membership.lost_because(c) == LossReason.LEASE_EXPIRED]
        return bool(silent) and self._reachable((*expected, *silent)) >= record.quorum

    # ------------------------------------------------------------ the end

    @property
    def has_begun(self) -> bool:
        """Return whether a cohort was invited."""
        return self.phase is not Phase.SELECTING

    def _close_or_abandon(self, reason: CloseReason, now: float) -> Effects:
        if self._reachable() >= self.record.quorum:
            return self._close(reason, now)
        on_time = reason is CloseReason.ALL_ANSWERED
        return self._below_quorum(AbandonReason.QUORUM_OUT_OF_REACH if on_time else AbandonReason.BELOW_QUORUM, now)

    def _let_go(self, digests: Container[Digest]) -> int:
        for held in (self.late, self._reported):
            for client_id in [c for c, update in held.items() if update.digest in digests]:
                del held[client_id]
        if len(self._answered) < self.record.quorum and self.phase is Phase.COLLECTING:
            self.record.linger_by = None
        if self.phase is Phase.AGGREGATING:
            self._take_late()
        return self._reachable()

    def _settled_without(self, now: float) -> Effects:
        return self._settle(now) if self.phase is Phase.COLLECTING else ()

    def _below_quorum(self, reason: AbandonReason, now: float) -> Effects:
        awaited = self._waiting if reason is AbandonReason.QUORUM_OUT_OF_REACH else ()  # else they are late
        if self._lost and self._reachable((*awaited, *self._lost)) >= self.record.quorum:
            reason = AbandonReason.FILES_LOST
        elif self._may_wait_for_approvals((*self._answered, *self.late, *self._waiting), now):
            reason = AbandonReason.AWAITS_APPROVAL
        elif self._lacks_only_the_away((*self._answered, *self.late, *awaited)):
            reason = AbandonReason.AWAITS_CLIENTS
        counts = f"{self._reachable()} accepted, quorum {self.record.quorum}"
        return self._abandon(reason, now, counts + self.record.why_below_quorum)

    def _close(self, reason: CloseReason, now: float) -> Effects:
        record = self.record
        in_time = reason in (CloseReason.ENOUGH, CloseReason.LINGER_OVER)
        releases = self._release(Fate.RELEASED if in_time else Fate.STRAGGLER, ReleaseReason.ROUND_CLOSED, now)
        record.phase, record.closed_at, record.close_reason = Phase.AGGREGATING, now, reason
        self._take_late()
        aggregate = self._aggregate()
        self._charge([contribution.client_id for contribution in aggregate.contributions])
        return (*releases, *self._audited_charge(), aggregate)

    def _take_late(self) -> None:
        """Record which late updates count in this round, and the capped weights."""
        record = self.record
        late = sorted(self.late.items())
        record.superseded = [update.digest for client_id, update in late if client_id in self._reported]
        record.carried = [self._as_stale(update) for client_id, update in late if client_id not in self._reported]
        record.weight_cap, record.capped = None, {}
        if self._max_share < 1:
            weights = {c.client_id: c.num_examples * c.scale for c in self._aggregate().contributions}
            if (cap := weight_cap([*weights.values()], self._max_share)) is not None:
                record.weight_cap = cap
                record.capped = {client_id: weight for client_id, weight in weights.items() if weight > cap}

    def _aggregate(self) -> Aggregate:
        """Return the effect that aggregates the round; equal states of the round give equal effects."""
        record = self.record
        in_time = [
            Contribution(c, u.digest, u.num_examples, work_scale(u.work, self.policy))
            for c, u in self._reported.items()
        ]
        late = [Contribution(c.client_id, c.digest, c.num_examples, c.scale) for c in record.carried]
        by_client = sorted(in_time + late, key=lambda c: c.client_id)
        if (cap := record.weight_cap) is not None:
            by_client = [
                replace(c, num_examples=cap, scale=1.0) if c.client_id in record.capped else c for c in by_client
            ]
        return Aggregate(
            record.round_id,
            record.base_version,
            tuple(by_client),
            clip_norm=record.clip_norm or 0.0,
            earlier=self.noises,
        )

    def aggregated(self, event: Aggregated, now: float) -> Effects:
        """Commit the round: the next version is on disk."""
        for client_id in self._reported:
            self.record.clients[client_id].used_in = self.record.round_id
            self.membership.counted(client_id, self.record.round_id)
        for carried in self.record.carried:
            self.membership.counted(carried.client_id, carried.round_id)
        if self._privacy is not None and self._privacy.separation > 1:
            clients = [contribution.client_id for contribution in self._aggregate().contributions]
            self.membership.keep_apart(clients, self.record.base_version + self._privacy.separation)
        return super().aggregated(event, now)

    def _released_by(self, reason: AbandonReason, now: float) -> Effects:
        why = ReleaseReason.RUN_ENDED if reason is AbandonReason.STOP_REQUESTED else ReleaseReason.ROUND_ABANDONED
        return self._release(Fate.STRAGGLER, why, now)

    def _release(self, fate: Fate, reason: ReleaseReason, now: float) -> Effects:
        submit = self.policy.late == "next_round" and reason is not ReleaseReason.RUN_ENDED
        released = sorted(self._waiting)
        for client_id in released:
            self._set_fate(client_id, fate, now)
        return tuple(Release(c, self.record.round_id, reason, submit) for c in released)

    @property
    def held(self) -> Iterator[Update]:
        """The accepted updates of this round, and the late ones of earlier rounds."""
        yield from self.late.values()
        yield from self._reported.values()

    @property
    def reported_on_time(self) -> Mapping[ClientId, Update]:
        """The accepted updates of this round's cohort."""
        return self._reported

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check the round, and that its awaited clients and accepted updates match the record."""
        super().validate()
        for fate, known in ((Fate.WAITING, self._waiting), (Fate.REPORTED, self._reported.keys())):
            rows = [client_id for client_id, row in self.record.with_fate(fate) if not row.unused_because]
            if known != {*rows}:
                of = f"round {self.record.round_id}"
                raise Violation(4, f"{fate} are {sorted(known)}, by the record {rows}", of)

    def _why_over(self) -> str:
        expected, quorum = self._uploading() if self._in_grace else self._waiting, self.record.quorum
        if len(self._answered) >= self.policy.cohort_size:
            return f"with {len(self._answered)} of {self.policy.cohort_size}"
        if self._may_return(expected):
            return ""
        if not expected:
            return "and no client is awaited"
        reachable = self._reachable(expected)
        return f"and {reachable} in reach, quorum {quorum}" if reachable < quorum else ""
