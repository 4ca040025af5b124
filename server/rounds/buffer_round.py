"""One fill of an asynchronous run's buffer, as a pure state machine: a round without a separate cohort.

    COLLECTING --`buffer_size` updates; with the quorum: no client left to invite,
                 `fill_timeout` over, or stop-----------------------------------> AGGREGATING --> COMMITTED
    COLLECTING --quorum out of reach, stop below it-----------------------------> ABANDONED

Clients train continuously (`async_invitations`): a free slot goes to a client that was not yet invited from this
version, and an update counts in the buffer that is open at its arrival, whichever round its client was invited to.
While a buffer is aggregated, no client is invited, because the next version follows soon.

Sources: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", arXiv:2106.06639, Algorithm 1; Xie
et al., "Asynchronous Federated Optimization", arXiv:1903.03934, whose buffer holds one update.
"""

from collections.abc import Container, Iterator
from dataclasses import replace

from atoll.protocol.vocabulary import AbandonReason, ClientId, CloseReason, Digest, Phase, RoundId, Version
from atoll.server.invariants import Violation
from atoll.server.members.membership import Membership
from atoll.server.rounds.async_invitations import Invitations
from atoll.server.rounds.events import Aggregate, Aggregated, Contribution, DrawCohort, Update
from atoll.server.rounds.open_round import Effects, OpenRound
from atoll.server.rounds.run_rules import RunRules


class Buffer(OpenRound):
    """One buffer, from its first update to COMMITTED or ABANDONED.

    `updates`, its first ones, arrived while the last buffer was aggregated; `take` adds more until it closes.
    """

    def __init__(
        self,
        round_id: RoundId,
        base_version: Version,
        rules: RunRules,
        membership: Membership,
        invitations: Invitations,
        updates: list[Update],
        now: float,
    ) -> None:
        super().__init__(round_id, base_version, rules, membership, now)
        policy = rules.policy
        assert len(updates) <= policy.num_wanted
        self.invitations = invitations
        self.updates: list[Update] = []
        self.record.phase, self.record.deadline = Phase.COLLECTING, now + policy.fill_timeout
        self._is_overdue = False
        self._num_draws = 0
        for update in updates:
            self._add(update)

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """The end of `fill_timeout`; None: it has passed, or the buffer is closed."""
        return self.record.deadline if self.is_open and not self._is_overdue else None

    def time_passed(self, now: float) -> Effects:
        """Stop inviting clients: the buffer was not full within `fill_timeout`; if no client trains, wait for some."""
        may_wait = not (self.invitations or self._has_quorum or [*self.membership.awaiting()])
        may_wait &= not self._is_drawing or self.record.waiting_since is not None
        if may_wait and (look_again := self._wait_on(now)) is not None:
            self.record.deadline = look_again
            return ()
        self._is_overdue, self._is_drawing = True, False
        return ()

    def stood_still(self, seconds: float) -> Effects:
        """Move the deadline by `seconds` during which time stood still; the invitations have separate deadlines."""
        assert self.record.deadline is not None
        self.record.deadline += seconds
        return ()

    def _extend(self, seconds: float, now: float) -> None:
        assert self.record.deadline is not None
        self.record.deadline += seconds

    # ------------------------------------------------------------ collecting

    @property
    def is_open(self) -> bool:
        """Return whether the buffer accepts updates."""
        return self.phase is Phase.COLLECTING

    @property
    def held(self) -> Iterator[Update]:
        """The accepted updates in the buffer."""
        yield from self.updates

    def take(self, update: Update) -> None:
        """Add an accepted update; `look_for_clients` then closes a full buffer."""
        assert self.is_open
        self._add(update)

    def _add(self, update: Update) -> None:
        self.updates.append(update)
        row = self._as_stale(update)
        row.scale *= self.policy.alpha if self.policy.mode == "fedasync" else 1.0
        self.record.buffer.append(row)
        self._note_charges(1)  # made when the update was accepted: before the client's next invitation

    @property
    def may_draw(self) -> bool:
        """Return whether free slots may be filled and no draw is under way."""
        return self.is_open and not self._is_overdue and not self._is_drawing

    def look_for_clients(self, now: float) -> Effects:
        """Close the buffer if it is full or cannot fill any more; otherwise draw clients for the free slots."""
        if not self.is_open:
            return ()
        if len(self.updates) >= self.policy.num_wanted:
            return self._close(CloseReason.ENOUGH, now)
        if self._is_overdue and (self._has_quorum or not self.invitations):
            return self._close_or_abandon(CloseReason.DEADLINE, AbandonReason.BELOW_QUORUM, now)
        if self._is_overdue or self._is_drawing:
            return ()
        free = self.policy.concurrency - len(self.invitations)
        if free > 0 and (candidates := self.invitations.candidates(self.record)):
            self._is_drawing, self._num_draws = True, self._num_draws + 1
            self.record.num_candidates = max(self.record.num_candidates, len(candidates))
            count = min(free, len(candidates))
            relaxed = self.membership.pacer.relaxed
            return (DrawCohort(self.record.round_id, count, candidates, self._num_draws - 1, relaxed),)
        if not self.invitations and (self._has_quorum or self._could_ask_again()):
            return self._close_or_abandon(CloseReason.ALL_ANSWERED, AbandonReason.QUORUM_OUT_OF_REACH, now)
        return ()

    def cohort_drawn(self, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Invite the drawn clients, unless the round no longer waits for a draw."""
        if not self.is_open or not self._is_drawing:
            return ()
        self._is_drawing, self.record.drawn_at = False, self.record.drawn_at or now
        if self.record.waiting_since is not None:
            self.record.wait_is_over(now)
            self.record.deadline = now + self.policy.fill_timeout
        return self.invitations.invite(self.record, clients, now)

    @property
    def _has_quorum(self) -> bool:
        return len(self.updates) >= self.record.quorum

    def _could_ask_again(self) -> bool:
        """Return whether the next round may invite a client again that was invited without sending an update."""
        rows = self.record.clients.items()
        lacking = (client_id for client_id, row in rows if row.digest is None or row.is_lost)
        return any(map(self.membership.is_available, lacking))

    # ------------------------------------------------------------ the end

    @property
    def has_begun(self) -> bool:
        """Return whether the round has an update or an invited client."""
        return bool(self.updates or self.record.clients)

    def stop(self, reason: str, now: float) -> Effects:
        """End the round by the operator's stop: with the quorum its updates become the last version of the run."""
        assert self.is_open, self.phase
        return self._close(CloseReason.FLUSHED, now) if self._has_quorum else super().stop(reason, now)

    def _close_or_abandon(self, close: CloseReason, abandon: AbandonReason, now: float) -> Effects:
        if self._has_quorum:
            return self._close(close, now)
        is_in_vain = not self.has_begun or self.record.waiting_since is not None
        reason = AbandonReason.TOO_FEW_CLIENTS if is_in_vain else abandon
        if self._lost and len(self.updates) + len(self._lost) >= self.record.quorum:
            reason = AbandonReason.FILES_LOST
        elif self._may_wait_for_approvals((update.client_id for update in self.updates), now):
            reason = AbandonReason.AWAITS_APPROVAL
        elif not is_in_vain and self._lacks_only_the_away(update.client_id for update in self.updates):
            reason = AbandonReason.AWAITS_CLIENTS
        counts = f"{len(self.updates)} accepted, quorum {self.record.quorum}"
        return self._abandon(reason, now, counts + self.record.why_below_quorum)

    def _let_go(self, digests: Container[Digest]) -> int:
        before, self.updates = len(self.updates), [update for update in self.updates if update.digest not in digests]
        if self.is_open and (charge := self.record.charge) is not None:  # the machine audits theirs: no sum has them
            number = charge.clients - before + len(self.updates)
            self.record.charge = replace(charge, clients=number) if number else None
        self.record.buffer = [row for row in self.record.buffer if row.digest not in digests]
        return len(self.updates)

    def _close(self, reason: CloseReason, now: float) -> Effects:
        record = self.record
        record.phase, record.closed_at, record.close_reason = Phase.AGGREGATING, now, reason
        record.wait_is_over(now)
        self._is_drawing = False  # the answer to a pending draw is ignored
        return (*self._audited_charge(), self._aggregate())

    def aggregated(self, event: Aggregated, now: float) -> Effects:
        """Commit the round: the next version is on disk."""
        for row in self.record.buffer:
            self.membership.counted(row.client_id, row.round_id)
        return super().aggregated(event, now)

    def _aggregate(self) -> Aggregate:
        record = self.record
        rows = sorted(record.buffer, key=lambda row: (row.client_id, row.round_id))
        contributions = tuple(
            Contribution(r.client_id, r.digest, r.num_examples, r.scale, Version(record.base_version - r.staleness))
            for r in rows
        )
        return Aggregate(record.round_id, record.base_version, contributions, record.mode)

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check the buffer, and that its record contains its updates."""
        super().validate()
        known, rows = [update.digest for update in self.updates], [row.digest for row in self.record.buffer]
        if known != rows or len(known) > self.policy.num_wanted:
            raise Violation(1, f"{known} are in the buffer, by the record {rows}", f"round {self.record.round_id}")

    def _why_over(self) -> str:
        have, wanted = len(self.updates), self.policy.num_wanted
        if have >= wanted:
            return f"full with {have} of {wanted}"
        is_over = self._is_overdue and (self._has_quorum or not self.invitations)
        return f"and fill_timeout is over: {have} accepted, quorum {self.record.quorum}" if is_over else ""
