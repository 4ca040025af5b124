"""Incremental snapshots of the members of a run: a snapshot writes only the members that have changed. Pure.

A snapshot holds the ledger without its members, and beside it their number and the journal entry of the last complete
set. The members are on pages: the complete set, and for each later snapshot the members that have changed since its
predecessor; a newer page overrides an older one. When the members written since the last complete set are as many as
the set, the next snapshot writes a complete set again, and everything before it can be deleted. So the total written is
at most twice the number of changes, and the disk holds at most twice the members, for any number of rounds (plus pages
that the last two snapshots do not share).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from atoll.protocol.vocabulary import ClientId

PAGE = 500
"""Number of members on one page."""


class Unwritten:
    """Members that have changed since the last snapshot, and the extent of the pages on disk.

    Args:
        changed: members that have changed.
        first: the journal entry of the last complete set.
        num_written: members on pages after the last complete set.
    """

    def __init__(self, changed: Iterable[ClientId] = (), *, first: int = 0, num_written: int = 0) -> None:
        self.changed = set(changed)
        self.first, self.num_written = first, num_written

    def take(self, members: Collection[ClientId], seq: int) -> "Written":
        """Return the pages for the snapshot of entry `seq`, and count them as written."""
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
    """Members' part of a snapshot. The caller encodes the pages before the next event changes the members."""

    first: int
    """The journal entry of the last whole set."""
    num_members: int
    """The number of all members, by which the reader notices a missing page."""
    pages: tuple[tuple[ClientId, ...], ...]
    """The members on each new page."""


def _pages(names: Iterable[ClientId]) -> Iterator[tuple[ClientId, ...]]:
    left = iter(names)
    while page := tuple(islice(left, PAGE)):
        yield page
