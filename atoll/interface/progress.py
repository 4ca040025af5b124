"""A progress bar on a terminal or in a notebook, and nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, int | None], None]
"""(done, total) -> None; a total of None leaves it as it is."""


@contextmanager
def bar_of(what: str, *, is_shown: bool) -> Iterator[Show]:
    """Show a progress bar with the time left.

    Args:
        what: what is counted, such as `rounds`.
        is_shown: show it, where there is a terminal or a notebook.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not (is_shown and (console.is_terminal or console.is_jupyter)):
        yield lambda done, total: None
        return
    with Progress(console=console) as bar:
        row = bar.add_task(what, total=None)

        def show(done: int, total: int | None) -> None:
            if total is not None:
                bar.update(row, total=total)
            bar.update(row, completed=done)

        yield show
