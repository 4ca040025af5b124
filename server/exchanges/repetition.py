"""The repetition of a server program by a new process: its calls get the same answers as before. Pure.

A killed program restarts at its first line. As long as each call equals the one that the journal has at its position,
it immediately returns the earlier result; after the last one the program continues. A call from the main thread has a
fixed position. Calls from other threads may come in a different order, so each takes the first exchange that sent the
same messages; a call that fits none is held until all earlier exchanges have been requested again. A pull that got no
replies is not in the journal, so a pull that is not the next one there gets none again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import RoundId
from atoll.server.exchanges.call import Call, difference
from atoll.server.exchanges.events import ExchangeAsked


@dataclass(slots=True)
class Look:
    """Answer to a request for the nodes, with the number of exchanges that the process had requested before."""

    num_exchanges: int
    roster: int
    """Index of the nodes in `Ledger.rosters`."""
    times: int = 1
    """Number of consecutive calls that got this answer, known once another answer follows at the same position."""


@dataclass(slots=True)
class Pull:
    """Request for pushed replies, and the replies that it got."""

    asked: str
    """SHA-256 of the sorted message numbers that the call asked for."""
    newest: RoundId
    """The largest message number that the call asked for."""
    got: tuple[RoundId, ...]
    num_exchanges: int = 0
    """Number of exchanges that the process had requested before."""

    @classmethod
    def of(cls, asked: tuple[RoundId, ...], got: tuple[RoundId, ...], num_exchanges: int) -> "Pull":
        """Return the record of a request for these messages' replies that got these replies."""
        return cls(_digest(asked), max(asked), got, num_exchanges)


@dataclass(slots=True)
class Held:
    """Request from a thread that fits no earlier exchange."""

    asked: ExchangeAsked
    until: float


class Diverged(Exception):
    """Error: the program differs from before; the message says where."""


class Forgotten(Exception):
    """Error: the replies of an exchange are no longer kept; the message says which."""


@dataclass(slots=True)
class Repetition:
    """State of the current program process's calls, as far as the journal does not have it."""

    left: list[int] = field(default_factory=list)
    """Earlier exchanges that the process has not requested, in order."""
    waiting: dict[int, int] = field(default_factory=dict)
    """The call that waits for an open exchange, by the exchange."""
    num_claimed: int = 0
    """Number of exchanges that the process has requested."""
    held: list[Held] = field(default_factory=list)
    paused: list[ExchangeAsked] = field(default_factory=list)
    """The new calls that wait for the end of a pause."""
    num_looks: int = 0
    num_times: int = 0
    """Number of calls that got the last answer about the nodes."""
    num_pulls: int = 0
    pull_by: float | None = None
    """Time by which it must have requested the next earlier replies [s since the epoch]; None: it has requested no
    others meanwhile."""

    def claim(self, asked: ExchangeAsked, call_of: Callable[[int], Call]) -> int | None:
        """Return the earlier exchange that a call repeats, or None.

        Raises:
            Diverged: the call cannot come at this position.
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
        """Return the earlier list of nodes that answers the next request for the nodes, or None.

        Answers from before an already repeated exchange are skipped; each answers as many calls as it did, and the last
        one before the next exchange also answers further calls.
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
        """Return whether a call for replies is the next earlier one, among the same exchanges."""
        if self.num_pulls >= len(pulls):
            return False
        before = pulls[self.num_pulls]
        return before.num_exchanges <= self.num_claimed and before.asked == _digest(numbers)

    def pull(self, pulls: Sequence[Pull], numbers: tuple[RoundId, ...], until: float) -> tuple[RoundId, ...] | None:
        """Return the earlier answer to a request for replies; None: all earlier answers are given.

        Args:
            pulls: earlier pulls that got replies.
            numbers: the messages whose replies are requested.
            until: if this pull differs from the next earlier one, the time by which that must come [s since the epoch].
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
