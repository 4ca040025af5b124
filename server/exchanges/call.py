"""A call that sends messages, without their contents: a repetition by a new process is compared with it. Pure."""

import hashlib
from dataclasses import dataclass
from typing import Self

from atoll.server.exchanges.events import ExchangeAsked, Message

CHARACTERS = 16
"""Number of characters of a message's digest in `Call.messages`: 64 bits, so that a collision needs about 2^32
messages."""


@dataclass(frozen=True, slots=True)
class Call:
    """Messages of a call, without their contents: a run may have a million."""

    messages: str
    """Prefixes of the SHA-256 of each message, in the order of the call."""
    in_order: bool
    is_waiting: bool

    @classmethod
    def of(cls, asked: ExchangeAsked) -> Self:
        """Return the call that an event describes, without the contents of its messages."""
        return cls("".join(map(_digest, asked.messages)), asked.in_order, asked.is_waiting)

    @property
    def num_messages(self) -> int:
        """The number of messages of the call."""
        return len(self.messages) // CHARACTERS

    def sends_as(self, other: "Call") -> bool:
        """Return whether another call sends the same messages; both may come from the main thread or from others."""
        return (self.messages, self.is_waiting) == (other.messages, other.is_waiting)


def difference(before: Call, asked: ExchangeAsked) -> str:
    """Return how a call differs from the one that opened an exchange; empty: it sends the same.

    It compares the nodes, kinds, groups and digests of the messages, in order; not their times.
    """
    now = Call.of(asked)
    if before.sends_as(now):
        return ""
    if before.num_messages != now.num_messages:
        return f"it sent {before.num_messages} before, now {now.num_messages}"
    if before.is_waiting != now.is_waiting:
        said = {True: "waits for the replies", False: "pulls them"}
        return f"it {said[before.is_waiting]} in the journal, now it {said[now.is_waiting]}"
    places = range(before.num_messages)
    place = next(p for p in places if _at(before, p) != _at(now, p))
    return f"message {place + 1} of {len(places)} differs from before: now {_said(asked.messages[place])}"


def _digest(message: Message) -> str:
    compared = (message.client_id, message.kind, message.group, message.content)
    return hashlib.sha256(repr(compared).encode()).hexdigest()[:CHARACTERS]


def _at(call: Call, place: int) -> str:
    return call.messages[place * CHARACTERS : (place + 1) * CHARACTERS]


def _said(message: Message) -> str:
    group = f" in group {message.group!r}" if message.group else ""
    return f"{message.kind} to {message.client_id}{group} with content {message.content[:12]}"
