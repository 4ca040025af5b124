"""The intake of updates: the decision about each, whenever it arrives. Pure.

An update is in time for its round, late, or (in an asynchronous run) for the buffer that is open at its arrival. It is
accepted exactly once, or refused with a reason that its round's record states. This is the part of a run's machine that
deals with one client's work for one round; `run_machine` has the rest.
"""

from collections import Counter
from collections.abc import Iterator

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import (
    DECLINES,
    TROUBLES,
    ClientId,
    FailureReason,
    Fate,
    Phase,
    RejectReason,
    ReleaseReason,
    RoundId,
    Version,
)
from atoll.server.invariants import Violation
from atoll.server.rounds.async_invitations import Invitations
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import (
    Accept,
    AmendRecord,
    ClientFailed,
    ClientLost,
    Effect,
    Reject,
    Release,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.open_round import Effects, OpenRound
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.rounds.retries import let_rest
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.update_claims import WORK_MIN, fault_of, learn, measure, note_accepted, reject
from atoll.tensors.updates.weight import WEIGHT_MIN


class Intake:
    """Records of the open round and the last rounds, and the decision about each update of these rounds."""

    def __init__(self, rules: RunRules, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self.round: OpenRound | None = None
        self._follow(self.ledger.rules or rules)

    def _follow(self, rules: RunRules) -> None:
        """Apply these rules from now on; no round is open."""
        self.rules = rules
        self.invitations = Invitations(rules.policy, self.ledger, self)

    def record_of(self, round_id: RoundId) -> RoundRecord | None:
        """Return the record of the open round or of one of the last few; None: forgotten, or there was none."""
        if self.round is not None and self.round.record.round_id == round_id:
            return self.round.record
        return self.ledger.past.get(round_id)

    def newest_first(self) -> Iterator[RoundRecord]:
        """Yield the records of the open round and of the last few, the newest first."""
        if self.round is not None:
            yield self.round.record
        yield from (self.ledger.past[round_id] for round_id in sorted(self.ledger.past, reverse=True))

    def _open(self, round_id: RoundId) -> OpenRound | None:
        return self.round if self.round is not None and self.round.record.round_id == round_id else None

    def refusal(self, update: Update) -> tuple[RejectReason, str] | None:
        """Return why an update can be refused without its bytes and without an event; None: it cannot."""
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        if client is not None and client.has(update.digest):
            return None
        return self._fault_before_the_round(update, record, client)

    def is_accepted(self, update: Update) -> bool:
        """Return whether this update was already accepted, so that only its answer was lost."""
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        return client is not None and client.has(update.digest)

    def is_hopeless(self, update: Update) -> bool:
        """Return whether the update's claims lead to a refusal, so that its bytes need not be sent."""
        record = self.record_of(update.round_id)
        policy = self.rules.policy
        if (
            record is None
            or fault_of(update, base_version=record.base_version, policy=policy, membership=self.ledger.membership)
            is not None
        ):
            return True
        round_ = self._open(update.round_id)
        if isinstance(round_, Round) and round_.is_secure and not round_.is_open_for(update):
            return True
        return policy.is_asynchronous and self._fault_for_a_buffer(update) is not None

    # ------------------------------------------------------------ decisions

    def _update_received(self, event: UpdateReceived, now: float) -> Effects:
        update = event.update
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        if record is not None and client is not None and client.has(update.digest):
            return (Accept(update.client_id, update.round_id, update.digest, client.fate is Fate.CARRIED),)
        if fault := self._fault_before_the_round(update, record, client):
            return (Reject(update.client_id, update.round_id, update.digest, *fault),)
        assert record is not None
        assert client is not None
        if self.rules.policy.is_asynchronous:
            return self._into_a_buffer(update, record, client, now)
        round_ = self._open(update.round_id)
        if isinstance(round_, Round) and (round_.is_secure or round_.is_open_for(update)):
            return round_.update_received(update, now)
        return self._late(update, record, client, now)

    def _fault_before_the_round(
        self, update: Update, record: RoundRecord | None, client: ClientRecord | None
    ) -> tuple[RejectReason, str] | None:
        ledger, round_id = self.ledger, update.round_id
        if not ledger.is_open:
            return RejectReason.RUN_ENDED, f"the run is {ledger.state}: {ledger.cause}"
        if not 1 <= round_id < ledger.next_round:
            return RejectReason.WRONG_ROUND, f"round {round_id} is not in 1..{ledger.next_round - 1}"
        if record is None:
            return RejectReason.TOO_LATE, f"round {round_id} ended long ago"
        if client is None:
            return RejectReason.NOT_INVITED, f"{update.client_id} was not invited to round {round_id}"
        if client.digest is not None and not client.is_lost:
            return RejectReason.ALREADY_REPORTED, f"another update of yours was accepted in round {round_id}"
        if client.fate is Fate.REFUSED:
            return RejectReason.ALREADY_REPORTED, f"your update of round {round_id} was refused: {client.reason}"
        if client.fate is Fate.LATE:
            return RejectReason(client.reason), client.detail
        return None

    def _late(self, update: Update, record: RoundRecord, client: ClientRecord, now: float) -> Effects:
        """Decide about an update after its round has closed: refuse it, or carry it into the next commit."""
        ledger, policy = self.ledger, self.rules.policy
        open_round = self._takes_late(update.round_id)
        next_base = ledger.version + (self.round is not None and open_round is None)  # base of the next commit for it
        if policy.late == "discard":
            return self._refuse_late(update, record, RejectReason.TOO_LATE, _how_late(record, now), now)
        if next_base >= self.rules.rounds or ledger.stop_reason is not None:
            return self._refuse_late(update, record, RejectReason.TOO_LATE, "no round follows", now)
        if fault := fault_of(
            update, base_version=record.base_version, policy=policy, membership=self.ledger.membership
        ):
            return self._refuse_late(update, record, *fault, now)
        if next_base - update.base_version > policy.max_staleness:
            age = count_of(next_base - update.base_version, "version")
            detail = f"{age} old, max_staleness is {policy.max_staleness}"
            return self._refuse_late(update, record, RejectReason.TOO_STALE, detail, now)
        effects: list[Effect] = [Accept(update.client_id, update.round_id, update.digest, carried=True)]
        note_accepted(client, update)
        learn(ledger.membership, update)
        effects += self._change_fate(update, record, Fate.CARRIED, "", _how_late(record, now), now)
        effects += ledger.carry(update, into=None if open_round is None else open_round.late)
        return tuple(effects)

    def _takes_late(self, round_id: RoundId) -> Round | None:
        """Return the open round if a late update of round `round_id` can still count in it."""
        if not isinstance(self.round, Round) or self.round.phase is Phase.AGGREGATING or self._open(round_id):
            return None
        return self.round

    def _refuse_late(
        self, update: Update, record: RoundRecord, reason: RejectReason, detail: str, now: float
    ) -> Effects:
        effects = self._change_fate(update, record, Fate.LATE, reason, detail, now)
        return (Reject(update.client_id, update.round_id, update.digest, reason, detail), *effects)

    def _change_fate(
        self, update: Update, record: RoundRecord, fate: Fate, reason: str, detail: str, now: float
    ) -> Effects:
        client = record.clients[update.client_id]
        if client.fate is Fate.WAITING:  # its round is in the grace period of other clients
            assert self.round is not None
            return self.round.client_gave_up(update.client_id, fate, reason, detail, now)
        client.fate, client.fate_at, client.reason, client.detail = fate, now, reason, detail
        return (AmendRecord(record.round_id),) if self._open(record.round_id) is None else ()

    # ------------------------------------------------------------ work without an update

    def _upload_begun(self, event: UploadBegun, now: float) -> Effects:
        self.invitations.upload_begun(event.client_id, event.round_id, now)
        if round_ := self._open(event.round_id):
            round_.upload_begun(event.client_id, now)
        return ()

    def _update_refused(self, event: UpdateRefused, now: float) -> Effects:
        return self._gave_up(event, Fate.REFUSED, now)

    def _client_failed(self, event: ClientFailed, now: float) -> Effects:
        client_id, reason, membership = event.client_id, event.reason, self.ledger.membership
        membership.noted(client_id, reason, event.detail, now)
        if reason in DECLINES:
            membership.declined(client_id, waits=event.waits or reason is FailureReason.AWAITS_APPROVAL)
        elif reason in TROUBLES:
            record = self.record_of(event.round_id)
            row = record.clients.get(client_id) if record is not None else None
            if row is not None and row.fate is Fate.WAITING:  # its work was awaited
                self._let_rest(client_id, row, now)
        return self._gave_up(event, Fate.FAILED, now)

    def _note_why_it_left(self, event: ClientLost, now: float) -> None:
        """Record why a client has left, if it says so, and exclude it from invitations for a while after a failure."""
        client_id, membership = event.client_id, self.ledger.membership
        if event.failure is None:
            return
        membership.noted(client_id, event.failure, event.detail, now)
        if event.failure in TROUBLES and client_id not in membership.resting():
            open_id = self.round.record.round_id if self.round is not None else RoundId(0)
            record = self.record_of(self.ledger.training.get(client_id, open_id))
            self._let_rest(client_id, record.clients.get(client_id) if record is not None else None, now)

    def _let_rest(self, client_id: ClientId, row: ClientRecord | None, now: float) -> None:
        """Count a client's failure, and exclude it from invitations for a while; `row` is its current invitation."""
        membership, rules = self.ledger.membership, self.rules
        rest = let_rest(membership, rules.policy, rules.seed, client_id, now)
        if row is not None and row.fate is Fate.WAITING:
            row.rest = rest

    def _gave_up(self, event: UpdateRefused | ClientFailed, fate: Fate, now: float) -> Effects:
        client_id, round_id, reason, detail = event.client_id, event.round_id, event.reason, event.detail
        if self.invitations.is_training(client_id, round_id):
            return self.invitations.ended(client_id, round_id, fate, reason, detail, now)
        if round_ := self._open(round_id):
            return round_.client_gave_up(client_id, fate, reason, detail, now)
        record = self.ledger.past.get(round_id)
        client = record.clients.get(client_id) if record else None
        if client is None or client.digest is not None or client.fate not in (Fate.STRAGGLER, Fate.RELEASED):
            return ()
        client.reason, client.detail = reason, detail  # why the straggler was slow: only the record can use it now
        return (AmendRecord(round_id),)

    def _release(self, client_id: ClientId, round_id: RoundId) -> Effects:
        """Order a client that has reconnected to stop its work for a round, unless this work is still wanted."""
        record = self.record_of(round_id)
        client = record.clients.get(client_id) if record else None
        if client is not None and client.digest is not None:
            return ()  # its update was accepted; the client will ask for the answer
        if record is None or client is None:
            was_long_ago = record is None and round_id < self.ledger.next_round
            reason = ReleaseReason.ROUND_CLOSED if was_long_ago else ReleaseReason.NOT_INVITED
            return (Release(client_id, round_id, reason),)
        if self.rules.policy.is_asynchronous:
            return self._release_from_a_buffer(client_id, record)
        if self._open(round_id) and (record.phase is Phase.COLLECTING or client.fate is Fate.JOINED):
            return ()
        reason = ReleaseReason.ROUND_ABANDONED if record.phase is Phase.ABANDONED else ReleaseReason.ROUND_CLOSED
        submit = self.rules.policy.late == "next_round" and self.ledger.is_open
        return (Release(client_id, round_id, reason, submit),)

    def _release_from_a_buffer(self, client_id: ClientId, record: RoundRecord) -> Effects:
        if self.invitations.is_training(client_id, record.round_id):
            return ()
        submit = self.invitations.may_still_count(record) and self.ledger.is_open
        reason = ReleaseReason.OUT_OF_TIME if submit else ReleaseReason.TOO_STALE
        return (Release(client_id, record.round_id, reason, submit),)

    # ------------------------------------------------------------ asynchronous runs

    def _into_a_buffer(self, update: Update, record: RoundRecord, client: ClientRecord, now: float) -> Effects:
        """Decide about an update of an asynchronous run: it counts in the open buffer, or in the next one.

        The round of its invitation does not matter.
        """
        if fault := fault_of(
            update, base_version=record.base_version, policy=self.rules.policy, membership=self.ledger.membership
        ):
            return (reject(update, *fault), *self.invitations.answered(update, Fate.REFUSED, now, *fault))
        if fault := self._fault_for_a_buffer(update):
            if fault[0] is RejectReason.TOO_STALE and self.invitations.is_training(update.client_id, update.round_id):
                at = next(self.newest_first())
                self.invitations.note_too_old(update.client_id, at, self._base_of_its_commit())
            return (reject(update, *fault), *self.invitations.answered(update, Fate.LATE, now, *fault))
        measure(self.ledger.membership, client, update, now)
        learn(self.ledger.membership, update)
        note_accepted(client, update)
        if self.rules.privacy is not None:
            self.ledger.membership.charge(update.client_id, self.rules.privacy)
        if isinstance(self.round, Buffer) and self.round.is_open:
            self.round.take(update)
        else:
            self.ledger.waiting.append(update)
        accept = Accept(update.client_id, update.round_id, update.digest)
        answered = self.invitations.answered(update, Fate.REPORTED, now)
        return (accept, *answered, *self.invitations.release_twin(update, now))

    def _fault_for_a_buffer(self, update: Update) -> tuple[RejectReason, str] | None:
        ledger, policy, base = self.ledger, self.rules.policy, self._base_of_its_commit()
        if base >= self.rules.rounds or ledger.stop_reason is not None:
            return RejectReason.TOO_LATE, "no round follows"
        if (staleness := base - update.base_version) > policy.max_staleness:
            age = count_of(staleness, "version")
            return RejectReason.TOO_STALE, f"{age} old, max_staleness is {policy.max_staleness}"
        if update.base_version in ledger.lost:
            return RejectReason.TOO_STALE, f"version {update.base_version}, from which it was trained, is lost"
        if self.invitations.has_counted(update.client_id, update.base_version):
            return RejectReason.ALREADY_REPORTED, f"another update of yours counts for version {update.base_version}"
        if not ledger.membership.has_budget(update.client_id):  # by an update of another invitation
            return RejectReason.NOT_INVITED, "the privacy budget of this site in the run is spent"
        return None

    def _base_of_its_commit(self) -> Version:
        """Return the version to which an update that arrives now is added; the waiting updates fill buffers first."""
        ledger = self.ledger
        if isinstance(self.round, Buffer) and self.round.is_open:
            return ledger.version
        full = len(ledger.waiting) // self.rules.policy.num_wanted
        return Version(ledger.version + (self.round is not None) + full)

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check that each accepted update is in one model, waits for one, or has the reason; raises Violation."""
        held = [*self.ledger.carried.values(), *self.ledger.waiting, *(self.round.held if self.round else ())]
        waiting = Counter((update.client_id, update.round_id, update.digest) for update in held)
        records = {record.round_id: record for record in self.newest_first()}
        ended = [record for record in records.values() if record.phase is Phase.COMMITTED]
        counted = {update: record.round_id for record in ended for update in record.counted}
        of_version: Counter[tuple[ClientId, Version]] = Counter()
        for round_id, record in records.items():
            record.validate()
            for client_id, row in record.clients.items():
                if row.digest is None or row.is_lost:
                    continue
                number = waiting.pop((client_id, round_id, row.digest), 0)
                used_in = counted.get((client_id, round_id), row.used_in if row.used_in not in records else None)
                places = (used_in is not None) + bool(row.unused_because) + number
                if row.used_in != used_in or places != 1:
                    said = f"its record says {row.used_in}, {row.unused_because!r}"
                    what = f"{client_id}'s update is in the model of round {used_in}, waits for {number}; {said}"
                    raise Violation(1 if places else 2, what, f"round {round_id}")
                of_version[client_id, record.base_version] += not row.unused_because
        if waiting:
            raise Violation(2, f"{[*waiting]} wait for a commit, and no record has them")
        if self.rules.policy.is_asynchronous and (twice := [twin for twin, n in of_version.items() if n > 1]):
            raise Violation(1, f"two updates count for one client and version: {twice}")
        for update in held:
            self._validate_admission(update, records[update.round_id])

    def _validate_admission(self, update: Update, record: RoundRecord) -> None:
        policy, age = self.rules.policy, self.ledger.version - update.base_version
        is_allowed = WEIGHT_MIN <= update.num_examples <= policy.max_examples and WORK_MIN <= update.work <= 1
        is_allowed &= policy.partial_work != "refuse" or update.work == 1
        is_allowed &= update.base_version == record.base_version and 0 <= age <= policy.max_staleness
        if not is_allowed and self.ledger.rules is None:  # a resume may have changed the rules since
            raise Violation(3, f"its age is {age}, and it waits for a commit: {update}", f"round {record.round_id}")
        row, by = record.clients[update.client_id], record.deadline
        if row.fate is not Fate.REPORTED or by is None or policy.is_asynchronous or self.ledger.short_since is not None:
            return
        if row.sum is not None:  # the deadline was that of its keys; a stage of its session has another one
            return
        until = by if row.upload_begun_at is None or row.upload_begun_at > by else record.grace_by or by
        if row.fate_at > until:
            raise Violation(3, f"{update} came at {row.fate_at}, after {until}", f"round {record.round_id}")


def _how_late(record: RoundRecord, now: float) -> str:
    since = record.closed_at or record.ended_at or record.deadline or now
    return f"{now - since:.1f} s after round {record.round_id} had closed"
