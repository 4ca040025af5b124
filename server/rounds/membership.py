"""Who is there: members, their sessions, what they say about themselves and how fast they were. Pure.

A member is *connected* while its newest control stream stands. When the stream ends it has its lease to come back;
when that runs out it is *lost*, which is an event of its own (DESIGN section 3: heartbeats are not journaled, so the
lease is watched by `Leases` outside of the journaled state, and its verdict is journaled).
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.candidate_index import Roster
from atoll.server.rounds.events import Candidate, Profile
from atoll.server.rounds.member import Member
from atoll.server.rounds.member_pages import Unwritten
from atoll.server.rounds.oort_pacer import Pacer


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.5 * old + 0.5 * new


@dataclass
class Membership:
    """The population of a run as far as it has shown itself."""

    members: dict[ClientId, Member] = field(default_factory=dict)
    num_connected: int = 0
    pacer: Pacer = field(default_factory=Pacer)
    start: int = 0

    def __post_init__(self) -> None:
        # these follow from the members: neither compared nor written down
        self._follow()
        self.unwritten = Unwritten(self.members)

    def _follow(self) -> None:
        self._roster = Roster(self.members, self.is_available)
        self._declining = {c for c, m in self.members.items() if m.has_declined and self._is_there(m)}

    def read(self, pages: Iterable[tuple[int, dict[ClientId, Member]]], *, first: int) -> None:
        """Take in what lies on disk: pages by the entry of their snapshot, a whole set (`first`) and all since."""
        num_written = 0
        for seq, changed in pages:
            self.members.update(changed)  # the newer over the older
            num_written += len(changed) if seq > first else 0
        self._follow()
        self.unwritten = Unwritten(first=first, num_written=num_written)

    def _changing(self, client_id: ClientId) -> Member | None:
        """The member that is about to change. Every change begins here: draws and snapshots must know of it."""
        member = self.members.get(client_id)
        if member is not None:
            self._roster.changed(client_id)
            self.unwritten.changed.add(client_id)
        return member

    def joined(self, client_id: ClientId, session: str, profile: Profile) -> None:
        """A control stream stands; an older one of the same client no longer counts."""
        if client_id not in self.members:
            self.members[client_id] = Member(profile)
        member = self._changing(client_id)
        assert member is not None
        self.num_connected += not self._is_there(member)
        member.session, member.profile, member.lost_because, member.start = session, profile, "", self.start
        member.has_declined = False
        self._declining.discard(client_id)

    def declined(self, client_id: ClientId) -> None:
        """The client's site does not let it train for this run: until it joins again it is no candidate."""
        if (member := self._changing(client_id)) is not None:
            member.has_declined = True
            if self._is_there(member):
                self._declining.add(client_id)

    def has_declined(self, client_id: ClientId) -> bool:
        """Whether the client is on the line and no candidate."""
        return client_id in self._declining

    def disconnected(self, client_id: ClientId, session: str) -> bool:
        """The stream `session` ended; False when a newer one has taken its place."""
        member = self.members.get(client_id)
        if member is None or not self._is_there(member) or member.session != session:
            return False
        self._drop(client_id)
        return True

    def lost(self, client_id: ClientId, reason: str) -> None:
        """The lease ran out, or the client said goodbye: until it joins again nobody watches for it."""
        if client_id in self.members:
            self._drop(client_id)
            self.members[client_id].lost_because = reason

    def everyone_disconnected(self) -> None:
        """The coordinator came up again, or the run has ended and is no longer told who is on the line."""
        self.start += 1  # of a million members none is touched
        self.num_connected = 0
        self._roster.clear()
        self._declining.clear()

    def _is_there(self, member: Member) -> bool:
        return member.session is not None and member.start == self.start

    def is_connected(self, client_id: ClientId) -> bool:
        """Whether a control stream of the client stands."""
        member = self.members.get(client_id)
        return member is not None and self._is_there(member)

    def is_available(self, client_id: ClientId) -> bool:
        """Whether the client can be invited now."""
        return self.is_connected(client_id) and client_id not in self._declining

    @property
    def num_available(self) -> int:
        """How many can be invited now."""
        return self.num_connected - len(self._declining)

    def lost_because(self, client_id: ClientId) -> str:
        """Why the client was given up; empty while it may still come back within its lease."""
        return self.members[client_id].lost_because if client_id in self.members else ""

    def candidates(self) -> tuple[Candidate, ...]:
        """Everyone who can be invited now, in order of client id."""
        return self._roster.candidates()

    def available(self) -> Iterator[ClientId]:
        """Their ids."""
        return (candidate.client_id for candidate in self._roster.candidates())

    def connected(self) -> Iterator[ClientId]:
        """Everyone with a standing control stream, in order of client id."""
        return heapq.merge(self.available(), sorted(self._declining)) if self._declining else self.available()

    def chosen(self, client_id: ClientId) -> None:
        """The client is invited to a round."""
        if (member := self._changing(client_id)) is not None:
            member.times_chosen += 1

    def learnt(self, client_id: ClientId, round_id: RoundId, loss: float | None, utility: float) -> None:
        """An update that the client made in a round was accepted: what it tells of what the client has to teach."""
        member = self._changing(client_id)
        if member is None or round_id < member.last_round:
            return
        member.last_round = round_id
        if loss is not None:
            member.loss, member.utility = loss, utility

    def measured(self, client_id: ClientId, *, download: float, train: float, upload: float) -> None:
        """Remember how long a client took [s]; `train` is for the whole of the requested work."""
        member = self._changing(client_id)
        if member is None:
            return
        member.download_seconds = _average(member.download_seconds, download)
        member.train_seconds = _average(member.train_seconds, train)
        member.upload_seconds = _average(member.upload_seconds, upload)

    def counted(self, client_id: ClientId, round_id: RoundId) -> None:
        """The update that a client made in a round is in the model now."""
        member = self._changing(client_id)
        if member is not None:
            member.counted_round = max(member.counted_round, round_id)

    def counted_round(self, client_id: ClientId) -> RoundId:
        """The newest of the client's rounds whose update is in a model; 0: there is none."""
        return self.members[client_id].counted_round if client_id in self.members else RoundId(0)

    def expected_seconds(self, client_id: ClientId) -> float | None:
        """How long the client is expected to take for a round [s]; None when nothing was measured."""
        member = self.members.get(client_id)
        return None if member is None else member.expected_seconds

    def _drop(self, client_id: ClientId) -> None:
        member = self._changing(client_id)
        assert member is not None
        self.num_connected -= self._is_there(member)
        self._declining.discard(client_id)
        member.session = None
