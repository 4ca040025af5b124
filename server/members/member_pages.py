"""Incremental snapshots of the members of a run: a snapshot writes only the members that have changed. Pure.

A snapshot holds the ledger without its members, and beside it their number and the journal entry of the last complete
set. The members are on pages: the complete set, sorted by name, and for each later snapshot the members that have
changed since its predecessor; a newer page overrides an older one. A later page has the number of the page of the
complete set on which its names would lie, so a reader of some names reads the pages of one number only.

When the members written since the last complete set are as many as
the set, the next snapshot writes a complete set again, and everything before it can be deleted. So the total written is
at most twice the number of changes, and the disk holds at most twice the members, for any number of rounds (plus pages
that the last two snapshots do not share).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.protocol.vocabulary import ClientId

PAGE = 500
"""Number of members on one page of a complete set."""

CONTENTS = -1
"""Number of the page with the first name of each page of a complete set."""


class Unwritten:
    """Members that have changed since the last snapshot, and the extent of the pages on disk.

    Args:
        changed: members that have changed.
        first: the journal entry of the last complete set.
        num_written: members on pages after the last complete set.
        lows: the first name of each page of that set.
    """

    def __init__(
        self, changed: Iterable[ClientId] = (), *, first: int = 0, num_written: int = 0, lows: Sequence[ClientId] = ()
    ) -> None:
        self.changed = set(changed)
        self.first, self.num_written, self._lows = first, num_written, tuple(lows)

    def take(self, members: Collection[ClientId], seq: int) -> "Written":
        """Return the pages for the snapshot of entry `seq`, and count them as written."""
        changed, self.changed = self.changed, set()
        if self.num_written + len(changed) < len(members):
            self.num_written += len(changed)
            pages: dict[int, list[ClientId]] = {}
            for name in sorted(changed):
                pages.setdefault(page_of(name, self._lows), []).append(name)
            return Written(self.first, len(members), {number: tuple(names) for number, names in pages.items()}, ())
        whole = dict(enumerate(complete_set(members)))
        self.first, self.num_written, self._lows = seq, 0, tuple(names[0] for names in whole.values())
        return Written(seq, len(members), whole, self._lows)


def complete_set(names: Iterable[ClientId]) -> Iterator[tuple[ClientId, ...]]:
    """Yield the names of each page of a complete set."""
    ordered = sorted(names)
    return (tuple(ordered[begin : begin + PAGE]) for begin in range(0, len(ordered), PAGE))


def page_of(name: str, lows: Sequence[str]) -> int:
    """Return the page on which a name would lie.

    Args:
        name: the name.
        lows: the first name of each page of a complete set.
    """
    return max(0, bisect_right(lows, name) - 1)


@dataclass(frozen=True, slots=True)
class Written:
    """Members' part of a snapshot. The caller encodes the pages before the next event changes the members."""

    first: int
    """The journal entry of the last whole set."""
    num_members: int
    """The number of all members, by which the reader notices a missing page."""
    pages: Mapping[int, tuple[ClientId, ...]]
    """The members on each new page, by its number."""
    lows: tuple[ClientId, ...]
    """The content of the page `CONTENTS`, which belongs to a complete set; empty: the pages are none."""
