"""The clients that train in an asynchronous run, each by an invitation with a deadline of its own. Pure.

An invitation belongs to the round that gave it and may outlive it: a commit releases nobody but those whose version has
become too old to count. It ends with the client's update, failure or loss, or at its deadline. In a synchronous run
there are none, and nothing here does anything.
"""

from collections.abc import Iterator
from typing import Protocol

from atoll.protocol.vocabulary import ClientId, Fate, ReleaseReason, RoundId, Version
from atoll.server.rounds.events import AmendRecord, Candidate, Effect, Invite, Release, Update
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import ClientRecord, RoundRecord


class Records(Protocol):
    """The records of the rounds that are remembered, the open one's among them."""

    def record_of(self, round_id: RoundId) -> RoundRecord | None:
        """One of them."""
        ...

    def newest_first(self) -> Iterator[RoundRecord]:
        """All of them."""
        ...


class Invitations:
    """The table of who trains for which round; it lies in the ledger, and every deadline and fate in the records."""

    def __init__(self, policy: StragglerPolicy, ledger: Ledger, records: Records) -> None:
        self._policy, self._ledger, self._records = policy, ledger, records

    def __len__(self) -> int:
        return len(self._ledger.training)

    def is_training(self, client_id: ClientId, round_id: RoundId | None = None) -> bool:
        """Whether the client's update is awaited: of this round, or of any."""
        found = self._ledger.training.get(client_id)
        return found is not None and round_id in (None, found)

    # ------------------------------------------------------------ who

    def candidates(self, record: RoundRecord) -> tuple[Candidate, ...]:
        """Who can be invited now to the round: connected, idle, and not yet asked or counted for its version."""
        taken = {*self._ledger.training, *record.clients, *self._counted(record.base_version)}
        return tuple(c for c in self._ledger.membership.candidates() if c.client_id not in taken)

    def has_counted(self, client_id: ClientId, version: Version) -> bool:
        """Whether an update of this client that was trained from this version was accepted: each counts once."""
        return client_id in self._counted(version)

    def _counted(self, version: Version) -> set[ClientId]:
        of_version = (record for record in self._records.newest_first() if record.base_version == version)
        return {c for r in of_version for c, row in r.clients.items() if row.digest and not row.unused_because}

    def may_still_count(self, record: RoundRecord) -> bool:
        """Whether an update for this round is young enough, as the newest version stands."""
        return self._ledger.version - record.base_version <= self._policy.max_staleness

    # ------------------------------------------------------------ invited

    def invite(self, record: RoundRecord, clients: tuple[ClientId, ...], now: float) -> Effects:
        """Let clients train for the round, as many as there is room for; one that was given up meanwhile is lost."""
        invited: list[Effect] = []
        membership, taken = self._ledger.membership, {*record.clients, *self._counted(record.base_version)}
        for client_id in sorted(clients):
            if len(self) >= self._policy.concurrency or client_id in taken or self.is_training(client_id):
                continue
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
        """To the client's own deadline: fixed, or `adaptive_margin` times what it is expected to take."""
        policy = self._policy
        if policy.deadline != "adaptive":
            return policy.deadline
        expected = self._ledger.membership.expected_seconds(client_id)
        seconds = policy.deadline_max if expected is None else expected * policy.adaptive_margin
        return min(max(seconds, policy.deadline_min), policy.deadline_max)

    def joined(self, client_id: ClientId, now: float) -> Effects:
        """A client that trains is (back) on the line: tell it again. One that was lost goes on while it is in time."""
        if not (self._policy.is_asynchronous and self._ledger.is_open):
            return ()  # a deadline that passed before may have ended the run
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
        """Noted; the client has its lease to come back."""
        if self.is_training(client_id):
            self._row(client_id).disconnected_at = now

    def upload_begun(self, client_id: ClientId, round_id: RoundId, now: float) -> None:
        """Noted: how long the upload takes is measured from here."""
        if self.is_training(client_id, round_id):
            row = self._row(client_id)
            row.upload_begun_at = row.upload_begun_at or now

    # ------------------------------------------------------------ done

    def ended(
        self, client_id: ClientId, round_id: RoundId | None, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        """The client failed, was refused or is lost: its place is free."""
        if not self.is_training(client_id, round_id):
            return ()
        return self._end(client_id, fate, now, reason, detail)

    def answered(self, update: Update, fate: Fate, now: float, reason: str = "", detail: str = "") -> Effects:
        """The client's update was judged; whether it was still awaited or not, this is what became of it."""
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
        """When `time_passed` must be called: the earliest deadline of all."""
        training = self._ledger.training
        return min(map(self._deadline, training)) if training else None

    def _deadline(self, client_id: ClientId) -> float:
        deadline = self._row(client_id).deadline
        assert deadline is not None
        return deadline

    def time_passed(self, now: float) -> Effects:
        """The earliest deadline is here: whoever has it is told to stop, and to hand in what it has."""
        earliest = self.deadline
        late = sorted(c for c in self._ledger.training if self._deadline(c) == earliest)
        return tuple(
            effect for c in late for effect in self._release(c, Fate.STRAGGLER, ReleaseReason.OUT_OF_TIME, now)
        )

    def coordinator_started(self, down_since: float, now: float) -> None:
        """Nobody is connected; each deadline moves by the downtime, up to `outage_max` in all."""
        for row in map(self._row, self._ledger.training):
            extension = min(max(0.0, now - down_since), self._policy.outage_max - row.extended)
            assert row.deadline is not None
            row.deadline, row.extended = row.deadline + extension, row.extended + extension
            row.disconnected_at = now if row.disconnected_at is None else row.disconnected_at

    def release_stale(self, now: float) -> Effects:
        """A version was committed: whose update could no longer count may stop."""
        stale = [c for c, r in self._ledger.training.items() if not self.may_still_count(self._record(r))]
        return tuple(e for c in sorted(stale) for e in self._release(c, Fate.RELEASED, ReleaseReason.TOO_STALE, now))

    def release_twin(self, update: Update, now: float) -> Effects:
        """A client's update came after all; was it asked again for that version meanwhile, it trains for nothing."""
        round_id = self._ledger.training.get(update.client_id)
        if round_id is None or self._record(round_id).base_version != update.base_version:
            return ()
        return self._release(update.client_id, Fate.RELEASED, ReleaseReason.ROUND_CLOSED, now)

    def release_all(self, reason: ReleaseReason, now: float) -> Effects:
        """No round follows: everybody may stop."""
        everybody = sorted(self._ledger.training)
        return tuple(effect for c in everybody for effect in self._release(c, Fate.RELEASED, reason, now))

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
        deadline, counted = record.clients[client_id].deadline, self._ledger.membership.counted_round(client_id)
        assert deadline is not None
        return Invite(client_id, record.round_id, record.base_version, deadline, counted)

    def _row(self, client_id: ClientId) -> ClientRecord:
        return self._record(self._ledger.training[client_id]).clients[client_id]

    def _amend(self, record: RoundRecord) -> Effects:
        """The record of a round that has ended is written again."""
        return (AmendRecord(record.round_id),) if record.round_id in self._ledger.past else ()


def _settle(row: ClientRecord, fate: Fate, now: float, reason: str, detail: str) -> None:
    row.fate, row.fate_at, row.reason, row.detail = fate, now, reason, detail
