"""What a run remembers between two rounds: a snapshot holds exactly this. Pure.

The ledger also does the book-keeping of invariant 1: every accepted update is used in one committed model, or the
record of its round says why not.
"""

from dataclasses import dataclass, field

from atoll.protocol.vocabulary import ClientId, Digest, Phase, RoundId, RunState, Version
from atoll.server.evaluation import ClientEvaluation
from atoll.server.events import AmendRecord, Commit, Effect, Update
from atoll.server.membership import Membership
from atoll.server.record import RoundRecord


@dataclass(slots=True)
class Ledger:
    """The state of a run while no round is open."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    now: float = 0.0
    version: Version = Version(0)  # noqa: RUF009 - a NewType of an int
    model_digest: Digest = Digest("")  # noqa: RUF009
    next_round: RoundId = RoundId(1)  # noqa: RUF009
    failures: int = 0  # rounds abandoned in a row
    stop_reason: str | None = None  # the operator's, while a round still aggregates
    is_round_due: bool = False  # OpenNextRound was given out and not yet answered
    membership: Membership = field(default_factory=Membership)
    carried: dict[ClientId, Update] = field(default_factory=dict)  # accepted late, waiting for a commit
    past: dict[RoundId, RoundRecord] = field(default_factory=dict)  # the last few rounds
    evaluation: ClientEvaluation | None = None
    unevaluated: list[Version] = field(default_factory=list)  # EvaluateModel was given out and not yet answered

    def keep(self, record: RoundRecord, *, most: int) -> None:
        """Put the record of a round that ended with those of the last `most` rounds, and of any that still matters."""
        self.past[record.round_id] = record
        still_open = {update.round_id for update in self.carried.values()}
        for old in sorted(self.past)[:-most]:
            if old not in still_open:
                del self.past[old]

    def carry(self, update: Update) -> list[Effect]:
        """Put an accepted update aside for the next commit. Of two by one client the one of the later round stays."""
        older = self.carried.get(update.client_id)
        if older is not None and older.round_id > update.round_id:
            return self.leave_unused(update, f"superseded by the update of round {older.round_id}")
        self.carried[update.client_id] = update
        if older is None:
            return []
        return self.leave_unused(older, f"superseded by the update of round {update.round_id}")

    def leave_unused(self, update: Update, why: str) -> list[Effect]:
        """No model will hold this accepted update: the record of its round says why."""
        record = self.past.get(update.round_id)
        if record is None:
            return []
        record.clients[update.client_id].unused_because = why
        return [AmendRecord(update.round_id)]

    def settle_carried(self, record: RoundRecord, commit: Commit) -> list[Effect]:
        """A commit has used the carried updates, or found them superseded; those that came in since stay."""
        effects: list[Effect] = []
        for client_id, update in list(self.carried.items()):
            if update.digest in record.superseded:
                del self.carried[client_id]
                effects += self.leave_unused(update, f"superseded by the update of round {record.round_id}")
            elif update.digest in commit.used:
                del self.carried[client_id]
                if (origin := self.past.get(update.round_id)) is not None:
                    origin.clients[client_id].used_in = record.round_id
                    effects.append(AmendRecord(update.round_id))
        return effects

    def settle_abandoned(self, record: RoundRecord, reported: dict[ClientId, Update], *, carry: bool) -> list[Effect]:
        """The accepted updates of a round that ended without a model are carried over, or the record says why not."""
        assert record.phase is Phase.ABANDONED
        effects: list[Effect] = []
        for client_id, update in sorted(reported.items()):
            if carry:
                effects += self.carry(update)
            else:
                record.clients[client_id].unused_because = f"the round was abandoned: {record.abandon_reason}"
        return effects

    def settle_end(self, state: RunState) -> list[Effect]:
        """The run is over: what still waited for a commit will not be used."""
        effects: list[Effect] = []
        for _, update in sorted(self.carried.items()):
            effects += self.leave_unused(update, f"the run ended first ({state})")
        self.carried.clear()
        return effects
