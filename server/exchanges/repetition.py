"""The repetition of a server program by a new process: its calls get the answers that they got before. Pure.

A program that is killed begins again at its first line. As long as each call is the one that the journal has in its
place, it returns what it returned then, at once; after the last one the program goes on. A call from the main thread
has one certain place. Calls from threads of the program may come in another order than before, so each takes the first
exchange that sent the same; one that fits none is held until all exchanges of before are asked for again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.exchanges.events import ExchangeAsked
from atoll.server.exchanges.exchange import Exchange, difference, first_equal


@dataclass(slots=True)
class Look:
    """An answer to a call for the nodes, with the number of exchanges that the process had asked for before."""

    num_exchanges: int
    nodes: tuple[ClientId, ...]


@dataclass(slots=True)
class Pull:
    """A call for replies that were pushed, and those that it got."""

    asked: tuple[RoundId, ...]
    got: tuple[RoundId, ...]


@dataclass(slots=True)
class Held:
    """A call of a thread that fits no exchange of before."""

    asked: ExchangeAsked
    until: float


class Diverged(Exception):
    """The program is another one than before; the message says where."""


@dataclass(slots=True)
class Repetition:
    """The calls of the present process of the program, beside all that are in the journal."""

    left: dict[int, Exchange] = field(default_factory=dict)
    """The exchanges of before that it has not asked for, by number, in order."""
    claimed: dict[int, int] = field(default_factory=dict)
    """The call that has asked for an exchange, by the exchange."""
    held: list[Held] = field(default_factory=list)
    num_looks: int = 0
    num_pulls: int = 0

    @classmethod
    def of(cls, exchanges: Mapping[int, Exchange]) -> Self:
        """Return the state of a process that has made no call."""
        return cls({number: exchange for number, exchange in exchanges.items() if not exchange.is_void})

    def claim(self, asked: ExchangeAsked) -> Exchange | None:
        """Return the exchange of before that a call repeats; None: there is none yet.

        Raises:
            Diverged: the call is none of those that can come now.
        """
        if not asked.in_order:
            found = first_equal((exchange for exchange in self.left.values() if not exchange.in_order), asked)
        else:
            found = next((exchange for exchange in self.left.values() if exchange.in_order), None)
            if found is not None and (differs := difference(found, asked)):
                raise Diverged(f"exchange {found.number}: {differs}")
        if found is not None:
            del self.left[found.number]
            self.claimed[found.number] = asked.call
        return found

    def look(self, looks: list[Look]) -> tuple[ClientId, ...] | None:
        """Return the answer of before to the next call for the nodes; None: there is none.

        A look from before an exchange that was asked for again is passed over; the last look before the next exchange
        answers any further calls.
        """
        here = len(self.claimed)
        while self.num_looks < len(looks) and looks[self.num_looks].num_exchanges < here:
            self.num_looks += 1
        if self.num_looks < len(looks) and looks[self.num_looks].num_exchanges == here:
            self.num_looks += 1
            return looks[self.num_looks - 1].nodes
        if self.left and self.num_looks:
            return looks[self.num_looks - 1].nodes
        return None

    def pull(self, pulls: list[Pull], numbers: tuple[RoundId, ...]) -> tuple[RoundId, ...] | None:
        """Return the answer of before to the next call for replies; None: there is none.

        Raises:
            Diverged: the call is for other replies.
        """
        if self.num_pulls >= len(pulls):
            return None
        before = pulls[self.num_pulls]
        if before.asked != numbers:
            raise Diverged(
                f"pull {self.num_pulls + 1}: it asked for messages {_listed(before.asked)} before, now "
                f"{_listed(numbers)}"
            )
        self.num_pulls += 1
        return before.got


def _listed(numbers: tuple[RoundId, ...]) -> str:
    more = ", ..." if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more if numbers else "none"
