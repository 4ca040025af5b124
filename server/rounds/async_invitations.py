"""The invitations of an asynchronous run, each with its own deadline. Pure.

An invitation belongs to the round in which it was made and may outlive it: a commit releases only the clients whose
version has become too old to count. It ends with the client's update, failure or loss, or at its deadline. In a
synchronous run there are no such invitations, and these functions have no effect.
"""

from collections.abc import Iterator
from typing import Protocol

from atoll.protocol.vocabulary import ClientId, Fate, ReleaseReason, RoundId, Version
from atoll.server.invariants import Violation
from atoll.server.members.member import Candidate
from atoll.server.rounds.events import AmendRecord, Effect, Invite, Release, Update
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import ClientRecord, RoundRecord, TooOldRecord


class Records(Protocol):
    """Records of the open round and of the last few rounds."""

    def record_of(self, round_id: RoundId) -> RoundRecord | None:
        """Return the record of one round, or None."""
        ...

    def newest_first(self) -> Iterator[RoundRecord]:
        """Yield all records, the newest first."""
        ...


class Invitations:
    """Clients that are training, with the round of each. The ledger has the table, the records the deadlines."""

    def __init__(self, policy: StragglerPolicy, ledger: Ledger, records: Records) -> None:
        self._policy, self._ledger, self._records = policy, ledger, records

    def __len__(self) -> int:
        return len(self._ledger.training)

    def is_training(self, client_id: ClientId, round_id: RoundId | None = None) -> bool:
        """Return whether the client's update is awaited, for this round or (None) for any."""
        found = self._ledger.training.get(client_id)
        return found is not None and round_id in (None, found)

    # ------------------------------------------------------------ candidates

    def candidates(self, record: RoundRecord) -> tuple[Candidate, ...]:
        """Return the clients that can be invited to a round: available, idle, neither invited nor counted before.

        A client is invited at most once in a round, and has at most one accepted update for a version.
        """
        taken = {*self._ledger.training, *record.clients, *self._counted(record.base_version)}
        return tuple(c for c in self._ledger.membership.candidates() if c.client_id not in taken)

    def has_counted(self, client_id: ClientId, version: Version) -> bool:
        """Return whether an update of this client from this version was accepted: each client counts once."""
        return client_id in self._counted(version)

    def _counted(self, version: Version) -> set[ClientId]:
        of_version = (record for record in self._records.newest_first() if record.base_version == version)
        return {c for r in of_version for c, row in r.clients.items() if row.digest and not row.unused_because}

    def may_still_count(self, record: RoundRecord) -> bool:
        """Return whether an update for this round is now at most `max_staleness` versions old, from a known version."""
        is_young = self._ledger.version - record.base_version <= self._policy.max_staleness
        return is_young and record.base_version not in self._ledger.lost

    def older(self) -> list[ClientId]:
        """Return the clients that were asked and have not counted, once for each known version before the newest one.

        A version that is too old by now is among them: a resume may change `max_staleness`.
        """
        records = [r for r in self._records.newest_first() if r.base_version < self._ledger.version]
        asked = {(c, r.base_version) for r in records for c in r.clients}
        return sorted(client_id for client_id, version in asked if not self.has_counted(client_id, version))

    # ------------------------------------------------------------ open invitations

    def invite(self, record: RoundRecord, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Invite clients to the round, up to `concurrency` in total; record those that were lost meanwhile."""
        invited: list[Effect] = []
        membership, taken = self._ledger.membership, {*record.clients, *self._counted(record.base_version)}
        for client_id in sorted(clients):
            if len(self) >= self._policy.concurrency or client_id in taken or self.is_training(client_id):
                continue
            if client_id in membership.members and not membership.has_budget(client_id):
                continue  # an update of another invitation has spent it since the draw began
            membership.chosen(client_id)
            row = record.clients[client_id] = ClientRecord(invited_at=now, deadline=now + self._seconds(client_id))
            row.disconnected_at = None if membership.is_connected(client_id) else now
            if reason := membership.lost_because(client_id):
                row.fate, row.fate_at, row.reason = Fate.LOST, now, reason
            else:
                self._ledger.training[client_id] = record.round_id
                invited.append(self._invite(client_id, record))
        return tuple(invited)

    def _seconds(self, client_id: ClientId) -> float:
        """Return the seconds to the client's deadline: fixed, or `adaptive_margin` times its expected time."""
        policy = self._policy
        if policy.deadline != "adaptive":
            return policy.deadline
        expected = self._ledger.membership.expected_seconds(client_id)
        seconds = policy.deadline_max if expected is None else expected * policy.adaptive_margin
        return min(max(seconds, policy.deadline_min), policy.deadline_max)

    def joined(self, client_id: ClientId, now: float) -> Effects:
        """Repeat the invitation of a client that has (re)connected; a lost one may continue before its deadline."""
        if not (self._policy.is_asynchronous and self._ledger.is_open):
            return ()  # a deadline that passed before this event may have ended the run
        record = next((r for r in self._records.newest_first() if client_id in r.clients), None)
        row = record.clients[client_id] if record is not None else None
        if record is None or row is None or row.deadline is None:
            return ()
        if row.fate is Fate.LOST and now < row.deadline and self.may_still_count(record):
            self._ledger.training[client_id] = record.round_id
            row.fate, row.fate_at, row.reason = Fate.WAITING, now, ""
        if not self.is_training(client_id, record.round_id):
            return ()
        row.num_reconnects += row.disconnected_at is not None
        row.disconnected_at = None
        return (self._invite(client_id, record),)

    def disconnected(self, client_id: ClientId, now: float) -> None:
        """Record that the client's control stream has ended; its invitation stands until its lease expires."""
        if self.is_training(client_id):
            self._row(client_id).disconnected_at = now

    def upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        """Record the start of the upload, from which its duration is measured."""
        if self.is_training(client_id, round_id):
            row = self._row(client_id)
            row.upload_begun_at = row.upload_begun_at or now

    # ------------------------------------------------------------ ends

    def ended(
        self, client_id: ClientId, round_id: RoundId | None, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        """End the invitation of a client that failed, was refused or is lost (round None: of any round)."""
        if not self.is_training(client_id, round_id):
            return ()
        return self._end(client_id, fate, now, reason, detail)

    def answered(self, update: Update, fate: Fate, now: float, reason: str = "", detail: str = "") -> Effects:
        """Record the fate of a client's update, even if its invitation had ended before."""
        if self.is_training(update.client_id, update.round_id):
            return self._end(update.client_id, fate, now, reason, detail)
        record = self._record(update.round_id)
        _settle(record.clients[update.client_id], fate, now, reason, detail)
        return self._amend(record)

    def _end(self, client_id: ClientId, fate: Fate, now: float, reason: str = "", detail: str = "") -> Effects:
        row, record = self._row(client_id), self._record(self._ledger.training.pop(client_id))
        _settle(row, fate, now, reason, detail)
        return self._amend(record)

    # ------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """The earliest deadline of all invitations, at which `time_passed` must be called, or None."""
        training = self._ledger.training
        return min(map(self._deadline, training)) if training else None

    def _deadline(self, client_id: ClientId) -> float:
        deadline = self._row(client_id).deadline
        assert deadline is not None
        return deadline

    def time_passed(self, now: float) -> Effects:
        """Release the clients with the earliest deadline; they may still send their partial work."""
        earliest = self.deadline
        late = sorted(c for c in self._ledger.training if self._deadline(c) == earliest)
        return tuple(
            effect for c in late for effect in self._release(c, Fate.STRAGGLER, ReleaseReason.OUT_OF_TIME, now)
        )

    def coordinator_started(self, down_since: float, now: float) -> None:
        """Extend each deadline by the downtime, up to `outage_max` in total, and mark all clients as disconnected."""
        for row in map(self._row, self._ledger.training):
            extension = min(max(0.0, now - down_since), self._policy.outage_max - row.extended)
            assert row.deadline is not None
            row.deadline, row.extended = row.deadline + extension, row.extended + extension
            row.disconnected_at = now if row.disconnected_at is None else row.disconnected_at

    def stood_still(self, seconds: float) -> Effects:
        """Move each deadline by `seconds` during which time stood still, and repeat the invitations."""
        repeated: list[Effect] = []
        for client_id, round_id in sorted(self._ledger.training.items()):
            row = self._row(client_id)
            assert row.deadline is not None
            row.deadline += seconds
            if self._ledger.membership.is_connected(client_id):
                repeated.append(self._invite(client_id, self._record(round_id)))
        return tuple(repeated)

    def release_after_commit(self, committed: RoundRecord, now: float, *, is_last: bool) -> Effects:
        """Release the clients whose update can no longer count in any commit; the others continue to train."""
        return self.release_all(ReleaseReason.ROUND_CLOSED, now) if is_last else self.release_stale(committed, now)

    def release_stale(self, committed: RoundRecord, now: float) -> Effects:
        """Release, after a commit, the clients whose update could no longer count; the committed round records them."""
        stale = sorted(c for c, r in self._ledger.training.items() if not self.may_still_count(self._record(r)))
        for client_id in stale:
            self.note_too_old(client_id, committed, self._ledger.version)
        return tuple(e for c in stale for e in self._release(c, Fate.RELEASED, ReleaseReason.TOO_STALE, now))

    def note_too_old(self, client_id: ClientId, at: RoundRecord, base: Version) -> None:
        """Record, in round `at`, that a training client's work is too old for a commit on version `base`."""
        record = self._record(self._ledger.training[client_id])
        self._ledger.num_too_old += 1
        at.too_old.append(TooOldRecord(client_id, record.round_id, base - record.base_version))

    def release_twin(self, update: Update, now: float) -> Effects:
        """Release the sender of a late update if it trains again from the same version: only one of the two counts."""
        round_id = self._ledger.training.get(update.client_id)
        if round_id is None or self._record(round_id).base_version != update.base_version:
            return ()
        return self._release(update.client_id, Fate.RELEASED, ReleaseReason.ROUND_CLOSED, now)

    def release_all(self, reason: ReleaseReason, now: float) -> Effects:
        """Release all clients: no round follows."""
        clients = sorted(self._ledger.training)
        return tuple(effect for c in clients for effect in self._release(c, Fate.RELEASED, reason, now))

    def _release(self, client_id: ClientId, fate: Fate, reason: ReleaseReason, now: float) -> Effects:
        round_id = self._ledger.training[client_id]
        submit = reason is ReleaseReason.OUT_OF_TIME and self.may_still_count(self._record(round_id))
        return (Release(client_id, round_id, reason, submit), *self._end(client_id, fate, now))

    # ------------------------------------------------------------ the records

    def _record(self, round_id: RoundId) -> RoundRecord:
        record = self._records.record_of(round_id)
        assert record is not None
        return record

    def _invite(self, client_id: ClientId, record: RoundRecord) -> Invite:
        client, counted = record.clients[client_id], self._ledger.membership.counted_round(client_id)
        assert client.deadline is not None
        return Invite(client_id, record.round_id, record.base_version, client.deadline, counted, client.invited_at)

    def _row(self, client_id: ClientId) -> ClientRecord:
        return self._record(self._ledger.training[client_id]).clients[client_id]

    def _amend(self, record: RoundRecord) -> Effects:
        """Return the effect that writes the record of an ended round again."""
        return (AmendRecord(record.round_id),) if record.round_id in self._ledger.past else ()

    def validate(self) -> None:
        """Check that exactly the clients with an open invitation train, each with a deadline; raises Violation."""
        rows = [(c, r.round_id, row) for r in self._records.newest_first() for c, row in r.clients.items()]
        waiting = {c: round_id for c, round_id, row in rows if row.fate is Fate.WAITING and row.deadline is not None}
        if self._policy.is_asynchronous and waiting != self._ledger.training:
            raise Violation(4, f"{self._ledger.training} train, by the records {waiting}")


def _settle(row: ClientRecord, fate: Fate, now: float, reason: str, detail: str) -> None:
    row.fate, row.fate_at, row.reason, row.detail = fate, now, reason, detail
