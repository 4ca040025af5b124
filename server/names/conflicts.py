"""The holders of names: which of two processes with one name is served, and whether there are two at all. Pure.

A name has one place, held by one process. Another process with this name is either the successor of an ended process
whose stream is half dead, and must get the place at once; or a second process beside a running one, and would
repeatedly take the place from it. The ids that a process sends distinguish these cases:

    the same process           a newer stream: it gets the place
    the same state directory   a restart, as a directory has one process at a time: it gets the place. If the
                               displaced process comes back, there are two, with copies of one directory: it is
                               refused while the other is here
    another state directory    refused while the holder is here; the holder is dropped at the end of its lease
    no ids (an older program)  it gets the place

A refused process waits VACANCY_S after the holder's stream has broken, so that a returning holder finds its place free.
A conflict is certain if the holder sends a message after the other process was refused or displaced.

Source: the session takeover of MQTT, in which the newest connection always gets the place (OASIS, "MQTT Version 5.0",
3.1.4-3 and reason code 0x8E).
"""

from dataclasses import dataclass, field

from atoll.ground.bounded_mapping import BoundedMapping
from atoll.ground.printable import count_of

VACANCY_S = 30.0
"""Time for which refused processes cannot take the place of a holder whose stream has broken [s]."""

LASTS_S = 300.0
"""Time after its last sign for which a conflict counts as persisting [s]; longer than the longest wait of a refused
process (`protocol/displaced.py`)."""

LINE_S, LINE_MAX_S = 60.0, 3600.0
"""First and longest interval between two log lines about one name, which doubles [s]."""

OLDER_PROGRAMS = 3
"""Number of replaced streams of programs without ids, each within LASTS_S of its predecessor, that is logged."""

NAMES_MAX, PROCESSES_MAX = 4096, 16
"""Numbers of names with rivals, and of processes and directories for each, that are remembered; the oldest is
forgotten."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """Process that asks for the place of a name."""

    address: str
    """host:port of its connection, as it arrives here."""
    process: str = ""
    """Random id of the process; empty: an older program."""
    folder: str = ""
    """Random id of its state directory."""


UNKNOWN = Claimant("an unknown address")
"""Unknown process."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Answer to a claimant."""

    refusal: str = ""
    """Reason why it does not get the place; empty: it does."""
    line: str = ""
    """Line due in the log; empty: none."""


@dataclass(slots=True)
class Conflict:
    """Name that two processes use at once."""

    name: str
    keeper: str
    """Address of the process that has the place."""
    other: str
    """Address of the other process."""
    count: int
    """Number of times that the other process has asked for the place."""
    since: float
    """Its first sign [s]."""
    until: float
    """Instant at which it counts as over without a further sign [s]."""
    sentence: str = ""
    """Conflict in words for an operator, with the remedy."""


@dataclass(slots=True)
class _Place:
    """Place of a name that had more than one process."""

    keeper: str = ""
    rivals: dict[str, float] = field(default_factory=dict)  # processes and folders without it, and since when
    left_at: float | None = None  # when the holder's stream broke; None: it is connected
    num_replaced: int = 0  # consecutive streams of older programs
    replaced_at: float = 0.0
    conflict: Conflict | None = None
    line_at: float = 0.0
    interval: float = LINE_S

    def add_rival(self, rival: Claimant, holder: Claimant, now: float) -> None:
        self.rivals[rival.process] = now
        if rival.folder and rival.folder != holder.folder:  # including its restarts
            self.rivals[rival.folder] = now
        while len(self.rivals) > PROCESSES_MAX:
            del self.rivals[next(iter(self.rivals))]

    def refused_at(self, claimant: Claimant) -> float | None:
        return self.rivals.get(claimant.process, self.rivals.get(claimant.folder))


class NameConflicts:
    """Places of all names of one kind.

    Args:
        what: the words before a name: "client" or "rank".
        way_out: the operator's remedy, as the end of a sentence.
    """

    def __init__(self, what: str, way_out: str) -> None:
        self._what, self._way_out = what, way_out
        self._places: BoundedMapping[str, _Place] = BoundedMapping(NAMES_MAX)

    def enter(self, name: str, claimant: Claimant, holder: Claimant | None, *, heard_at: float, now: float) -> Entry:
        """Decide whether a process gets the place of a name.

        Args:
            name: the name.
            claimant: the process that has connected.
            holder: the process whose stream holds the place; None: none does.
            heard_at: the instant of the holder's last message [s].
            now: the time [s].
        """
        if holder is None:
            return self._enter_vacant(name, claimant, now)
        if not claimant.process or not holder.process:
            return self._replace_older(name, claimant, holder, now)
        if claimant.process == holder.process:
            return Entry()
        place = self._place(name)
        place.left_at, place.keeper = None, holder.address
        refused_at = place.refused_at(claimant)
        if refused_at is None and claimant.folder and claimant.folder == holder.folder:
            place.add_rival(holder, claimant, now)
            place.keeper = claimant.address
            return Entry()
        if refused_at is None:
            place.add_rival(claimant, holder, now)
        line = ""
        if refused_at is not None and heard_at > refused_at:
            place.num_replaced = 0
            line = self._sign(place, Conflict(name, holder.address, claimant.address, 0, now, 0.0), now)
        return Entry(self._refusal(name, holder.address), line)

    def leave(self, name: str, now: float, *, for_good: bool) -> None:
        """Record the end of the holder's stream; `for_good`: it left cleanly, so that the place is free at once."""
        if (place := self._places.get(name)) is None:
            return
        place.left_at = None if for_good else now
        if for_good:
            place.rivals.clear()
            self._end(place, now)

    def current(self, now: float) -> list[Conflict]:
        """Return the persisting conflicts, by name."""
        found = [c for place in self._places.values() if (c := place.conflict) is not None and c.until > now]
        return sorted(found, key=lambda conflict: conflict.name)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            self._places[name] = _Place()
        return self._places[name]

    def _enter_vacant(self, name: str, claimant: Claimant, now: float) -> Entry:
        place = self._places.get(name)
        if place is None or place.left_at is None:
            return Entry()
        is_rival = place.refused_at(claimant) is not None
        if is_rival and now - place.left_at < VACANCY_S:
            return Entry(self._refusal(name, place.keeper))
        if is_rival:  # the other process has gone; the interval of the log is kept
            place.rivals.clear()
            self._end(place, now)
        place.left_at = None
        return Entry()

    @staticmethod
    def _end(place: _Place, now: float) -> None:
        if place.conflict is not None:
            place.conflict.until = min(place.conflict.until, now)

    def _replace_older(self, name: str, claimant: Claimant, holder: Claimant, now: float) -> Entry:
        """Give the place to the newer stream: without ids, a restart cannot be distinguished from a second process."""
        place = self._place(name)
        place.num_replaced = place.num_replaced + 1 if now - place.replaced_at < LASTS_S else 1
        place.replaced_at, place.left_at, place.keeper = now, None, claimant.address
        if place.num_replaced < OLDER_PROGRAMS:
            return Entry()
        return Entry(line=self._sign(place, Conflict(name, claimant.address, holder.address, 0, now, 0.0), now))

    def _sign(self, place: _Place, newest: Conflict, now: float) -> str:
        """Record a sign of a conflict, and return its log line if one is due."""
        older = place.conflict
        if older is not None and older.until > now:
            newest.count, newest.since = older.count, older.since
        elif older is not None and older.until + LINE_MAX_S < now:
            place.interval, place.line_at = LINE_S, 0.0
        newest.count, newest.until = newest.count + 1, now + LASTS_S
        newest.sentence = self._sentence(newest, is_certain=not place.num_replaced)
        place.conflict = newest
        if now < place.line_at:
            return ""
        place.line_at, place.interval = now + place.interval, min(2 * place.interval, LINE_MAX_S)
        return newest.sentence

    def _sentence(self, conflict: Conflict, *, is_certain: bool) -> str:
        name = f"{self._what} {conflict.name}"
        seconds = conflict.until - LASTS_S - conflict.since
        times = count_of(conflict.count + (0 if is_certain else OLDER_PROGRAMS - 1), "time")
        if not is_certain:
            return (
                f"{name} may be used twice: its connection from {conflict.other} was replaced by one from "
                f"{conflict.keeper}, {times} in a row; if it is, {self._way_out}"
            )
        return (
            f"{name} is used twice: the process at {conflict.keeper} has the place, and the one at {conflict.other} "
            f"asks for it ({times} in {seconds:.0f} s): {self._way_out}"
        )

    def _refusal(self, name: str, keeper: str) -> str:
        return (
            f"the process at {keeper} has the place of {self._what} {name} and keeps it while it is connected; if both "
            f"run, {self._way_out}"
        )
