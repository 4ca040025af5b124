"""The progress of work: a bar on a terminal, elsewhere a line now and then."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Drawn


class Progress:
    """A bar on a terminal, `round 12/200 ━━━━━ accuracy 0.87`, which disappears at the end; elsewhere such lines.

    Args:
        what: the name of what is counted, such as `round`.
        stream: the output; if it is a terminal, the bar is drawn on it.
        say: prints one line, where the output is not a terminal.
        is_counted: show `12/200`; else the text of each call says how much is done.
        every_s: least seconds between two lines.
        said_at: the instant before the first line, which follows `every_s` later; infinite: there are no lines.
    """

    def __init__(
        self,
        what: str,
        stream: TextIO,
        say: Callable[[str], None],
        *,
        is_counted: bool = True,
        every_s: float = 1.0,
        said_at: float = -math.inf,
    ) -> None:
        self._what, self._stream, self._say, self._is_counted = what, stream, say, is_counted
        self._every_s, self._said_at = every_s, said_at
        self._bar: Drawn | None = None

    def begin(self, total: float, done: float = 0) -> None:
        """Draw the bar before anything more is done."""
        if self._stream.isatty():
            self._draw(done, total, "")

    def show(self, done: float, total: float, text: str, *, at: float, is_last: bool = False) -> None:
        """Show how much is done.

        Args:
            done: the amount that is done.
            total: the amount of all.
            text: follows the bar, or ends the line.
            at: now, in seconds, on the scale of `said_at`.
            is_last: print the line in any case.
        """
        if self._stream.isatty():
            self._draw(done, total, text)
        elif at - self._said_at >= self._every_s or is_last:
            self._said_at = at
            self._say(f"{self._what} {done}/{total}  {text}" if self._is_counted else f"{self._what}: {text}")

    def tell(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            self._say(text)

    def _draw(self, done: float, total: float, text: str) -> None:
        if self._bar is None:
            self._bar = _bar(self._stream, self._is_counted)
            self._bar.add_task(self._what, text="")
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, text=text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO, is_counted: bool) -> "Drawn":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Drawn
    from rich.table import Column

    def text(field: str, **options: Any) -> TextColumn:
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=Column(no_wrap=True, **options))

    return Drawn(
        text("description"),
        *([MofNCompleteColumn(table_column=Column(no_wrap=True))] if is_counted else []),
        BarColumn(bar_width=12),
        text("fields[text]", overflow="ellipsis", ratio=1),
        console=Console(file=stream),
        transient=True,
        expand=True,
    )
