"""The members of a run on disk: pages of those that have changed, so that a snapshot costs what has happened. Pure.

A snapshot holds the ledger without its members. Of them it says how many there are, and from which entry on their
pages are to be read: a whole set, and after it, with each later snapshot, those that were changed meanwhile, the newer
over the older. When what was written since the last whole set is as much as the set, the next one is whole again; then
everything before it can go. So what is written for a member is at most twice what has changed of it, and what lies on
disk is at most twice the members, however many rounds there were (and what the last two snapshots do not share).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from atoll.protocol.vocabulary import ClientId

PAGE = 500
"""Members on one page."""


class Unwritten:
    """Which members have changed since they were last written down, and what lies on disk of the others."""

    def __init__(self, changed: Iterable[ClientId] = (), *, first: int = 0, num_written: int = 0) -> None:
        self.changed = set(changed)
        self.first, self.num_written = first, num_written

    def take(self, members: Collection[ClientId], seq: int) -> "Written":
        """What the snapshot of entry `seq` has to write; from here on it counts as written."""
        changed = self.changed
        if self.num_written + len(changed) >= len(members):
            self.first, self.num_written = seq, 0
            names: Iterable[ClientId] = members
        else:
            self.num_written += len(changed)
            names = sorted(changed)
        self.changed = set()
        return Written(self.first, len(members), tuple(_pages(names)))


@dataclass(frozen=True, slots=True)
class Written:
    """The members' part of a snapshot. Whoever has it encodes the pages before anything else changes."""

    first: int
    """The entry of the last whole set."""
    num_members: int
    """In all, so that a page that is missing is missed."""
    pages: tuple[tuple[ClientId, ...], ...]
    """Who is on each of the pages that are written now."""


def _pages(names: Iterable[ClientId]) -> Iterator[tuple[ClientId, ...]]:
    left = iter(names)
    while page := tuple(islice(left, PAGE)):
        yield page
