"""`atoll run statistics`: statistics of the sites' data before a training, merged exactly."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, clock, say, table
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE
from atoll.operations.runs import collect
from atoll.operations.statistics_tables import Rows, Split, headline, parts_of
from atoll.operations.views import read_view

ROWS_MAX = 40
"""Most rows of one table; --json has all."""

What = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK | RUN.toml",
        help="The TOML of the planned run, or its task (`module:attribute` or `path/to/file.py:attribute`).",
        show_default=False,
    ),
]
Deadline = Annotated[
    float,
    typer.Option(
        "--deadline",
        metavar="SECONDS",
        callback=options.between(0.1, 86_400),
        help="Seconds in which sites may answer; the command ends as soon as all have.",
    ),
]
Show = Annotated[
    int | None,
    typer.Option(
        "--show",
        metavar="NUMBER",
        callback=options.between(0, 2**31),
        help="Show the kept result of this number again, and ask no site; 0: the newest.",
    ),
]


def statistics(
    what: What = None,
    state: options.StateOfRun = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    deadline: Deadline = 300.0,
    show: Show = None,
    json: options.Json = False,
) -> None:
    """Ask the connected sites of a task for statistics of their data before a run: counts, labels, moments, other sums.

    No model is involved, and no run begins. Each site's policy decides what leaves it. The sums are exact: mean and
    variance equal those of the pooled data. Before a run with secure sums the statistics that secure.statistics names
    are added in one, and no site's numbers are known. `docs/statistics.md` explains the output.
    """
    if (what is None) == (show is None):
        got = "" if what is None else f"got {what} and --show {show}: "
        raise CommandError(
            f"{got}name the task of the planned run, or its TOML, to ask the sites; or --show 0 for the newest result"
        )
    if what is None:
        if overrides:
            raise CommandError(f"--set {overrides[0]}: a kept result does not change: name a task, or leave out --set")
        found = read_view("statistics", state or STATE, number=show or 0)
    else:
        where, number = collect(what, state, overrides, deadline)
        found = read_view("statistics", where, number=number)
    if json:
        as_json(found)
    else:
        say_statistics(found)


def say_statistics(found: Mapping[str, Any]) -> None:
    """Print statistics as tables: all sites together, each site that allows it, and the reasons."""
    if "number" in found:
        say(headline(found, clock(found["ended_at"])))
    for part in parts_of(found):
        match part:
            case Split(name):
                say(f"\n{name}:")
            case Rows(columns, rows):
                say("")
                table(columns, [[*map(_cell, row)] for row in rows[:ROWS_MAX]], empty="")
                if len(rows) > ROWS_MAX:
                    say(f"... and {count_of(len(rows) - ROWS_MAX, 'row')} more; --json has all")
            case str():
                say(part)


def _cell(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
