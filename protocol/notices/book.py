"""The notification state: which conditions persist, what was sent about each and when, what is due. Pure.

A message is due when a condition begins, and for most conditions again each day while it persists; if it ends and
begins again within an hour there is no second message. A failed message stays due. The state is written before each
attempt, so that a process that crashes meanwhile repeats it an hour later at the earliest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from atoll.protocol.notices.notice import ENDS, FEW, Notice

HOUR_S = 3600.0
"""Shortest time between two messages about one condition of one subject [s]."""

REMIND_S = 86400.0
"""Time after which a persisting condition is reported again [s]."""

EVENTS_MAX = 1000
"""Number of events that are remembered, so that a repetition is not reported; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Told:
    """Newest message about one condition of one subject."""

    at: float
    """Time of the message [s since the epoch]; 0: none was sent, because the condition is older than this state."""
    sentence: str
    lasts: bool = True
    """Whether the condition has persisted since."""
    is_event: bool = False


@dataclass(frozen=True, slots=True)
class Due:
    """Notice whose message is due or being sent."""

    notice: Notice
    since: float
    """Time since which it has been due [s since the epoch]."""


@dataclass
class Book:
    """Notification state of one process, kept across its restarts."""

    told: dict[str, Told] = field(default_factory=dict)
    begun: dict[str, float] = field(default_factory=dict)
    """Start times of the conditions that must persist before they are reported [s since the epoch]."""
    due: dict[str, Due] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    """Facts whose change is an event, by subject: the software of each site."""
    lasting: list[str] = field(default_factory=list)
    """Messages about the persisting conditions, for commands."""
    is_new: bool = True
    """Whether conditions were never checked: a run that ended before the first check is not reported."""

    def since(self, key: str, now: float) -> float:
        """Return when a condition that must persist has begun [s since the epoch]."""
        return min(self.begun.get(key, now), now)

    def look(self, active: Sequence[Notice], now: float) -> None:
        """Record the conditions that hold at `now`; all others have ended.

        Args:
            active: one notice for each condition and subject.
            now: the time [s since the epoch]; if the clock was set back, no interval shrinks by more than the clock was
                ahead.
        """
        self._follow_clock(now)
        by_key = {notice.key: notice for notice in active}
        self.begun = {key: self.begun.get(key, now) for key, notice in by_key.items() if notice.hold}
        ready = {key: each for key, each in by_key.items() if now - self.begun.get(key, 0.0) >= each.hold}
        self.lasting = [each.sentence for each in ready.values() if each.condition not in ENDS]
        for key, told in list(self.told.items()):
            if told.is_event or key in ready:
                continue
            if now - told.at >= HOUR_S:
                del self.told[key]
            elif told.lasts:
                self.told[key] = Told(told.at, told.sentence, lasts=False)
        self.due = {key: due for key, due in self.due.items() if key in ready or self._is_event(key)}
        for key, notice in ready.items():
            self._note(key, notice, now)
        self.is_new = False

    def _note(self, key: str, notice: Notice, now: float) -> None:
        told, is_end = self.told.get(key), notice.condition in ENDS
        if told is None and is_end and self.is_new:
            self.told[key] = Told(0.0, notice.sentence)
        elif told is None or not told.lasts:
            self.due[key] = Due(notice, self.due[key].since if key in self.due else now)
        elif key not in self.due and not (is_end or notice.is_once) and now - told.at >= REMIND_S:
            self.due[key] = Due(notice, now)

    def post(self, notice: Notice, now: float) -> None:
        """Record an event; one with the same message as before is a repetition."""
        told = self.told.get(notice.key)
        if told is None or told.sentence != notice.sentence:
            self.due[notice.key] = Due(notice, now)
            self.told[notice.key] = Told(told.at if told else -HOUR_S, told.sentence if told else "", is_event=True)

    def note_fact(self, subject: str, fact: str) -> str | None:
        """Record a fact; return the previous one if it differs; None: it is the first, or the same."""
        before, self.facts[subject] = self.facts.get(subject), fact
        return None if before == fact else before

    def ready(self, now: float) -> list[list[Due]]:
        """Return what may be sent at `now`, by message: one notice, or all notices of a frequent condition."""
        groups: dict[str, list[Due]] = {}
        for key, due in sorted(self.due.items(), key=lambda item: (item[1].since, item[0])):
            told = self.told.get(key)
            if told is None or now - told.at >= HOUR_S:
                groups.setdefault(due.notice.condition, []).append(due)
        return [part for group in groups.values() for part in ([group] if len(group) > FEW else [[it] for it in group])]

    def attempted(self, group: Iterable[Due], now: float) -> dict[str, Told | None]:
        """Record an attempt to send a group; return what `failed` needs to undo it."""
        before = {}
        for due in group:
            key = due.notice.key
            before[key] = self.told.get(key)
            self.told[key] = Told(now, due.notice.sentence, is_event=self._is_event(key))
        return before

    def succeeded(self, group: Iterable[Due]) -> None:
        """Record that a group was sent."""
        for due in group:
            self.due.pop(due.notice.key, None)
        events = [key for key, told in self.told.items() if told.is_event]
        for key in sorted(events, key=lambda each: self.told[each].at)[:-EVENTS_MAX]:
            del self.told[key]

    def failed(self, before: dict[str, Told | None]) -> None:
        """Undo a failed attempt."""
        for key, told in before.items():
            if told is None:
                self.told.pop(key, None)
            else:
                self.told[key] = told

    def _is_event(self, key: str) -> bool:
        return key in self.told and self.told[key].is_event

    def _follow_clock(self, now: float) -> None:
        """Replace a time in the future, from a clock that was ahead, by the present time."""
        self.begun = {key: min(at, now) for key, at in self.begun.items()}
        for key, told in self.told.items():
            if told.at > now:
                self.told[key] = Told(now, told.sentence, told.lasts, told.is_event)
