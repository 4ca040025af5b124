"""The clients that can be invited, in order of client id, without looking at a million of them for each draw. Pure.

What changed since the last look is put in its place then; a look that nothing came before costs nothing.
"""

import bisect
from collections.abc import Callable, Mapping
from operator import itemgetter

from atoll.protocol.vocabulary import ClientId
from atoll.server.rounds.events import Candidate
from atoll.server.rounds.member import Member

_CLIENT_ID = itemgetter(0)  # half the time that `attrgetter` takes

MANY = 1 / 4
"""The share of all candidates beyond which they are put in order anew, rather than one by one."""


class Roster:
    """See the module; it follows from `members` and who `is_there`, and is told who of them changed."""

    def __init__(self, members: Mapping[ClientId, Member], is_there: Callable[[ClientId], bool]) -> None:
        self._members, self._is_there = members, is_there
        self._changed = set(members)
        self._candidates: tuple[Candidate, ...] = ()

    def changed(self, client_id: ClientId) -> None:
        """The client joined, left, or is no longer what it was."""
        self._changed.add(client_id)

    def clear(self) -> None:
        """Nobody is there any more."""
        self._changed.clear()
        self._candidates = ()

    def candidates(self) -> tuple[Candidate, ...]:
        """Everyone with a standing control stream."""
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
