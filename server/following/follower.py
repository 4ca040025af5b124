"""The machine of a run, fed with the entries of its journal, and the items that each entry gives. Pure."""

from collections.abc import Iterator

from atoll.protocol.vocabulary import TERMINAL, RoundId, RunId
from atoll.server.following.items import Began, Document, Happened, OpenRound, Standing
from atoll.server.rounds.events import Abandon, AmendRecord, Commit, Effect, Event
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.waiting import what_a_run_waits_for
from atoll.server.views.narration import Narrator
from atoll.server.views.sentences import as_json


class Follower:
    """A copy of a run's machine, which applies each entry exactly once and in order.

    Args:
        run_id: the run.
        rules: the rules with which it began.
        ledger: its state after the entry `seq`; the machine takes it and changes it.
        seq: the number of that entry; 0: before the first one.
    """

    def __init__(self, run_id: RunId, rules: RunRules, ledger: Ledger, seq: int) -> None:
        self.seq = seq
        self.machine = RunMachine(rules, ledger)
        self._run_id, self._narrator = run_id, Narrator()
        self._is_news = True  # the open round may differ from `_shown`
        self._shown: Document | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended, unless a later entry reopens it."""
        return self.machine.ledger.state in TERMINAL

    def began(self) -> Began:
        """Return the item with which the following begins."""
        return Began(self.seq, self.machine.ledger.now, self._standing())

    def receive(self, seq: int, at: float, event: Event) -> Happened:
        """Apply the next entry.

        Args:
            seq: its number, one more than that of the last one.
            at: its time [s since the epoch].
            event: its event.
        """
        assert seq == self.seq + 1, (seq, self.seq)
        before = self._standing()
        effects = self.machine.receive(event, at)
        self.seq, self._is_news = seq, True
        lines = self._narrator.lines(self.machine, event, effects)
        standing = self._standing()
        return Happened(seq, at, event, lines, self._ended(effects), None if standing == before else standing)

    def open_rounds(self) -> Iterator[OpenRound]:
        """Yield the record of the open round, if it has changed since the last call."""
        if self.machine.round is None or not self._is_news:
            return
        self._is_news = False
        found = self._document(self.machine.round.record)
        if found != self._shown:
            self._shown = found
            yield OpenRound(self.seq, self.machine.ledger.now, found)

    def _ended(self, effects: tuple[Effect, ...]) -> tuple[Document, ...]:
        """Return the records that the effects write, each once, in their last form."""
        changed: dict[RoundId, RoundRecord | None] = {
            effect.round_id: self.machine.record_of(effect.round_id)
            for effect in effects
            if isinstance(effect, Commit | Abandon | AmendRecord)
        }
        return tuple(as_json(record) for record in changed.values() if record is not None)

    def _document(self, record: RoundRecord) -> Document:
        """Return an open round as `atoll round show --json` does, the last sentence being the wait."""
        found = as_json(record)
        if wait := what_a_run_waits_for(self.machine):
            found["sentences"].append(f"{wait[0].upper()}{wait[1:]}.")
        return found

    def _standing(self) -> Standing:
        ledger, round_ = self.machine.ledger, self.machine.round
        return Standing(
            self._run_id,
            ledger.state,
            ledger.cause,
            ledger.version,
            self.machine.rules.rounds,
            ledger.next_round,
            round_.record.round_id if round_ is not None else None,
        )
