"""The members of a run, with their sessions, profiles, measured times and losses. Pure.

A member is *connected* while its newest control stream is open. When the stream ends, the member may reconnect within
its lease; when the lease runs out, the member is *lost*. Heartbeats are not journaled: `Leases` watches the leases
outside of the journaled state, and a loss comes back as an event, which is journaled.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.rounds.candidate_index import CandidateIndex
from atoll.server.rounds.events import Candidate, Profile
from atoll.server.rounds.member import Member
from atoll.server.rounds.member_pages import Unwritten
from atoll.server.rounds.oort_pacer import Pacer


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.5 * old + 0.5 * new


@dataclass
class Membership:
    """All clients that have ever joined a run. `start` counts the times that all were disconnected at once."""

    members: dict[ClientId, Member] = field(default_factory=dict)
    num_connected: int = 0
    pacer: Pacer = field(default_factory=Pacer)
    start: int = 0

    def __post_init__(self) -> None:
        # derived from the members: neither compared nor stored
        self._derive()
        self.unwritten = Unwritten(self.members)

    def _derive(self) -> None:
        self._index = CandidateIndex(self.members, self.is_available)
        self._declining = {c for c, m in self.members.items() if m.has_declined and self._is_there(m)}

    def read(self, pages: Iterable[tuple[int, dict[ClientId, Member]]], *, first: int) -> None:
        """Restore the members from pages, each with its snapshot's entry, in order from the whole set (`first`)."""
        num_written = 0
        for seq, changed in pages:
            self.members.update(changed)  # a newer page overrides an older one
            num_written += len(changed) if seq > first else 0
        self._derive()
        self.unwritten = Unwritten(first=first, num_written=num_written)

    def _changing(self, client_id: ClientId) -> Member | None:
        """Return a member for a change. Every change goes through here, so that draws and snapshots see it."""
        member = self.members.get(client_id)
        if member is not None:
            self._index.changed(client_id)
            self.unwritten.changed.add(client_id)
        return member

    def joined(self, client_id: ClientId, session: str, profile: Profile) -> None:
        """Register a client's new control stream; it replaces an older one."""
        if client_id not in self.members:
            self.members[client_id] = Member(profile)
        member = self._changing(client_id)
        assert member is not None
        self.num_connected += not self._is_there(member)
        member.session, member.profile, member.lost_because, member.start = session, profile, "", self.start
        member.has_declined = False
        self._declining.discard(client_id)

    def declined(self, client_id: ClientId) -> None:
        """Exclude a client from the candidates until it joins again: its site does not let it train for this run."""
        if (member := self._changing(client_id)) is not None:
            member.has_declined = True
            if self._is_there(member):
                self._declining.add(client_id)

    def has_declined(self, client_id: ClientId) -> bool:
        """Return whether the client is connected and has declined to train."""
        return client_id in self._declining

    def disconnected(self, client_id: ClientId, session: str) -> bool:
        """Mark the client as disconnected after the end of `session`.

        Returns:
            False when the session had ended before or was replaced by a newer one.
        """
        member = self.members.get(client_id)
        if member is None or not self._is_there(member) or member.session != session:
            return False
        self._drop(client_id)
        return True

    def lost(self, client_id: ClientId, reason: str) -> None:
        """Mark a client as lost, until it joins again."""
        if client_id in self.members:
            self._drop(client_id)
            self.members[client_id].lost_because = reason

    def everyone_disconnected(self) -> None:
        """Mark all members as disconnected, after a restart of the coordinator or the end of the run."""
        self.start += 1  # sessions of an older start are void: no member is visited
        self.num_connected = 0
        self._index.clear()
        self._declining.clear()

    def _is_there(self, member: Member) -> bool:
        return member.session is not None and member.start == self.start

    def is_connected(self, client_id: ClientId) -> bool:
        """Return whether the client has an open control stream."""
        member = self.members.get(client_id)
        return member is not None and self._is_there(member)

    def is_available(self, client_id: ClientId) -> bool:
        """Return whether the client can be invited now."""
        return self.is_connected(client_id) and client_id not in self._declining

    @property
    def num_available(self) -> int:
        """The number of clients that can be invited now."""
        return self.num_connected - len(self._declining)

    def lost_because(self, client_id: ClientId) -> str:
        """Return the reason of the client's loss; empty: it is not lost."""
        return self.members[client_id].lost_because if client_id in self.members else ""

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the clients that can be invited now, sorted by client id."""
        return self._index.candidates()

    def available(self) -> Iterator[ClientId]:
        """Yield the ids of the candidates, sorted."""
        return (candidate.client_id for candidate in self._index.candidates())

    def connected(self) -> Iterator[ClientId]:
        """Yield the clients with an open control stream, sorted."""
        return heapq.merge(self.available(), sorted(self._declining)) if self._declining else self.available()

    def chosen(self, client_id: ClientId) -> None:
        """Count an invitation of the client to a round."""
        if (member := self._changing(client_id)) is not None:
            member.times_chosen += 1

    def learnt(self, client_id: ClientId, round_id: RoundId, loss: float | None, utility: float) -> None:
        """Record the loss and the utility of an accepted update that the client trained for a round."""
        member = self._changing(client_id)
        if member is None or round_id < member.last_round:
            return
        member.last_round = round_id
        if loss is not None:
            member.loss, member.utility = loss, utility

    def measured(self, client_id: ClientId, *, download: float, train: float, upload: float) -> None:
        """Add measured times of a client [s] to its moving averages; `train` is for all of the requested work."""
        member = self._changing(client_id)
        if member is None:
            return
        member.download_seconds = _average(member.download_seconds, download)
        member.train_seconds = _average(member.train_seconds, train)
        member.upload_seconds = _average(member.upload_seconds, upload)

    def counted(self, client_id: ClientId, round_id: RoundId) -> None:
        """Record that the client's update of a round is in the model."""
        member = self._changing(client_id)
        if member is not None:
            member.counted_round = max(member.counted_round, round_id)

    def counted_round(self, client_id: ClientId) -> RoundId:
        """Return the newest of the client's rounds whose update is in a model; 0: there is none."""
        return self.members[client_id].counted_round if client_id in self.members else RoundId(0)

    def expected_seconds(self, client_id: ClientId) -> float | None:
        """Return the expected duration of a round at the client [s]; None: nothing was measured."""
        member = self.members.get(client_id)
        return None if member is None else member.expected_seconds

    def _drop(self, client_id: ClientId) -> None:
        member = self._changing(client_id)
        assert member is not None
        self.num_connected -= self._is_there(member)
        self._declining.discard(client_id)
        member.session = None
