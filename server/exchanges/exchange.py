"""One exchange: the messages that one call sends, and the fate of each. Pure.

An open exchange holds each of its messages. A closed one is written as a record, and memory keeps only what a
repetition of the program needs (`Settled`).

    OPEN ---every message has ended, or the linger after the quorum is over---> closed

A message ends in exactly one fate: REPORTED (its reply is durable), FAILED (an error of the node or of its site's
policy), REFUSED (its reply is not sound), LOST (no such node), STRAGGLER (its deadline passed), or RELEASED (the
exchange closed, or the run ended, without it). An ended message never changes, so a closed exchange has the same
replies for every later process of the program.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.protocol.vocabulary import CloseReason, Digest, Fate, RoundId
from atoll.server.exchanges.call import Call
from atoll.server.exchanges.events import ExchangeAsked, Message
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.invariants import Violation

FILES_LOST = "files_lost"
"""Reason of a message whose content or reply was lost on the coordinator's disk."""

ANSWERED = frozenset({Fate.REPORTED, Fate.FAILED, Fate.REFUSED, Fate.LOST})
"""Fates of a message with a reply, which has content or says why there is none."""


@dataclass(slots=True)
class Sent:
    """Message with its number in the run and its fate."""

    number: RoundId
    message: Message
    deadline: float
    fate: Fate = Fate.WAITING
    reply: Digest | None = None
    """Digest of the reply's manifest, if the message is REPORTED."""
    num_bytes: int = 0
    reason: str = ""
    detail: str = ""
    delivered_at: float | None = None
    ended_at: float | None = None
    has_begun: bool = False
    """Whether the first bytes of a reply have arrived."""
    is_in_grace: bool = False

    @property
    def is_waiting(self) -> bool:
        """Return whether the message has not ended."""
        return self.fate is Fate.WAITING

    def lose_reply(self, why: str) -> None:
        """Record that the reply is lost before it was read: the message ends without one."""
        self.fate, self.reply, self.num_bytes = Fate.LOST, None, 0
        self.reason, self.detail = FILES_LOST, why


@dataclass(slots=True)
class Exchange:
    """Messages of one call, in its order."""

    number: int
    opened_at: float
    call: Call
    sent: list[Sent]
    num_wanted: int
    linger_by: float | None = None
    closed_at: float | None = None
    close_reason: CloseReason | None = None
    is_void: bool = False
    """Whether the run ended first: a later process of the program sends the messages again, in a new exchange."""
    extended: float = 0.0
    """Total time by which outages of the coordinator, and restarts of nodes after them, have moved the deadlines
    [s]."""

    @classmethod
    def opened(cls, number: int, first: RoundId, asked: ExchangeAsked, rules: ExchangeRules, now: float) -> "Exchange":
        """Return the exchange of a call; its messages are numbered from `first` on."""
        timeout = rules.deadline_max if asked.timeout is None else min(asked.timeout, rules.deadline_max)
        sent = [
            Sent(RoundId(first + place), message, now + max(0.0, min(message.ttl, timeout)))
            for place, message in enumerate(asked.messages)
        ]
        return cls(number, now, Call.of(asked), sent, rules.num_wanted(len(sent)))

    @property
    def numbers(self) -> tuple[RoundId, ...]:
        """The numbers of the exchange's messages, in order."""
        return tuple(one.number for one in self.sent)

    @property
    def is_open(self) -> bool:
        """Return whether some message has not ended."""
        return self.closed_at is None

    @property
    def waiting(self) -> Iterator[Sent]:
        """The messages that have not ended."""
        return (one for one in self.sent if one.is_waiting)

    @property
    def answered(self) -> tuple[RoundId, ...]:
        """The messages that have a reply, in the order of the call."""
        return tuple(one.number for one in self.sent if one.fate in ANSWERED)

    @property
    def deadline(self) -> float | None:
        """The time at which `time_passed` must be called [s since the epoch]; None: the exchange is closed."""
        if not self.is_open:
            return None
        instants = [one.deadline for one in self.waiting]
        if self.linger_by is not None:
            instants.append(self.linger_by)
        return min(instants, default=self.opened_at)

    def time_passed(self, now: float, grace: float) -> list[Sent]:
        """End the messages whose deadline has passed, or all once the linger is over, and return them.

        A message whose reply has begun to arrive gets `grace` seconds more, once.
        """
        is_over = self.linger_by is not None and now >= self.linger_by
        ended = []
        for one in self.waiting:
            if now < one.deadline and not is_over:
                continue
            if one.has_begun and not one.is_in_grace and grace > 0 and not is_over:
                one.deadline, one.is_in_grace = one.deadline + grace, True
                continue
            fate = Fate.RELEASED if is_over and now < one.deadline else Fate.STRAGGLER
            end(one, fate, now)
            ended.append(one)
        return ended

    def settle(self, now: float, linger: float) -> bool:
        """Close the exchange if it can close now; return whether it did."""
        if not self.is_open:
            return False
        if not any(self.waiting):
            self.closed_at, self.close_reason = now, self._reason()
            return True
        num_reported = sum(one.fate is Fate.REPORTED for one in self.sent)
        if self.call.is_waiting and self.linger_by is None and num_reported >= self.num_wanted:
            self.linger_by = now + linger
        return False

    def _reason(self) -> CloseReason:
        if any(one.fate is Fate.RELEASED for one in self.sent):
            return CloseReason.LINGER_OVER
        return (
            CloseReason.DEADLINE if any(one.fate is Fate.STRAGGLER for one in self.sent) else CloseReason.ALL_ANSWERED
        )

    def extend(self, seconds: float, most: float) -> None:
        """Move the deadlines by the time of an outage, up to `most` in total."""
        more = min(seconds, most - self.extended)
        self.extended += more
        for one in self.waiting:
            one.deadline += more
        if self.linger_by is not None:
            self.linger_by += more

    def validate(self) -> None:
        """Check that the open exchange waits for a message, and that each has one fate; raises Violation."""
        of = f"exchange {self.number}"
        if not self.is_open or not any(self.waiting):
            raise Violation(4, f"closed at {self.closed_at} and still open, or no message is awaited", of)
        for one in self.sent:
            if one.is_waiting != (one.ended_at is None):
                raise Violation(4, f"message {one.number} is {one.fate}, and ended at {one.ended_at}", of)
            if (one.fate is Fate.REPORTED) != (one.reply is not None):
                raise Violation(2, f"message {one.number} is {one.fate} with reply {one.reply}", of)


def end(sent: Sent, fate: Fate, now: float, reason: str = "", detail: str = "") -> None:
    """End a message."""
    assert sent.is_waiting, sent
    sent.fate, sent.ended_at, sent.reason, sent.detail = fate, now, reason, detail


@dataclass(frozen=True, slots=True)
class Settled:
    """Closed exchange: the numbers with which the calls of a later process are answered."""

    call: Call
    first: RoundId
    """The number of the exchange's first message."""
    missing: tuple[RoundId, ...]
    """The messages without a reply."""

    @classmethod
    def of(cls, exchange: Exchange) -> "Settled":
        """Return the part of a closed exchange that is kept."""
        missing = tuple(one.number for one in exchange.sent if one.fate not in ANSWERED)
        return cls(exchange.call, exchange.sent[0].number, missing)

    @property
    def numbers(self) -> tuple[RoundId, ...]:
        """The numbers of the exchange's messages, in order."""
        return tuple(RoundId(self.first + place) for place in range(self.call.num_messages))

    @property
    def answered(self) -> tuple[RoundId, ...]:
        """The messages that have a reply, in the order of the call."""
        return tuple(number for number in self.numbers if number not in self.missing)
