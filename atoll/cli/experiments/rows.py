"""The table of runs as a person, a page and a script read it, and its plots, for `atoll sweep` and `atoll compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table
from atoll.operations.faults import CommandError

if TYPE_CHECKING:
    from atoll.simulations.experiments.bands import Repeats
    from atoll.simulations.experiments.table import Objective, Row

BY = ("updates", "bytes", "time", "rounds", "seconds")
"""The values of --by, as in `bands.AXES`."""

Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print the table as CSV, with deviations and numbers of runs.")]


def check_formats(by: str | None, *, markdown: bool, csv: bool, json: bool) -> None:
    """Check the axis, and that at most one format is asked for.

    Raises:
        CommandError: all mistakes.
    """
    formats = [name for name, given in (("--markdown", markdown), ("--csv", csv), ("--json", json)) if given]
    faults = [f"{' and '.join(formats)} exclude each other: leave all but one out"] if len(formats) > 1 else []
    if by is not None and by not in BY:
        faults.append(f"--by: got {by!r}; allowed: {', '.join(BY)}")
    if faults:
        raise CommandError(*faults)


def say_rows(
    lines: "Sequence[Row]", objective: "Objective", *, markdown: bool = False, csv: bool = False, json: bool = False
) -> None:
    """Print the rows of a table."""
    from atoll.simulations.experiments.bands import number
    from atoll.simulations.experiments.table import as_csv, document_of
    from atoll.simulations.experiments.table import markdown as as_markdown

    if json:
        as_json(document_of(lines, objective))
        return
    if csv:
        say(as_csv(lines).rstrip("\n"))
        return
    metric = objective.metric
    place = "" if objective.common is None else number(objective.common)
    shown = {"final": f"final {metric}", "best": f"best {metric}", "at_common": f"{metric} at {place} {objective.by}"}
    over = dict.fromkeys(name for row in lines for name in row.over)
    has_open = any(row.state != "finished" for row in lines)
    first = lines[0]
    header = [*first.varied, *(shown.get(name, name) for name in first.values), *over, *(["state"] if has_open else [])]
    body = [
        [
            *row.varied.values(),
            *map(str, row.values.values()),
            *(", ".join(row.over.get(name, ())) for name in over),
            *([row.state] if has_open else []),
        ]
        for row in lines
    ]
    if markdown:
        say(as_markdown(header, body))
    else:
        say_table(header, body, empty="")


def draw(repeats: "Sequence[Repeats]", folder: Path, objective: "Objective") -> None:
    """Draw the plots of some runs into a folder, as far as matplotlib is installed."""
    from atoll.simulations.experiments.plots import NoMatplotlib, comparison_plot, metrics_plot, plots

    try:
        plots(repeats, folder, metric=objective.metric)
        metrics_plot(repeats, folder / "metrics.png")
        if objective.by is not None:
            comparison_plot(repeats, objective.metric, objective.by, folder / "comparison.png")
    except NoMatplotlib as error:
        note(str(error))
        return
    note(f"plots are in {folder}")
