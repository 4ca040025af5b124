"""What commands print: a table or plain lines for a person, JSON for a script."""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime

import typer

from atoll.protocol.json_values import plain


def say(text: str) -> None:
    """One line to standard output."""
    typer.echo(text)


def note(text: str) -> None:
    """One line to standard error: for the person, not for the pipe."""
    typer.echo(text, err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Aligned columns, no row ever broken, so that `grep` finds whole ones; `empty` is noted when there is no row."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        note(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        say("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def as_json(value: object) -> None:
    """A value as JSON: dataclasses as objects, times as seconds since the epoch."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def cell(value: object) -> str:
    """One cell of a table, on one line."""
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def shortened(text: str, num_letters: int = 80) -> str:
    """The beginning of a text that a person wrote as long as they liked; JSON has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= num_letters else line[: num_letters - 1].rstrip() + "…"


def clock(at: float | None) -> str:
    """An instant, in local time."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def seconds(duration: float | None) -> str:
    """How long something took."""
    if duration is None:
        return "-"
    return f"{duration:.1f} s" if duration < 600 else f"{duration / 60:.0f} min"
