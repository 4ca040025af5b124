"""What becomes of an update, whenever it arrives. Pure.

In time for its round, late, or (of an asynchronous run) for whichever buffer is open: accepted exactly once, or refused
with a reason that stands in the record. Half of the run's machine; `run` is the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.vocabulary import Fate, Phase, RejectReason, RoundId, Version
from atoll.server.rounds.async_invitations import Invitations
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import Accept, AmendRecord, Effect, Reject, Update
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.open_round import Effects, OpenRound
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.rounds.update_claims import fault_of, learn, measure, note_accepted, reject


@dataclass(frozen=True, slots=True)
class RunRules:
    """What a run does besides its straggler policy."""

    policy: StragglerPolicy
    rounds: int  # commits wanted
    seed: int = 0
    evaluate_server_every: int = 0  # versions; 0: never; the last version always is when this is not 0
    evaluate_clients_every: int = 0
    evaluate_clients_max: int = 0  # 0: everyone who is connected
    evaluation_deadline: float = 60.0  # seconds for the clients' answers
    pacer_window: int = 0  # commits; 0: nobody asks for the pacer


class Intake:
    """The records that are remembered, and the decision about each update that names one of them."""

    def __init__(self, rules: RunRules, ledger: Ledger | None = None) -> None:
        self.rules = rules
        self.ledger = ledger or Ledger()
        self.round: OpenRound | None = None
        self.invitations = Invitations(rules.policy, self.ledger, self)

    def record_of(self, round_id: RoundId) -> RoundRecord | None:
        """The record of the open round or of one of the last few."""
        if self.round is not None and self.round.record.round_id == round_id:
            return self.round.record
        return self.ledger.past.get(round_id)

    def newest_first(self) -> Iterator[RoundRecord]:
        """The records of the open round and of the last few, back to the oldest."""
        if self.round is not None:
            yield self.round.record
        yield from (self.ledger.past[round_id] for round_id in sorted(self.ledger.past, reverse=True))

    def _open(self, round_id: RoundId) -> OpenRound | None:
        return self.round if self.round is not None and self.round.record.round_id == round_id else None

    def refusal(self, update: Update) -> tuple[RejectReason, str] | None:
        """Why an update can be refused without its bytes, and without anything to write down; None otherwise."""
        if self.is_accepted(update):
            return None
        record = self.record_of(update.round_id)
        return self._fault_before_the_round(update, record, record.clients.get(update.client_id) if record else None)

    def is_accepted(self, update: Update) -> bool:
        """Whether this very update was accepted before, so that only its answer was lost."""
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        return client is not None and client.digest == update.digest

    def is_hopeless(self, update: Update) -> bool:
        """Whether what the update claims of itself will be refused, so that its bytes need not come."""
        record = self.record_of(update.round_id)
        policy = self.rules.policy
        if record is None or fault_of(update, base_version=record.base_version, policy=policy) is not None:
            return True
        return policy.is_asynchronous and self._fault_for_a_buffer(update) is not None

    # ------------------------------------------------------------ decisions

    def _update_received(self, update: Update, now: float) -> Effects:
        record = self.record_of(update.round_id)
        client = record.clients.get(update.client_id) if record else None
        if record is not None and client is not None and client.digest == update.digest:
            return (Accept(update.client_id, update.round_id, update.digest, client.fate is Fate.CARRIED),)
        if fault := self._fault_before_the_round(update, record, client):
            return (Reject(update.client_id, update.round_id, update.digest, *fault),)
        assert record is not None
        assert client is not None
        if self.rules.policy.is_asynchronous:
            return self._into_a_buffer(update, record, client, now)
        round_ = self._open(update.round_id)
        if isinstance(round_, Round) and round_.is_open_for(update):
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
        if client.digest is not None:
            return RejectReason.ALREADY_REPORTED, f"another update of yours was accepted in round {round_id}"
        if client.fate is Fate.REFUSED:
            return RejectReason.ALREADY_REPORTED, f"your update of round {round_id} was refused: {client.reason}"
        if client.fate is Fate.LATE:
            return RejectReason(client.reason), client.detail
        return None

    def _late(self, update: Update, record: RoundRecord, client: ClientRecord, now: float) -> Effects:
        """The round no longer takes it: refuse, or carry it into the next round that commits (DESIGN section 4)."""
        ledger, policy = self.ledger, self.rules.policy
        open_round = self._takes_late(update.round_id)
        next_base = ledger.version + (self.round is not None and open_round is None)  # of the commit it can count in
        if policy.late == "discard":
            return self._refuse_late(update, record, RejectReason.TOO_LATE, _how_late(record, now), now)
        if next_base >= self.rules.rounds or ledger.stop_reason is not None:
            return self._refuse_late(update, record, RejectReason.TOO_LATE, "no round follows", now)
        if fault := fault_of(update, base_version=record.base_version, policy=policy):
            return self._refuse_late(update, record, *fault, now)
        if next_base - update.base_version > policy.max_staleness:
            detail = f"{next_base - update.base_version} versions old, max_staleness is {policy.max_staleness}"
            return self._refuse_late(update, record, RejectReason.TOO_STALE, detail, now)
        effects: list[Effect] = [Accept(update.client_id, update.round_id, update.digest, carried=True)]
        note_accepted(client, update)
        learn(ledger.membership, update)
        effects += self._change_fate(update, record, Fate.CARRIED, "", _how_late(record, now), now)
        effects += ledger.carry(update, into=None if open_round is None else open_round.late)
        return tuple(effects)

    def _takes_late(self, round_id: RoundId) -> Round | None:
        """The open round, if a late update of round `round_id` still counts in it."""
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
        if client.fate is Fate.WAITING:  # its round is in the grace period for others
            assert self.round is not None
            return self.round.client_gave_up(update.client_id, fate, reason, detail, now)
        client.fate, client.fate_at, client.reason, client.detail = fate, now, reason, detail
        return (AmendRecord(record.round_id),) if self._open(record.round_id) is None else ()

    # ------------------------------------------------------------ of an asynchronous run

    def _into_a_buffer(self, update: Update, record: RoundRecord, client: ClientRecord, now: float) -> Effects:
        """It counts in the buffer that is open, or in one that follows, whichever round it was trained for."""
        if fault := fault_of(update, base_version=record.base_version, policy=self.rules.policy):
            return (reject(update, *fault), *self.invitations.answered(update, Fate.REFUSED, now, *fault))
        if fault := self._fault_for_a_buffer(update):
            return (reject(update, *fault), *self.invitations.answered(update, Fate.LATE, now, *fault))
        measure(self.ledger.membership, client, update, now)
        learn(self.ledger.membership, update)
        note_accepted(client, update)
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
            return RejectReason.TOO_STALE, f"{staleness} versions old, max_staleness is {policy.max_staleness}"
        if self.invitations.has_counted(update.client_id, update.base_version):
            return RejectReason.ALREADY_REPORTED, f"another update of yours counts for version {update.base_version}"
        return None

    def _base_of_its_commit(self) -> Version:
        """The version that an update that comes now is added to: those that wait before it may fill buffers first."""
        ledger = self.ledger
        if isinstance(self.round, Buffer) and self.round.is_open:
            return ledger.version
        full = len(ledger.waiting) // self.rules.policy.num_wanted
        return Version(ledger.version + (self.round is not None) + full)


def _how_late(record: RoundRecord, now: float) -> str:
    since = record.closed_at or record.ended_at or record.deadline or now
    return f"{now - since:.1f} s after round {record.round_id} had closed"
