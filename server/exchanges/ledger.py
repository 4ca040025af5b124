"""The state of a run of messages, as in a snapshot: it grows with exchanges and calls, not with messages. Pure.

An open exchange is here with all of its messages. For a closed one, a repetition of the program needs the digests of
the sent messages and the numbers of the replies; the exchange's record has the rest.
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from heapq import nlargest

from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, RoundId, RunState, Version
from atoll.server.exchanges.events import ExchangeAsked
from atoll.server.exchanges.exchange import Exchange, Sent, Settled
from atoll.server.exchanges.nodes import Nodes
from atoll.server.exchanges.repetition import Look, Pull, Repetition
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.invariants import Violation


@dataclass(slots=True)
class Ledger:
    """State of a run of messages."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    has_begun: bool = False
    now: float = 0.0
    membership: Nodes = field(default_factory=Nodes)
    firsts: list[RoundId] = field(default_factory=list)
    """The number of the first message of each exchange."""
    num_messages: int = 0
    open: dict[int, Exchange] = field(default_factory=dict)
    """The open exchanges, by number."""
    settled: dict[int, Settled] = field(default_factory=dict)
    """The closed exchanges, except those cut off by the end of the run: these are sent again."""
    unpulled: set[RoundId] = field(default_factory=set)
    """Pushed messages whose replies were not pulled."""
    rosters: list[tuple[ClientId, ...]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    process: Repetition = field(default_factory=Repetition)
    has_process: bool = False
    """Whether a process of the program runs, or is being started; False in a paused run whose coordinator was
    restarted."""
    deaths: int = 0
    """Deaths of the program's process since the newest exchange."""
    pause_reason: str | None = None
    """The operator's reason for a pause, while an exchange is still open."""
    awaited: set[ClientId] = field(default_factory=set)
    """Nodes that have not reconnected since the last restart of the coordinator, while it waits for them."""
    awaited_since: float = 0.0
    awaited_until: float = 0.0
    version: Version = Version(0)  # noqa: RUF009 - a run of messages has none but this
    model_digest: Digest = Digest("")  # noqa: RUF009
    early_stop: str = ""

    @property
    def is_open(self) -> bool:
        """Return whether the run has begun and not ended."""
        return self.has_begun and self.state not in TERMINAL

    @property
    def is_pausing(self) -> bool:
        """Return whether no new exchange may open."""
        return self.state is not RunState.RUNNING or self.pause_reason is not None

    @property
    def num_exchanges(self) -> int:
        """The number of exchanges so far."""
        return len(self.firsts)

    @property
    def num_rows(self) -> int:
        """Number of a snapshot's values that grow with the run."""
        return len(self.firsts) + len(self.looks) + len(self.pulls) + self.num_messages // 100

    def exchange_of(self, number: RoundId) -> int:
        """Return the number of the exchange of a message; 0: there is none."""
        return bisect_right(self.firsts, number) if number <= self.num_messages else 0

    def place(self, number: RoundId) -> int:
        """Return the position of a message in the call that sent it, from 0."""
        return number - self.firsts[self.exchange_of(number) - 1]

    def sent(self, number: RoundId) -> Sent | None:
        """Return a message of an open exchange by its number; None: no open exchange has it."""
        exchange = self.open.get(self.exchange_of(number))
        return None if exchange is None else exchange.sent[number - exchange.sent[0].number]

    def opened(self, asked: ExchangeAsked, rules: ExchangeRules) -> Exchange:
        """Open the exchange of a call, and return it."""
        first, number = RoundId(self.num_messages + 1), self.num_exchanges + 1
        exchange = self.open[number] = Exchange.opened(number, first, asked, rules, self.now)
        self.firsts.append(first)
        self.num_messages += len(exchange.sent)
        return exchange

    def add_look(self, num_exchanges: int, nodes: tuple[ClientId, ...], left_out: int = 0) -> None:
        """Record the answer to a request for the list of nodes, which usually equals the last answer.

        Args:
            num_exchanges: number of exchanges that the process had requested before.
            nodes: the answer.
            left_out: number of preceding calls that repeated the last answer.
        """
        if self.looks and self.looks[-1].num_exchanges == num_exchanges:
            self.looks[-1].times += left_out
        if not self.rosters or self.rosters[-1] != nodes:
            self.rosters.append(nodes)
        self.looks.append(Look(num_exchanges, len(self.rosters) - 1))

    def forget_after(self, exchange: Exchange) -> None:
        """Forget all events after an exchange that the end of the run cuts off, if its replies could be pulled.

        The program sends the exchange again, with new message numbers and replies. So later pulls differ, and later
        exchanges may differ: such a difference must not count as a changed program.
        """
        if exchange.call.is_waiting:
            return
        first = exchange.sent[0].number
        kept = next((place for place, pull in enumerate(self.pulls) if pull.newest >= first), len(self.pulls))
        for pull in self.pulls[kept:]:
            self.unpulled.update(pull.got)
        del self.pulls[kept:]
        self.unpulled = {number for number in self.unpulled if number < first}
        self.settled = {number: settled for number, settled in self.settled.items() if number < exchange.number}

    def first_kept(self, keep_replies: int) -> int:
        """Return the first exchange whose replies a program may request again.

        It counts the closed exchanges before the first open one, because a stop may cut off that one and all later
        ones.

        Args:
            keep_replies: number of the newest exchanges whose replies are kept; 0: all.
        """
        open_from = min(self.open, default=self.num_exchanges + 1)
        newest = nlargest(keep_replies, (number for number in self.settled if number < open_from))
        return newest[-1] if keep_replies and len(newest) == keep_replies else 1

    @property
    def pausing(self) -> str:
        """What a requested pause still waits for; empty: the run is paused, or no pause was requested."""
        if self.pause_reason is None or not self.open:
            return ""
        listed = ", ".join(map(str, [*self.open][:5]))
        return f"it pauses when exchange {listed} is over"

    def validate(self) -> None:
        """Check that each exchange is open or closed, and each reply pulled once; raises Violation."""
        exchanges: dict[int, Exchange | Settled] = {**self.settled, **self.open}
        if both := self.settled.keys() & self.open.keys():
            raise Violation(4, f"exchanges {sorted(both)} are closed and open")
        if self.open and (self.state in TERMINAL or self.state is RunState.PAUSED):
            raise Violation(4, f"exchanges {[*self.open]} are open although the run is {self.state}")
        for number, exchange in exchanges.items():
            after = self.firsts[number] if number < self.num_exchanges else self.num_messages + 1
            if exchange.numbers != tuple(range(self.firsts[number - 1], after)):
                raise Violation(1, f"its messages are {exchange.numbers}", f"exchange {number}")
        for exchange in self.open.values():
            exchange.validate()
        got = Counter(number for pull in self.pulls for number in pull.got)
        if twice := [number for number, times in got.items() if times > 1 or number in self.unpulled]:
            raise Violation(1, f"the replies of messages {twice} are pulled, and can be pulled again")
