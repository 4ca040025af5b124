"""The base of every kind of round: a record, deadlines, an aggregation, and exactly one end. Pure.

    COLLECTING ---closed------------> AGGREGATING ---Aggregated----------> COMMITTED
    COLLECTING ---abandoned, stopped---------------------------------> ABANDONED
                                      AGGREGATING ---AggregationFailed---> ABANDONED

`cohort_round` is the round with a cohort, `buffer_round` the round of an asynchronous run.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Iterator
from typing import ClassVar

from atoll.protocol.vocabulary import AbandonReason, ClientId, Digest, Fate, Phase, RoundId, Version
from atoll.server.invariants import Violation
from atoll.server.members.membership import Membership
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AuditCharge,
    Commit,
    Effect,
    Update,
)
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.server.rounds.record import CarriedRecord, Outage, RoundRecord
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.update_claims import work_scale

Effects = tuple[Effect, ...]

NEWS_S = 3600.0
"""Seconds between two checks of a wait for clients, each of which is an event and a log line."""


class OpenRound(ABC):
    """Round that has not ended. A new round is a new machine."""

    is_secure: ClassVar[bool] = False
    """Whether it is a `SecureRound`, which needs cryptography: a run imports it when its first one opens."""

    def __init__(
        self, round_id: RoundId, base_version: Version, rules: RunRules, membership: Membership, now: float
    ) -> None:
        policy = rules.policy
        self.policy, self.membership, self._wait = policy, membership, rules.wait
        self._privacy = rules.privacy
        self.record = RoundRecord(
            round_id=round_id,
            base_version=base_version,
            opened_at=now,
            cohort_size=policy.num_wanted,
            quorum=policy.quorum_count,
            num_needed_to_draw=policy.num_needed_to_draw,
            late=policy.late,
            mode=policy.mode,
        )
        self._is_drawing = False
        self._extended = 0.0
        self._lost: list[ClientId] = []  # the client of each accepted update that was lost in this round

    # ------------------------------------------------------------ time

    @property
    def phase(self) -> Phase:
        """The phase of the round."""
        return self.record.phase

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """The time at which `time_passed` must be called [s since the epoch]; None: no timer runs."""

    @abstractmethod
    def time_passed(self, now: float) -> Effects:
        """Apply the deadline, which has passed."""

    def coordinator_started(self, down_since: float, now: float) -> Effects:
        """Extend the deadlines by the downtime, up to `outage_max` in total, and repeat a pending aggregation."""
        record = self.record
        seconds = max(0.0, now - down_since)
        extension = min(seconds, self.policy.outage_max - self._extended)
        self._extended += extension
        record.outages.append(Outage(now, seconds, extension))
        self._extend(extension, now)
        self._is_drawing = False  # no client is connected: draw again when they have reconnected
        if record.phase is Phase.AGGREGATING:
            return (self._aggregate(),)
        return ()

    @abstractmethod
    def _extend(self, seconds: float, now: float) -> None:
        """Extend every deadline of this round, and mark its clients as disconnected."""

    @abstractmethod
    def stood_still(self, seconds: float) -> Effects:
        """Move every deadline by `seconds` during which time stood still, and repeat the invitations."""

    # ------------------------------------------------------------ events

    @property
    @abstractmethod
    def held(self) -> Iterator[Update]:
        """The accepted updates that wait for this round's end."""

    @property
    @abstractmethod
    def may_draw(self) -> bool:
        """Return whether the round draws clients as soon as there are enough."""

    def _may_wait_for_approvals(self, counted: Iterable[ClientId], now: float) -> bool:
        """Return whether the `counted` clients and those waiting for their sites could reach the quorum.

        The wait for them ends `approval_wait` after it was first needed; a commit ends it, too.
        """
        membership = self.membership
        awaiting = [*membership.awaiting()]
        if not awaiting or not self.policy.approval_wait or len({*counted, *awaiting}) < self.record.quorum:
            return False
        if membership.approval_by is None:
            membership.approval_by = now + self.policy.approval_wait
        return now < membership.approval_by

    def _wait_on(self, now: float) -> float | None:
        """Begin or continue the wait for clients; return when to check again, or None: the run no longer waits."""
        if self._wait is None:
            return None
        since = self.record.waiting_since = self.record.waiting_since or now
        until = math.inf if self._wait.most is None else since + self._wait.most
        return min(now + NEWS_S, until) if now < until else None

    def _lacks_only_the_away(self, counted: Iterable[ClientId]) -> bool:
        """Return whether the `counted` clients would make the quorum with the absent ones that will come back."""
        away = {*self.record.away()} if self._wait is not None else set()
        return bool(away) and len(away.union(counted)) >= self.record.quorum

    def lose(self, digests: Container[Digest], now: float) -> Effects:
        """Remove accepted updates whose files are lost; a running fold starts again with the others."""
        lost = [update for update in self.held if update.digest in digests]
        if not lost:
            return ()
        self._lost += [update.client_id for update in lost]
        num_left = self._let_go(digests)
        if self.phase is not Phase.AGGREGATING:
            return self._settled_without(now)
        if num_left < self.record.quorum:
            detail = f"{num_left} accepted, quorum {self.record.quorum}{self.record.why_below_quorum}"
            return self.end_without_files(detail, now)
        return (self._aggregate(),)

    def end_without_room(self, detail: str, now: float) -> Effects:
        """Abandon the round after a wait in vain for disk space."""
        return self._abandon(AbandonReason.AWAITS_ROOM, now, detail)

    def end_without_files(self, detail: str, now: float) -> Effects:
        """Abandon the round because files are lost."""
        return self._abandon(AbandonReason.FILES_LOST, now, detail)

    def end_after_restoration(self, detail: str, now: float) -> Effects:
        """Abandon the round, whose clients may have spent their privacy budgets since the backup."""
        return self._abandon(AbandonReason.RESTORED, now, detail)

    @abstractmethod
    def _let_go(self, digests: Container[Digest]) -> int:
        """Remove accepted updates from the counted ones; return the number that still counts towards the quorum."""

    def _settled_without(self, now: float) -> Effects:
        """Close or abandon a collecting round if no further answer can change the result."""
        return ()

    @abstractmethod
    def look_for_clients(self, now: float) -> Effects:
        """Draw clients if the round needs some and enough are available; called after each event of the run."""

    @abstractmethod
    def cohort_drawn(self, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Invite the drawn clients, unless the round no longer waits for a draw."""

    def sampler_failed(self, detail: str, now: float) -> Effects:
        """Abandon the round after an error of a custom sampler."""
        return self._abandon(AbandonReason.SAMPLER_FAILED, now, detail) if self._is_drawing else ()

    def client_joined(self, client_id: ClientId, now: float) -> Effects:
        """Repeat the invitation of a client that has (re)connected."""
        return ()

    def client_disconnected(self, client_id: ClientId, now: float) -> None:  # noqa: B027 - a buffer does not need it
        """Record that a client's control stream has ended."""

    def client_gave_up(self, client_id: ClientId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """Record that a client has FAILED, was REFUSED or is LOST, and stop waiting for it."""
        return ()

    def upload_begun(self, client_id: ClientId, now: float) -> None:  # noqa: B027
        """Record the start of a client's upload."""

    # ------------------------------------------------------------ the end

    @abstractmethod
    def _aggregate(self) -> Aggregate:
        """Return the effect that aggregates the round; it depends only on the round's state, for a repetition."""

    def _charge(self, clients: Collection[ClientId]) -> None:
        """Charge each client whose update is in a private sum, before its fold, which may fail: nothing is refunded."""
        if (rules := self._privacy) is None:
            return
        for client_id in clients:
            self.membership.charge(client_id, rules)
        self._note_charges(len(clients))

    def _note_charges(self, more: int) -> None:
        """Record further charges of this round, which the members have; without privacy there are none."""
        if self._privacy is not None:
            self._note_charge(self._privacy, more + (0 if self.record.charge is None else self.record.charge.clients))

    def _note_charge(self, rules: PrivacyRules, clients: int, charges: int = 0) -> None:
        """Record the charges of this round, by what its most used client has spent in the run."""
        most = self.membership.most_spent, self.membership.most_uses
        self.record.charge = rules.charged(clients, *most, charges=charges)

    def _audited_charge(self) -> Effects:
        """Return the effect that records the round's charges in the audit log; without any none."""
        charge = self.record.charge
        return () if charge is None else (AuditCharge(f"round {self.record.round_id}", charge),)

    def _as_stale(self, update: Update) -> CarriedRecord:
        """Return the record of an update that may be from an earlier version, with its discount."""
        staleness = self.record.base_version - update.base_version
        scale = self.policy.discount(staleness) * work_scale(update.work, self.policy)
        return CarriedRecord(update.client_id, update.round_id, staleness, update.digest, update.num_examples, scale)

    def aggregated(self, event: Aggregated, now: float) -> Effects:
        """Commit the round: the next version is on disk."""
        assert self.phase is Phase.AGGREGATING, self.phase
        record = self.record
        record.phase, record.ended_at = Phase.COMMITTED, now
        record.version, record.model_digest = Version(record.base_version + 1), event.model_digest
        used = tuple(c.digest for c in self._aggregate().contributions)
        return (Commit(record.round_id, record.version, record.model_digest, used),)

    def aggregation_failed(self, event: AggregationFailed, now: float) -> Effects:
        """Abandon the round after an error of the fold."""
        assert self.phase is Phase.AGGREGATING, self.phase
        return self._abandon(AbandonReason.AGGREGATION_FAILED, now, event.detail)

    def stop(self, reason: str, now: float) -> Effects:
        """End the round by the operator's stop. The caller lets an aggregating round finish first."""
        assert self.phase in (Phase.SELECTING, Phase.COLLECTING, Phase.SECURING), self.phase
        return self._abandon(AbandonReason.STOP_REQUESTED, now, reason)

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Return whether a client was invited to the round, or an update has arrived."""

    def pause(self, reason: str, now: float) -> Effects:
        """Abandon the round, which has not begun, by the operator's pause."""
        assert not self.has_begun
        return self._abandon(AbandonReason.PAUSE_REQUESTED, now, reason)

    def _abandon(self, reason: AbandonReason, now: float, detail: str) -> Effects:
        record = self.record
        # a stopped buffer has no successor that audits its charges; sums that are open were charged before any fold
        is_unaudited = reason is AbandonReason.STOP_REQUESTED or record.phase is Phase.SECURING
        releases = self._released_by(reason, now)
        record.phase, record.ended_at, record.abandon_reason, record.detail = Phase.ABANDONED, now, reason, detail
        if is_unaudited:
            releases += self._audited_charge()
        return (*releases, Abandon(record.round_id, reason))

    def _released_by(self, reason: AbandonReason, now: float) -> Effects:
        """Return the releases of the clients that still train when the round is abandoned."""
        return ()

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check that the round is open for a reason, and the age of its updates; raises Violation."""
        record, of = self.record, f"round {self.record.round_id}"
        if record.ended_at is not None or record.quorum != self.policy.quorum_count:
            raise Violation(4, f"open as {record.phase} with quorum {record.quorum}", of)
        if self.phase is Phase.COLLECTING and (why := self._why_over()):
            raise Violation(4, f"it still collects, {why}", of)
        held = {update.digest: update for update in self.held}
        for row in (*record.carried, *record.buffer):
            update = held.get(row.digest)
            age = None if update is None else record.base_version - update.base_version
            if row.staleness != age or not 0 < row.scale <= self.policy.discount(row.staleness):
                raise Violation(3, f"an update counts as {row}; its age is {age}: {update}", of)

    @abstractmethod
    def _why_over(self) -> str:
        """Return why a collecting round should have ended; empty: it should not."""
