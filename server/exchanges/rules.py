"""The rules of a run of messages: deadlines, quorum, bounds. Pure values."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """The rules that hold for every exchange of a run."""

    quorum: float = 1.0
    """Share of an exchange's messages whose replies are enough to close it after `linger`; 1: it waits for all."""
    linger: float = 0.0
    """Time that an exchange stays open once its quorum is in [s]."""
    deadline_max: float = 43200.0
    """Longest time from an exchange to its deadline [s], whatever the program asks for."""
    grace: float = 0.0
    """Time after the deadline for an upload that has begun [s]."""
    outage_max: float = 3600.0
    """Longest time by which an outage of the coordinator moves the deadline of an exchange, in all [s]."""
    hold: float = 600.0
    """Time in which the threads of a repeated program must have asked for what they asked for before [s]."""
    keep_replies: int = 0
    """The newest exchanges whose replies stay, so that a program that asked for more cannot be repeated; 0: all."""
    restarts_max: int = 3
    """Most deaths of the program's process without a new exchange in between, after which the run fails."""

    def num_wanted(self, num_messages: int) -> int:
        """Return the number of replies with content that is a quorum: ceil(quorum * num_messages), at least 1."""
        return max(1, math.ceil(round(self.quorum * num_messages, 9)))
