"""The table of a paper: its runs, and the function that writes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.simulations.experiments.grid import Cell
from benchmarks.papers.goal import Goal

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Paper:
    """One table of the page."""

    name: str
    """Name of the table on the command line and of its part of the page."""
    cells: Sequence[Cell]
    table: Callable[[Path], str]
    """Function from the folder of the runs to the table in Markdown."""
    goal: Callable[[Cell], Goal | None] = lambda _: None
    """Function from a cell to the goal at which it ends early; None: it runs to the end."""
