"""The rules of a run of messages: deadlines, quorum, bounds. Pure values."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """Rules that hold for every exchange of a run."""

    quorum: float = 1.0
    """Share of an exchange's messages whose replies suffice to close it after `linger`; 1: it waits for all."""
    linger: float = 0.0
    """Time that an exchange stays open once its quorum is in [s]."""
    deadline_max: float = 43200.0
    """Longest time from an exchange to its deadline [s], whatever the program requests."""
    grace: float = 0.0
    """Time after the deadline for an upload that has begun [s]."""
    outage_max: float = 3600.0
    """Longest total time by which outages of the coordinator move the deadline of an exchange [s]."""
    hold: float = 600.0
    """Time within which the threads of a repeated program must have repeated their requests [s]."""
    keep_replies: int = 0
    """Number of the newest exchanges whose replies are kept; a program that has requested more cannot be repeated. 0:
    all."""
    restarts_max: int = 3
    """Number of deaths of the program's process without a new exchange in between, after which the run fails."""

    def num_wanted(self, num_messages: int) -> int:
        """Return the number of replies with content that is a quorum: ceil(quorum * num_messages), at least 1."""
        return max(1, math.ceil(round(self.quorum * num_messages, 9)))
