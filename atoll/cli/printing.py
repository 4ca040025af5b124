"""The output of commands: tables and plain lines for a person, JSON for a script."""

import json
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import typer

from atoll.cli.log import has_log
from atoll.protocol.json_values import plain


def say(text: str) -> None:
    """Print one line to standard output."""
    typer.echo(text)


def note(text: str) -> None:
    """Print one line to standard error, as a line of this process's log if it has one."""
    if has_log():
        logging.getLogger("atoll").info("%s", text)
    else:
        typer.echo(text, err=True)


def complain(fault: str) -> None:
    """Print an operator's mistake to standard error, as a line of this process's log if it has one."""
    if has_log():
        logging.getLogger("atoll").error("%s", fault)
    else:
        typer.echo(f"atoll: {fault}", err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print aligned columns, one line a row, so that `grep` finds whole rows; without a row, note `empty`."""
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        note(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        say("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def as_json(value: object) -> None:
    """Print a value as JSON: dataclasses as objects, times in seconds since the epoch."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def as_json_line(value: object) -> None:
    """Print a value as JSON on one line, at once, for a script that reads while the command runs."""
    typer.echo(json.dumps(plain(value), ensure_ascii=False))


def say_settings(toml: str, *, json: bool, **found: object) -> None:
    """Print settings in TOML, or the same ones as JSON, with what else was found."""
    if json:
        as_json(tomllib.loads(toml) | found)
    else:
        say(toml.rstrip("\n"))


def cell(value: object) -> str:
    """Return a value as one cell of a table, on one line; `-` for None and an empty text."""
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def clock(at: float | None) -> str:
    """Return an instant, in seconds since the epoch, as date and local time."""
    return "-" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def seconds(duration: float | None) -> str:
    """Return a duration in seconds, from 600 s on in minutes."""
    if duration is None:
        return "-"
    return f"{duration:.1f} s" if duration < 600 else f"{duration / 60:.0f} min"


def metrics_text(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the metrics of one version as one cell: `accuracy 0.93, loss 0.21; clients: accuracy 0.91`."""
    parts = []
    for source, metrics in sorted(measured.items(), key=lambda one: (one[0] != "server", one[0])):
        listed = ", ".join(f"{name} {_metric_value(value)}" for name, value in metrics.items())
        parts.append(listed if source == "server" else f"{source}: {listed}")
    return "; ".join(parts)


def best_text(best: Mapping[str, Any]) -> str:
    """Return the best version as a sentence: `the best version is 7: auroc 0.87 (clients)`."""
    value = f"{best['metric']} {_metric_value(best['value'])}"
    return f"the best version is {best['version']}: {value} ({best['source']})"


def _metric_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else str(value)
