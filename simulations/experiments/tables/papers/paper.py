"""A paper's table: its runs, and what is written of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.simulations.experiments.goal import Goal
from atoll.simulations.experiments.grid import Cell

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


@dataclass(frozen=True, slots=True)
class Paper:
    """One table of the page."""

    name: str
    """As it is asked for, and as its part of the page is called."""
    cells: Sequence[Cell]
    table: Callable[[Path], str]
    """The Markdown of what the runs in a folder have come to."""
    goal: Callable[[Cell], Goal | None] = lambda _: None
    """Where a run may end early."""
