"""The count of connections that end before they prove an identity, by class, and the log lines about them. Pure.

A connection is *proven* by a call of a member, or if it is still open after the time limit of a handshake, which gRPC
enforces. TLS does not distinguish a stranger, a member with a wrong clock and a member that was late; these classes can
be distinguished:

    LATE      its peer had left before this end answered, or a member from the same host was proven a moment later:
              the process was starting or busy. It is no alarm
    SILENT    its handshake was not complete in time: a stranger that occupies a slot, or a very slow line
    REFUSED   one end did not accept the other: another authority, a wrong clock, no TLS

Each class is logged once at once, and then once per interval with a count; the interval doubles while the class
persists. A handshake whose connection was never seen is counted, too: between two checks, a flood begins and ends
hundreds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.ground.bounded_mapping import BoundedMapping
from atoll.ground.printable import count_of, span
from atoll.protocol.wire.channel import PROOF_S
from atoll.server.transport.sockets import Place

WAIT_S = PROOF_S + 1.0
"""Time from the begin of a handshake to the judgement about its connection [s]: by then gRPC has ended an incomplete
one."""

SILENT_S = PROOF_S - 2.0
"""Shortest time for which an unproven connection was open if its handshake timed out [s]."""

STARTING_S = 3.0
"""Time after the first handshake of a port in which unseen connections count as late [s]: those that waited while the
process was starting all begin at once."""

LINE_S, LINE_MAX_S = 60.0, 3600.0
"""First and longest interval between two log lines about one class, which doubles [s]."""

LATE_MAX = 10
"""Number of late connections of one host in an interval, for each proven connection from there, beyond which they count
as refused: a member rarely tries so often, and many members may share an address."""

HOSTS_MAX, CONNECTIONS_MAX, NAMED_MAX = 1000, 10_000, 5
"""Numbers of hosts counted individually, of connections watched, and of hosts named in a line."""

OTHERS = "others"


class FailedHandshake(StrEnum):
    """Class of a connection without a proven identity."""

    LATE = "late"
    SILENT = "silent"
    REFUSED = "refused"


@dataclass(slots=True)
class _Watched:
    begun: float
    seen_open: float
    """Last instant at which it was open."""
    had_left: bool
    """Whether its peer had closed it before the handshake began."""


@dataclass(slots=True)
class _Count:
    """Connections of one class since its last log line."""

    hosts: Counter[str] = field(default_factory=Counter)
    newest: Place = ("", 0)
    num_unseen: int = 0
    since: float = 0.0
    line_at: float = 0.0
    interval: float = LINE_S

    @property
    def total(self) -> int:
        return self.hosts.total() + self.num_unseen


@dataclass(frozen=True, slots=True)
class Report:
    """Connections of one class that a log line is about."""

    kind: FailedHandshake
    hosts: Mapping[str, int]
    num_unseen: int
    """Number of handshakes whose connection was not seen."""
    newest: Place
    seconds: float
    """Time in which they arrived [s]; 0: the first one."""

    @property
    def total(self) -> int:
        """Number of connections."""
        return sum(self.hosts.values()) + self.num_unseen

    @property
    def subject(self) -> str:
        """The connections as the subject of a sentence."""
        total = self.total
        if total == 1 and self.hosts:
            return f"a connection from {self.newest[0]} port {self.newest[1]}"
        named = sorted(self.hosts.items(), key=lambda item: (-item[1], item[0]))
        first = ", ".join(f"{host}: {count}" for host, count in named[:NAMED_MAX])
        rest = f", and {count_of(len(named) - NAMED_MAX, 'more host')}" if len(named) > NAMED_MAX else ""
        unseen = [f"{self.num_unseen} gone before the address was seen"] if self.num_unseen else []
        hosts = "; ".join([*([first + rest] if named else []), *unseen])
        within = f" in {span(self.seconds)}" if self.seconds else ""
        return f"{count_of(total, 'connection')}{within} ({hosts})"


class Handshakes:
    """Connections to one port that have not been proven yet, and the counts of those that never were.

    All times are from one monotonic clock [s].
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._watched: dict[Place, _Watched] = {}
        self._proven: BoundedMapping[Place, float] = BoundedMapping(CONNECTIONS_MAX)
        self._hosts: BoundedMapping[str, float] = BoundedMapping(HOSTS_MAX)
        self._counts = {kind: _Count() for kind in FailedHandshake}
        self._num_unseen = self._num_starting = 0
        self._recent, self._window_at = (0, 0), 0.0  # handshakes of the last full window of WAIT_S, and of this one

    @property
    def is_watching(self) -> bool:
        """Return whether a connection waits for its judgement, or an unseen handshake is not logged yet."""
        return bool(self._watched) or self._num_unseen > 0 or any(count.total for count in self._counts.values())

    def begun(self, count: int, now: float) -> None:
        """Count handshakes that have begun; a later check sees their connections, unless they have ended by then."""
        if self._first is None:
            self._first = self._window_at = now
        self._roll_window(now)
        self._num_unseen, self._recent = self._num_unseen + count, (self._recent[0], self._recent[1] + count)
        self._num_starting += count if now - self._first < STARTING_S else 0

    def _roll_window(self, now: float) -> None:
        if (passed := now - self._window_at) >= WAIT_S:
            self._recent, self._window_at = (self._recent[1] if passed < 2 * WAIT_S else 0, 0), now

    def proven(self, place: Place, now: float) -> None:
        """Record a call of a member over a connection."""
        if place in self._proven:
            return
        self._proven[place] = self._hosts[place[0]] = now
        if self._watched.pop(place, None) is None:
            self._num_unseen -= 1  # no check has seen it, and it will not count when one does

    def look(self, is_open: Mapping[Place, bool], now: float) -> None:
        """Record the new connections, and judge those whose time is over.

        Args:
            is_open: all connections of the port at this moment; whether the peer had left when one was first seen.
            now: this moment.
        """
        for place in [place for place in self._proven if place not in is_open]:
            del self._proven[place]  # its port may soon belong to another peer
        for place, had_left in is_open.items():
            if place in self._proven or place in self._watched:
                continue
            self._num_unseen -= 1
            if len(self._watched) < CONNECTIONS_MAX:
                self._watched[place] = _Watched(now, now, had_left)
        members = Counter(host for host, _ in self._proven)
        for place, watched in list(self._watched.items()):
            if place in is_open:
                watched.seen_open = now
            if now - watched.begun >= WAIT_S:
                del self._watched[place]
                if place in is_open:
                    self._proven[place] = self._hosts[place[0]] = now
                else:
                    self._add(self._kind_of(place, watched, members[place[0]]), place, now)

    def _kind_of(self, place: Place, watched: _Watched, num_members: int) -> FailedHandshake:
        is_members = self._hosts.get(place[0], -1.0) >= watched.begun - WAIT_S
        late = self._counts[FailedHandshake.LATE].hosts[place[0]]
        if watched.had_left or (is_members and late < LATE_MAX * max(1, num_members)):
            return FailedHandshake.LATE
        if watched.seen_open - watched.begun >= SILENT_S:
            return FailedHandshake.SILENT
        return FailedHandshake.REFUSED

    def _add(self, kind: FailedHandshake, place: Place, now: float) -> None:
        count = self._counts[kind]
        host = place[0] if place[0] in count.hosts or len(count.hosts) < HOSTS_MAX else OTHERS
        count.since = count.since if count.total else now
        count.hosts[host] += 1
        count.newest = place

    def due(self, now: float) -> list[Report]:
        """Return the classes about which a log line is due."""
        self._add_unseen(now)
        found = []
        for kind, count in self._counts.items():
            if not count.total or now < count.line_at:
                continue
            is_first = count.since >= count.line_at  # there was none since the last interval ended
            interval = LINE_S if is_first else count.interval
            seconds = 0.0 if is_first else now - count.since
            found.append(Report(kind, dict(count.hosts), count.num_unseen, count.newest, seconds))
            self._counts[kind] = _Count(line_at=now + interval, interval=min(2 * interval, LINE_MAX_S))
        return found

    def _add_unseen(self, now: float) -> None:
        """Count the handshakes whose connection has ended unseen; the most recent ones may still be seen."""
        self._roll_window(now)
        ended = max(0, self._num_unseen - sum(self._recent))
        late = min(ended, self._num_starting)
        if ended or (self._first is not None and now - self._first > STARTING_S + 2 * WAIT_S):
            self._num_starting = 0  # the others of that time were seen, or proven
        for kind, number in ((FailedHandshake.LATE, late), (FailedHandshake.REFUSED, ended - late)):
            count = self._counts[kind]
            count.since = count.since if count.total or not number else now
            count.num_unseen += number
        self._num_unseen -= ended
