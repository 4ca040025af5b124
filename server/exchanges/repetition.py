"""The repetition of a server program by a new process: its calls get the answers that they got before. Pure.

A program that is killed begins again at its first line. As long as each call is the one that the journal has in its
place, it returns what it returned then, at once; after the last one the program continues. A call from the main thread
has one certain place. Calls from threads of the program may come in another order than before, so each takes the first
exchange that sent the same; one that fits none is held until all exchanges of before are asked for again. A call for
replies that got none is not in the journal, so one that is not the next there gets none again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import RoundId
from atoll.server.exchanges.call import Call, difference
from atoll.server.exchanges.events import ExchangeAsked


@dataclass(slots=True)
class Look:
    """An answer to a call for the nodes, with the number of exchanges that the process had asked for before."""

    num_exchanges: int
    roster: int
    """The place of the nodes in `Ledger.rosters`."""
    times: int = 1
    """The calls in a row that got it, known once another answer follows at the same place."""


@dataclass(slots=True)
class Pull:
    """A call for replies that were pushed, and those that it got."""

    asked: str
    """The SHA-256 of the numbers that it asked for, sorted."""
    newest: RoundId
    """The largest of them."""
    got: tuple[RoundId, ...]
    num_exchanges: int = 0
    """The exchanges that the process had asked for before."""

    @classmethod
    def of(cls, asked: tuple[RoundId, ...], got: tuple[RoundId, ...], num_exchanges: int) -> "Pull":
        """Return a call for these replies."""
        return cls(_digest(asked), max(asked), got, num_exchanges)


@dataclass(slots=True)
class Held:
    """A call of a thread that fits no exchange of before."""

    asked: ExchangeAsked
    until: float


class Diverged(Exception):
    """The program is another one than before; the message says where."""


class Forgotten(Exception):
    """The replies of an exchange are no longer kept; the message says which."""


@dataclass(slots=True)
class Repetition:
    """The calls of the present process of the program, beside all that are in the journal."""

    left: list[int] = field(default_factory=list)
    """The exchanges of before that it has not asked for, in order."""
    waiting: dict[int, int] = field(default_factory=dict)
    """The call that waits for an open exchange, by the exchange."""
    num_claimed: int = 0
    """The exchanges that it has asked for."""
    held: list[Held] = field(default_factory=list)
    paused: list[ExchangeAsked] = field(default_factory=list)
    """The new calls that wait for the end of a pause."""
    num_looks: int = 0
    num_times: int = 0
    """The calls that got the last of these looks."""
    num_pulls: int = 0
    pull_by: float | None = None
    """The time by which it must have asked for the next replies of before [s since the epoch]; None: it has asked for
    no others meanwhile."""

    def claim(self, asked: ExchangeAsked, call_of: Callable[[int], Call]) -> int | None:
        """Return the exchange of before that a call repeats; None: there is none yet.

        Raises:
            Diverged: the call is none of those that can come now.
        """
        of_its_kind = (number for number in self.left if call_of(number).in_order == asked.in_order)
        if not asked.in_order:
            now = Call.of(asked)
            found = next((number for number in of_its_kind if call_of(number).sends_as(now)), None)
        else:
            found = next(of_its_kind, None)
            if found is not None and (differs := difference(call_of(found), asked)):
                raise Diverged(f"exchange {found}: {differs}")
        if found is not None:
            self.left.remove(found)
            self.num_claimed += 1
        return found

    def look(self, looks: Sequence[Look]) -> int | None:
        """Return the roster of before that answers the next call for the nodes; None: there is none.

        A look from before an exchange that was asked for again is passed over; one answers as many calls as it did, and
        the last before the next exchange any further ones.
        """
        here = self.num_claimed
        while self.num_looks < len(looks) and looks[self.num_looks].num_exchanges < here:
            self.num_looks += 1
        if self.num_looks and looks[self.num_looks - 1].num_exchanges == here:
            last = looks[self.num_looks - 1]
            if self.num_times < last.times:
                self.num_times += 1
                return last.roster
        if self.num_looks < len(looks) and looks[self.num_looks].num_exchanges == here:
            self.num_looks, self.num_times = self.num_looks + 1, 1
            return looks[self.num_looks - 1].roster
        if self.left and self.num_looks:
            return looks[self.num_looks - 1].roster
        return None

    def is_next(self, pulls: Sequence[Pull], numbers: tuple[RoundId, ...]) -> bool:
        """Return whether a call for replies is the next one of before, among the same exchanges."""
        if self.num_pulls >= len(pulls):
            return False
        before = pulls[self.num_pulls]
        return before.num_exchanges <= self.num_claimed and before.asked == _digest(numbers)

    def pull(self, pulls: Sequence[Pull], numbers: tuple[RoundId, ...], until: float) -> tuple[RoundId, ...] | None:
        """Return the answer of before to a call for replies; None: all answers of before are given.

        Args:
            pulls: those of before that got replies.
            numbers: the messages whose replies are asked for.
            until: the time by which the next of those must come, where this one is another [s since the epoch].
        """
        if self.num_pulls >= len(pulls):
            return None
        if not self.is_next(pulls, numbers):
            self.pull_by = until if self.pull_by is None else self.pull_by
            return ()
        self.num_pulls, self.pull_by = self.num_pulls + 1, None
        return pulls[self.num_pulls - 1].got


def _digest(numbers: tuple[RoundId, ...]) -> str:
    return hashlib.sha256(repr(tuple(sorted(numbers))).encode()).hexdigest()
