"""The interface of the world for its processes: virtual time, chance, and the history that they write."""

import random
from collections.abc import Callable
from typing import Protocol

from tests.histories.history import History
from tests.histories.scenario import Scenario


class Endpoint(Protocol):
    """A process of the world, which dies and restarts, or sleeps; it owns the actions that it plans.

    An action of an earlier life does not happen; a sleep delays it.
    """

    life: int
    """The number of times that the process has died."""
    slept: float
    """The time that it has slept in all [s]."""
    wakes_at: float
    """The instant at which its last sleep ends, on the world's clock [s]."""


class World(Protocol):
    """The world around a process."""

    now: float
    """The instant on the world's clock [s]."""
    rng: random.Random
    scenario: Scenario
    history: History

    def at(self, when: float, action: Callable[[], None], owner: Endpoint | None = None) -> None:
        """Plan an action; drop it if its owner dies before, delay it while its owner sleeps."""

    def after(self, seconds: float, action: Callable[[], None], owner: Endpoint | None = None) -> None:
        """Plan an action in `seconds`, as `at` does."""

    def happens(self, fault: str, share: float = 1.0) -> bool:
        """Draw whether a fault happens, by the name of its field in `Faults`; its chance is multiplied by `share`."""

    def latency(self) -> float:
        """Draw the time of one way through the network [s]."""

    def wait(self, seconds: float) -> float:
        """Draw how long a wait of `seconds` really takes [s]."""

    def fail(self, why: str) -> None:
        """Fail the history, because of an event that must never happen."""

    def remark(self, who: str, what: str) -> None:
        """Write a line for the reader of the history."""
