"""An index of the clients that can be invited, sorted by client id. Pure.

A run may have a million members, so a draw does not visit them all: the index applies the changes since the last query
to its sorted list, and a query without changes returns the same list.
"""

import bisect
from collections.abc import Callable, Mapping
from operator import itemgetter

from atoll.protocol.vocabulary import ClientId
from atoll.server.members.member import Candidate, Member

_CLIENT_ID = itemgetter(0)  # half the time that `attrgetter` takes

MANY = 1 / 4
"""Share of changed candidates above which the list is sorted again instead of changed in place."""


class CandidateIndex:
    """Sorted candidates among `members`: those for which `is_there` holds. Each change is reported to `changed`."""

    def __init__(self, members: Mapping[ClientId, Member], is_there: Callable[[ClientId], bool]) -> None:
        self._members, self._is_there = members, is_there
        self._changed = set(members)
        self._candidates: tuple[Candidate, ...] = ()

    def changed(self, client_id: ClientId) -> None:
        """Record that the client joined, left, or changed its properties."""
        self._changed.add(client_id)

    def clear(self) -> None:
        """Remove all candidates, after the end of all connections."""
        self._changed.clear()
        self._candidates = ()

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the candidates, sorted by client id."""
        if self._changed:
            is_many = len(self._changed) > MANY * len(self._candidates)
            self._candidates = tuple(self._anew() if is_many else self._amended())
            self._changed.clear()
        return self._candidates

    def _anew(self) -> list[Candidate]:
        rows = [member.as_candidate(c) for c, member in self._members.items() if self._is_there(c)]
        return sorted(rows, key=_CLIENT_ID)

    def _amended(self) -> list[Candidate]:
        rows, gone, come = [*self._candidates], set[int](), list[Candidate]()
        for client_id in self._changed:
            at = bisect.bisect_left(self._candidates, client_id, key=_CLIENT_ID)
            was_there = at < len(rows) and self._candidates[at].client_id == client_id
            if not self._is_there(client_id):
                gone.update([at] * was_there)
            elif was_there:
                rows[at] = self._members[client_id].as_candidate(client_id)
            else:
                come.append(self._members[client_id].as_candidate(client_id))
        there = [row for at, row in enumerate(rows) if at not in gone] if gone else rows
        return sorted(there + come, key=_CLIENT_ID) if come else there
