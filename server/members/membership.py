"""The members of a run, with their sessions, profiles, measured times and losses. Pure.

A member is *connected* while its newest control stream is open. When the stream ends, the member may reconnect within
its lease; when the lease expires, the member is *lost*. Heartbeats are not journaled: `Leases` watches the leases
outside of the journaled state, and reports a loss as an event, which is journaled.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from atoll.protocol.vocabulary import ClientId, FailureReason, RoundId
from atoll.server.invariants import Violation
from atoll.server.members.candidate_index import CandidateIndex
from atoll.server.members.member import Candidate, Member, Profile, Trouble
from atoll.server.members.member_pages import Unwritten
from atoll.server.members.oort_pacer import Pacer

DETAIL_MAX = 200
"""Number of characters of a failure's detail that are kept, from its end: a traceback ends with its error."""


class UseRules(Protocol):
    """Rules of how often one client may be in a private sum; see `PrivacyRules`."""

    def spent_after(self, spent: float, uses: int, number: int) -> float:
        """Return what a client has spent after `number` further uses."""

    def allows(self, spent: float, uses: int) -> bool:
        """Return whether a client may be used once more."""


def _average(old: float | None, new: float) -> float:
    return new if old is None else 0.5 * old + 0.5 * new


@dataclass
class Membership:
    """All clients that have ever joined a run. `start` counts the times that all were disconnected at once."""

    members: dict[ClientId, Member] = field(default_factory=dict)
    num_connected: int = 0
    pacer: Pacer = field(default_factory=Pacer)
    start: int = 0
    ended_at: float = 0.0  # when all were last disconnected at once [s since the epoch]
    settled_for: int = 0  # connected clients that sufficed for a round after `selection_timeout`; 0: none did
    approval_by: float | None = None  # the end of the wait for approvals (`StragglerPolicy.approval_wait`) under way
    most_spent: float = 0.0  # the largest `Member.spent`
    most_uses: int = 0  # the largest `Member.uses`
    num_spent: int = 0  # members with `Member.is_spent`, for readers of a snapshot without its members
    unseen_uses: int = 0  # `Member.uses` of a client that joins for the first time: after a restored backup above 0
    unseen_spent: float = 0.0  # its `Member.spent`
    is_unseen_spent: bool = False  # its `Member.is_spent`

    def __post_init__(self) -> None:
        # derived from the members: neither compared nor stored
        self._derive()
        self.unwritten = Unwritten(self.members)

    def _derive(self) -> None:
        self._index = CandidateIndex(self.members, self.is_available)
        if self.members:  # an earlier Atoll did not store it
            self.num_spent = sum(member.is_spent for member in self.members.values())
        self._declining = {c for c, m in self.members.items() if m.has_declined and self._is_there(m)}
        self._spent = {c for c, m in self.members.items() if m.is_spent and self._is_there(m)}
        self._resting = {c: t.rest_until for c, m in self.members.items() if (t := m.trouble) and t.rest_until}
        self._apart = {c: m.apart_until for c, m in self.members.items() if m.apart_until}

    def read(self, pages: Iterable[tuple[int, dict[ClientId, Member]]], *, first: int) -> None:
        """Restore the members from pages, each with its snapshot's entry, in order from the whole set (`first`)."""
        num_written, lows = 0, list[ClientId]()
        for seq, changed in pages:
            self.members.update(changed)  # a newer page overrides an older one
            if seq > first:
                num_written += len(changed)
            else:
                lows.append(min(changed))
        self._derive()
        self.unwritten = Unwritten(first=first, num_written=num_written, lows=lows)

    def _changing(self, client_id: ClientId) -> Member | None:
        """Return a member in order to change it. Every change uses this, so that draws and snapshots see it."""
        member = self.members.get(client_id)
        if member is not None:
            self._index.changed(client_id)
            self.unwritten.changed.add(client_id)
        return member

    def joined(self, client_id: ClientId, session: str, profile: Profile, software: str = "", now: float = 0.0) -> None:
        """Register a client's new control stream; it replaces an older one."""
        if client_id not in self.members:
            self.members[client_id] = Member(
                profile, uses=self.unseen_uses, spent=self.unseen_spent, is_spent=self.is_unseen_spent
            )
            self.num_spent += self.is_unseen_spent
        member = self._changing(client_id)
        assert member is not None
        self.num_connected += not self._is_there(member)
        if self.num_connected > self.settled_for:
            self.settled_for = 0  # one is back
        member.session, member.profile, member.lost_because, member.start = session, profile, "", self.start
        member.has_declined = False
        if member.trouble is not None:
            member.trouble.waits = member.trouble.declines_evaluation = False
        member.software, member.seen_at = software or member.software, now
        self._declining.discard(client_id)
        if member.is_spent:
            self._spent.add(client_id)

    def settle_for_these(self) -> None:
        """Limit the wait of later rounds to the number of clients that are connected now, until there are more."""
        self.settled_for = self.num_connected

    def enough_of(self, wanted: int) -> int:
        """Return the number of connected clients for which a round that wants `wanted` waits."""
        return min(wanted, self.settled_for) if self.settled_for else wanted

    def declined(self, client_id: ClientId, *, waits: bool = False) -> None:
        """Exclude a client from the candidates until it joins again: its site does not let it train for this run.

        `waits`: its site's policy will allow it later.
        """
        if (member := self._changing(client_id)) is None:
            return
        member.has_declined = True
        if member.trouble is not None:
            member.trouble.waits = waits
        if self._is_there(member):
            self._declining.add(client_id)

    def declined_evaluation(self, client_id: ClientId) -> None:
        """Ask a client for no evaluation until it joins again: its site does not let it evaluate for this run."""
        member = self._changing(client_id)
        if member is not None and member.trouble is not None:
            member.trouble.declines_evaluation = True

    def evaluates(self, client_id: ClientId) -> bool:
        """Return whether a member's site policy allows to ask it for an evaluation."""
        trouble = self.members[client_id].trouble
        return trouble is None or not trouble.declines_evaluation

    def has_declined(self, client_id: ClientId) -> bool:
        """Return whether the client is connected and has declined to train or to evaluate."""
        return client_id in self._declining or (self.is_connected(client_id) and not self.evaluates(client_id))

    def awaiting(self) -> Iterator[ClientId]:
        """Yield the connected clients that have declined but whose site's policy will allow them to train later."""
        troubles = ((c, self.members[c].trouble) for c in sorted(self._declining))
        return (c for c, trouble in troubles if trouble is not None and trouble.waits)

    # ------------------------------------------------------------ privacy

    def charge(self, client_id: ClientId, rules: UseRules) -> None:
        """Charge a client for the private sum that its update is in. Nothing ever takes a charge back."""
        member = self._changing(client_id)
        assert member is not None, client_id
        self._charge(client_id, member, 1, rules)

    def charge_all(self, number: int, rules: UseRules) -> None:
        """Charge every client, also those that join later, for `number` private sums whose clients are not known."""
        for client_id in [*self.members]:
            member = self._changing(client_id)
            assert member is not None
            self._charge(client_id, member, number, rules)
        spent = rules.spent_after(self.unseen_spent, self.unseen_uses, number)
        self.unseen_uses, self.unseen_spent = self.unseen_uses + number, spent
        self.is_unseen_spent = not rules.allows(self.unseen_spent, self.unseen_uses)
        self._note_most(self.unseen_uses, self.unseen_spent)

    def _charge(self, client_id: ClientId, member: Member, number: int, rules: UseRules) -> None:
        spent = rules.spent_after(member.spent, member.uses, number)
        member.uses, member.spent = member.uses + number, spent
        self._note_most(member.uses, member.spent)
        self._mark(client_id, member, rules)

    def _note_most(self, uses: int, spent: float) -> None:
        self.most_uses, self.most_spent = max(self.most_uses, uses), max(self.most_spent, spent)

    def keep_apart(self, client_ids: Iterable[ClientId], until: int) -> None:
        """Exclude the clients of a version from the candidates of rounds that begin from a version before `until`.

        A fold that fails keeps no client apart. It publishes nothing, and its noise is in no later version, so the
        published ones, of which the sensitivity is, have each client's uses as far apart as that assumes: a client of
        such a fold may repeat its version. Its use is charged nonetheless.
        """
        for client_id in client_ids:
            member = self._changing(client_id)
            assert member is not None, client_id
            self._apart[client_id] = member.apart_until = until

    def num_apart(self, version: int) -> tuple[int, int]:
        """Return the number of members far enough from their last use for a round from a version, and with a budget."""
        near = [c for c, until in self._apart.items() if until > version]
        spent = self.num_spent - sum(self.members[c].is_spent for c in near)
        return len(self.members) - len(near), len(self.members) - len(near) - spent

    def begin_round(self, version: int) -> None:
        """Make clients whose last use is far enough before the version that a round begins from candidates again."""
        for client_id in [c for c, until in self._apart.items() if until <= version]:
            member = self._changing(client_id)
            assert member is not None
            member.apart_until = 0
            del self._apart[client_id]

    def has_budget(self, client_id: ClientId) -> bool:
        """Return whether a client may be in a further private sum; without privacy each may."""
        return not self.members[client_id].is_spent

    def follow_budget(self, rules: UseRules) -> None:
        """Apply another budget to all members, after a resume."""
        self.is_unseen_spent = not rules.allows(self.unseen_spent, self.unseen_uses)
        for client_id in [*self.members]:
            member = self._changing(client_id)
            assert member is not None
            self._mark(client_id, member, rules)

    def _mark(self, client_id: ClientId, member: Member, rules: UseRules) -> None:
        self.num_spent -= member.is_spent
        member.is_spent = not rules.allows(member.spent, member.uses)
        self.num_spent += member.is_spent
        self._spent.discard(client_id)
        if member.is_spent and self._is_there(member):
            self._spent.add(client_id)

    # ------------------------------------------------------------ failures

    def noted(self, client_id: ClientId, reason: str, detail: str, now: float) -> None:
        """Record the reason of a client's newest failure or decline, before its consequences."""
        if (member := self._changing(client_id)) is None:
            return
        detail = detail.strip()[-DETAIL_MAX:]
        if (trouble := member.trouble) is None:
            member.trouble = Trouble(reason, detail, now)
        else:
            trouble.reason, trouble.detail, trouble.at = reason, detail, now
        if self._is_there(member):
            member.seen_at = now

    def misfits(self) -> Iterator[tuple[ClientId, str]]:
        """Yield the connected clients whose newest work did not fit the run, each with the reason."""
        for client_id in self.connected():
            trouble = self.members[client_id].trouble
            if trouble is not None and trouble.failures and trouble.reason == FailureReason.TASK_MISMATCH:
                yield client_id, trouble.detail

    def failures(self, client_id: ClientId) -> int:
        """Return the number of the client's failures since its last accepted update."""
        member = self.members.get(client_id)
        return member.trouble.failures if member is not None and member.trouble is not None else 0

    def failed(self, client_id: ClientId, rest_until: float) -> None:
        """Count a failure of the client, and exclude it from the candidates until a time; 0: do not exclude it."""
        member = self._changing(client_id)
        if member is not None and member.trouble is not None:
            member.trouble.failures += 1
            self._rest(client_id, member.trouble, rest_until)

    def _rest(self, client_id: ClientId, trouble: Trouble, until: float) -> None:
        trouble.rest_until = until
        if until:
            self._resting[client_id] = until
        else:
            self._resting.pop(client_id, None)

    @property
    def next_wake(self) -> float | None:
        """The earliest end of a client's rest; None: no client rests."""
        return min(self._resting.values()) if self._resting else None

    def resting(self) -> dict[ClientId, float]:
        """Return the clients that rest after a failure, connected or not, with the end of each rest."""
        return dict(sorted(self._resting.items()))

    def wake(self, now: float = math.inf) -> None:
        """End the rests that last until `now` at most; without an argument all."""
        for client_id in [c for c, until in self._resting.items() if until <= now]:
            member = self._changing(client_id)
            assert member is not None
            assert member.trouble is not None
            self._rest(client_id, member.trouble, 0.0)

    def disconnected(self, client_id: ClientId, session: str, now: float = 0.0) -> bool:
        """Mark the client as disconnected after the end of `session`.

        Returns:
            False if the session had already ended or was replaced by a newer one.
        """
        member = self.members.get(client_id)
        if member is None or not self._is_there(member) or member.session != session:
            return False
        self._drop(client_id)
        member.seen_at = max(member.seen_at, now)
        return True

    def lost(self, client_id: ClientId, reason: str, heard_at: float = 0.0) -> None:
        """Mark a client as lost, until it joins again.

        Args:
            client_id: the client.
            reason: reason of the loss.
            heard_at: its last sign of life, if it was connected until now [s since the epoch].
        """
        if client_id in self.members:
            member = self.members[client_id]
            member.seen_at = max(member.seen_at, heard_at) if self._is_there(member) else self._seen_at(member)
            self._drop(client_id)
            member.lost_because = reason

    def everyone_disconnected(self, at: float = 0.0) -> None:
        """Mark all members as disconnected, after a restart of the coordinator or the end of the run.

        Args:
            at: when their connections ended [s since the epoch].
        """
        self.start += 1  # sessions of an older start are void: no member is visited
        self.ended_at = at
        self.num_connected = 0
        self._index.clear()
        self._declining.clear()
        self._spent.clear()

    def away_since(self, client_id: ClientId) -> float | None:
        """Return when the newest connection of an absent member ended [s since the epoch]; None: unknown."""
        return self._seen_at(self.members[client_id]) or None

    def _seen_at(self, member: Member) -> float:
        ended_with_all = member.session is not None and member.start == self.start - 1
        return max(member.seen_at, self.ended_at) if ended_with_all else member.seen_at

    def _is_there(self, member: Member) -> bool:
        return member.session is not None and member.start == self.start

    def is_connected(self, client_id: ClientId) -> bool:
        """Return whether the client has an open control stream."""
        member = self.members.get(client_id)
        return member is not None and self._is_there(member)

    def is_available(self, client_id: ClientId) -> bool:
        """Return whether the client can be invited now."""
        member = self.members.get(client_id)
        if member is None or not self._is_there(member):
            return False
        away = (self._declining, self._resting, self._spent, self._apart)
        return not any(client_id in those for those in away)

    @property
    def num_available(self) -> int:
        """The number of clients that can be invited now."""
        return self.num_connected - len(self.unavailable())

    def unavailable(self) -> list[ClientId]:
        """Return the connected clients that cannot be invited now, sorted.

        They decline, rest, have no budget, or had their last use too few versions ago.
        """
        if not self._resting and not self._spent and not self._apart:
            return sorted(self._declining)
        others = (c for c in (*self._resting, *self._apart) if self.is_connected(c))
        return sorted({*self._declining, *self._spent, *others})

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
        away = self.unavailable()
        return heapq.merge(self.available(), away) if away else self.available()

    def evaluating(self) -> Iterator[ClientId]:
        """Yield the connected clients that can be asked for an evaluation, sorted."""
        return (c for c in self.connected() if self.evaluates(c))

    def summed(self, client_id: ClientId, *, is_dropped: bool) -> int:
        """Count a round whose secure sum with the client's update was dropped, or none; return how many in a row."""
        member = self._changing(client_id)
        if member is None:
            return 0
        member.dropped_sums = member.dropped_sums + 1 if is_dropped else 0
        return member.dropped_sums

    def chosen(self, client_id: ClientId) -> None:
        """Count an invitation of the client to a round."""
        if (member := self._changing(client_id)) is not None:
            member.times_chosen += 1

    def learnt(self, client_id: ClientId, round_id: RoundId, loss: float | None, utility: float) -> None:
        """Record the loss and the utility of an accepted update that the client trained for a round."""
        member = self._changing(client_id)
        if member is not None and member.trouble is not None:
            member.trouble.failures = 0
            self._rest(client_id, member.trouble, 0.0)
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
        self._spent.discard(client_id)
        member.session = None

    def validate(self) -> None:
        """Check that the sets from which rounds draw agree with the members; raises Violation."""
        there = {client_id for client_id, member in self.members.items() if self._is_there(member)}
        declining = {client_id for client_id in there if self.members[client_id].has_declined}
        resting = {c: t.rest_until for c, m in self.members.items() if (t := m.trouble) and t.rest_until}
        spent = {client_id for client_id in there if self.members[client_id].is_spent}
        if self._spent != spent:
            raise Violation(4, f"without a budget are {self._spent}: {spent}")
        if self.num_spent != (num := sum(member.is_spent for member in self.members.values())):
            raise Violation(4, f"the number of members without a budget is {self.num_spent}: {num}")
        apart = {c: member.apart_until for c, member in self.members.items() if member.apart_until}
        if self._apart != apart:
            raise Violation(4, f"apart from their last use are kept {self._apart}: {apart}")
        away = declining | spent | resting.keys() | apart.keys()
        free = tuple(self.members[c].as_candidate(c) for c in sorted(there - away))
        if (self.num_connected, self._declining, self._resting) != (len(there), declining, resting):
            known = (self.num_connected, self._declining, self._resting)
            raise Violation(4, f"connected, declining, resting are {known}: {(len(there), declining, resting)}")
        if (shown := self.candidates()) != free:
            raise Violation(4, f"the candidates are {free}, the index has {shown}")
