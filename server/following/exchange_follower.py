"""The machine of a run of messages, fed with the entries of its journal, and the items that each entry gives. Pure."""

from collections.abc import Iterator

from atoll.protocol.vocabulary import TERMINAL, RoundId, RunId
from atoll.server.exchanges.events import Event, RecordExchange
from atoll.server.exchanges.ledger import Ledger
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.following.items import Began, Document, Happened, OpenRound, Standing
from atoll.server.views.exchange_sentences import exchange_document
from atoll.server.views.message_lines import lines_of


class ExchangeFollower:
    """A copy of the machine of a run of messages; as `Follower`, with exchanges in the place of rounds.

    Args:
        run_id: the run.
        rules: the rules of its exchanges.
        ledger: its state after the entry `seq`; the machine takes it and changes it.
        seq: the number of that entry; 0: before the first one.
    """

    def __init__(self, run_id: RunId, rules: ExchangeRules, ledger: Ledger, seq: int) -> None:
        self.seq, self.machine, self._run_id = seq, ExchangeMachine(rules, ledger), run_id
        self._shown: dict[int, Document] = {}

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended, unless a later entry reopens it."""
        return self.machine.ledger.state in TERMINAL

    def began(self) -> Began:
        """Return the item with which the following begins."""
        return Began(self.seq, self.machine.ledger.now, self._standing())

    def receive(self, seq: int, at: float, event: Event) -> Happened:
        """Apply the next entry: its number is one more than that of the last one."""
        assert seq == self.seq + 1, (seq, self.seq)
        before = self._standing()
        effects = self.machine.receive(event, at)
        self.seq = seq
        lines = tuple(lines_of(self.machine, event, effects))
        numbers = dict.fromkeys(effect.exchange for effect in effects if isinstance(effect, RecordExchange))
        changed = (self.machine.exchange(number) for number in numbers)
        closed = tuple(exchange_document(one) for one in changed if one is not None and not one.is_open)
        standing = self._standing()
        return Happened(seq, at, event, lines, closed, None if standing == before else standing)

    def open_rounds(self) -> Iterator[OpenRound]:
        """Yield the open exchanges that have changed since the last call."""
        ledger, before = self.machine.ledger, self._shown
        self._shown = {number: exchange_document(exchange) for number, exchange in ledger.open.items()}
        for number, found in self._shown.items():
            if found != before.get(number):
                yield OpenRound(self.seq, ledger.now, found)

    def _standing(self) -> Standing:
        ledger = self.machine.ledger
        number = ledger.num_exchanges
        newest = RoundId(max(ledger.open)) if ledger.open else None
        return Standing(
            self._run_id, ledger.state, ledger.cause, ledger.version, 0, RoundId(number + 1), newest, exchanges=number
        )
