"""A progress bar on a terminal or in a notebook, and nothing elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Show = Callable[[int, int | None], None]
"""(done, total) -> None; a total of None keeps the last one."""

EVERY_S = 0.1
"""Least seconds between two updates of a bar in a notebook."""


@contextmanager
def bar_of(what: str, *, is_shown: bool) -> Iterator[Show]:
    """Show a progress bar with the time left, which disappears at the end.

    Args:
        what: the name of the counted things, such as `rounds`.
        is_shown: show it, where there is a terminal or a notebook.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not (is_shown and (console.is_terminal or console.is_jupyter)):
        yield lambda done, total: None
        return
    bar = Progress(console=console, transient=True)
    row = bar.add_task(what, total=None)
    with _in_a_cell(bar) if console.is_jupyter else _on_a_terminal(bar) as refresh:

        def show(done: int, total: int | None) -> None:
            bar.update(row, completed=done, total=total)
            refresh()

        yield show


@contextmanager
def _on_a_terminal(bar: "Progress") -> Iterator[Callable[[], None]]:
    with bar:
        yield lambda: None


@contextmanager
def _in_a_cell(bar: "Progress") -> Iterator[Callable[[], None]]:
    """Show the bar under a notebook's cell; rich itself would ask for ipywidgets."""
    from IPython.display import display

    shown_at, place = time.monotonic(), display(bar, display_id=True)  # type: ignore[no-untyped-call]

    def refresh() -> None:
        nonlocal shown_at
        if (now := time.monotonic()) - shown_at >= EVERY_S:
            shown_at = now
            place.update(bar)

    try:
        yield refresh
    finally:
        place.update({"text/plain": ""}, raw=True)
