"""The replayed machine of a run, fed with the entries of its journal, and the items that each entry yields. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from atoll.protocol.vocabulary import TERMINAL, RoundId, RunId
from atoll.server.exchanges import ledger as of_messages
from atoll.server.exchanges.events import RecordExchange
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.following.items import Began, Document, Happened, OpenRound, Standing
from atoll.server.rounds.events import Abandon, AmendRecord, Commit
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.waiting import what_a_run_waits_for
from atoll.server.views.exchange_sentences import exchange_document
from atoll.server.views.message_lines import lines_of
from atoll.server.views.narration import Narrator
from atoll.server.views.sentences import as_json

M = TypeVar("M", RunMachine, ExchangeMachine)
Effects = tuple[Any, ...]


class Follower(ABC, Generic[M]):
    """Copy of a run's machine that applies each entry exactly once and in order.

    Args:
        run_id: the run.
        machine: its machine after the entry `seq`.
        seq: the number of that entry; 0: before the first one.
    """

    def __init__(self, run_id: RunId, machine: M, seq: int) -> None:
        self.seq, self._run_id = seq, run_id
        self.machine: M = machine
        self._is_news = True  # an open record may differ from `_shown`
        self._shown: dict[int, Document] = {}

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended, unless a later entry reopens it."""
        return self.machine.ledger.state in TERMINAL

    def began(self) -> Began:
        """Return the item with which following begins."""
        return Began(self.seq, self.machine.ledger.now, self._standing())

    def receive(self, seq: int, at: float, event: Any) -> Happened:
        """Apply the next entry.

        Args:
            seq: its number, one more than the last entry's.
            at: its time [s since the epoch].
            event: its event.
        """
        assert seq == self.seq + 1, (seq, self.seq)
        before = self._standing()
        effects: Effects = self.machine.receive(event, at)
        self.seq, self._is_news = seq, True
        lines, ended, standing = self._lines(event, effects), tuple(self._ended(effects)), self._standing()
        return Happened(seq, at, event, lines, ended, None if standing == before else standing)

    def open_rounds(self) -> Iterator[OpenRound]:
        """Yield the record of each open round or exchange that has changed since the last call."""
        if not self._is_news:
            return
        before, self._shown, self._is_news = self._shown, dict(self._open()), False
        for number, found in self._shown.items():
            if found != before.get(number):
                yield OpenRound(self.seq, self.machine.ledger.now, found)

    @abstractmethod
    def _lines(self, event: Any, effects: Effects) -> tuple[str, ...]:
        """Return the log lines of an event and its effects."""

    @abstractmethod
    def _ended(self, effects: Effects) -> Iterator[Document]:
        """Yield the records that the effects write, each once, in their final form."""

    @abstractmethod
    def _open(self) -> Iterator[tuple[int, Document]]:
        """Yield the open records with their numbers."""

    @abstractmethod
    def _standing(self) -> Standing: ...


class RoundFollower(Follower[RunMachine]):
    """Follower of a run of rounds.

    Args:
        run_id: the run.
        rules: the rules with which it began.
        ledger: its state after the entry `seq`, which the machine modifies.
        seq: the number of that entry; 0: before the first one.
    """

    def __init__(self, run_id: RunId, rules: RunRules, ledger: Ledger, seq: int) -> None:
        super().__init__(run_id, RunMachine(rules, ledger), seq)
        self._narrator = Narrator()

    def _lines(self, event: Any, effects: Effects) -> tuple[str, ...]:
        return self._narrator.lines(self.machine, event, effects)

    def _ended(self, effects: Effects) -> Iterator[Document]:
        changed = dict.fromkeys(e.round_id for e in effects if isinstance(e, Commit | Abandon | AmendRecord))
        records = map(self.machine.record_of, changed)
        return (as_json(record) for record in records if record is not None)

    def _open(self) -> Iterator[tuple[int, Document]]:
        if self.machine.round is not None:
            yield self.machine.round.record.round_id, self._document(self.machine.round.record)

    def _document(self, record: RoundRecord) -> Document:
        """Return an open round as `atoll round show --json` does; its last sentence says what it waits for."""
        found = as_json(record)
        if wait := what_a_run_waits_for(self.machine):
            found["sentences"].append(f"{wait[0].upper()}{wait[1:]}.")
        return found

    def _standing(self) -> Standing:
        ledger, round_ = self.machine.ledger, self.machine.round
        newest = round_.record.round_id if round_ is not None else None
        rounds, following = self.machine.rules.rounds, ledger.next_round
        return Standing(self._run_id, ledger.state, ledger.cause, ledger.version, rounds, following, newest)


class ExchangeFollower(Follower[ExchangeMachine]):
    """Follower of a run of messages, with exchanges instead of rounds; arguments as in `RoundFollower`."""

    def __init__(self, run_id: RunId, rules: ExchangeRules, ledger: of_messages.Ledger, seq: int) -> None:
        super().__init__(run_id, ExchangeMachine(rules, ledger), seq)

    def _lines(self, event: Any, effects: Effects) -> tuple[str, ...]:
        return tuple(lines_of(self.machine, event, effects))

    def _ended(self, effects: Effects) -> Iterator[Document]:
        changed = dict.fromkeys(effect.exchange for effect in effects if isinstance(effect, RecordExchange))
        exchanges = map(self.machine.exchange, changed)
        return (exchange_document(one) for one in exchanges if one is not None and not one.is_open)

    def _open(self) -> Iterator[tuple[int, Document]]:
        return ((number, exchange_document(exchange)) for number, exchange in self.machine.ledger.open.items())

    def _standing(self) -> Standing:
        ledger, number = self.machine.ledger, self.machine.ledger.num_exchanges
        newest, following = RoundId(max(ledger.open)) if ledger.open else None, RoundId(number + 1)
        return Standing(
            self._run_id, ledger.state, ledger.cause, ledger.version, 0, following, newest, exchanges=number
        )
