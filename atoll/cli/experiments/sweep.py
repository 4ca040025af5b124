"""`atoll sweep`: simulate every combination of a grid of settings, and compare the runs in a table and plots."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.experiments.rows import By, Columns, Csv, Markdown, check_formats, draw, say_rows
from atoll.cli.printing import as_json, note
from atoll.cli.printing import table as say_table
from atoll.cli.stopping import INTERRUPTED, if_stopped
from atoll.protocol.signals import handled_by

if TYPE_CHECKING:
    from atoll.simulations.experiments.grid import Grid
    from atoll.simulations.experiments.sweep import Progress

What = Annotated[
    Path, typer.Argument(metavar="GRID", help="A run's TOML with a table \\[grid]; docs/experiments.md has an example.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The folder of all cells; by default atoll-sweep-NAME.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", metavar="N", callback=options.between(1), help="Number of runs at a time; by default sweep.jobs."
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="GROUP/NAME",
        help="The metric of the table, such as server/accuracy; by default sweep.metric.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option("--target", metavar="X", help="Value of the metric to reach; by default sweep.target."),
]
Show = Annotated[bool, typer.Option("--show", help="Run nothing; show the results so far.")]
Check = Annotated[
    bool, typer.Option("--check", help="Run nothing; check every cell as `atoll simulate --check`, and list the cells.")
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into DIR/plots.")]


def sweep(
    grid_file: What,
    out: Out = None,
    jobs: Jobs = None,
    metric: Metric = None,
    target: Target = None,
    columns: Columns = None,
    by: By = None,
    drop_empty: options.DropEmpty = False,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    show: Show = False,
    check: Check = False,
    markdown: Markdown = False,
    csv: Csv = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Simulate every combination of a grid of settings, several at a time, and compare them in a table and in plots.

    The same command completes an interrupted sweep: finished cells are not run again, interrupted ones resume. Exit
    code 1: a cell has failed; 130: Ctrl-C or SIGTERM.
    """
    if_stopped("before a cell began; nothing was written")
    from atoll.operations.load import overriding
    from atoll.simulations.experiments.grid import read_grid
    from atoll.simulations.experiments.sweep import Progress

    check_formats(by, markdown=markdown, csv=csv, json=json)

    grid = read_grid(grid_file, overriding(overrides, population__drop_empty=drop_empty or None))
    note_unused_of(grid, grid_file)
    folder = out or Path(f"atoll-sweep-{grid_file.stem}")
    asked = asked_of(grid, metric, target, columns.split(",") if columns else None, by)
    if not show:
        check_grid(grid, grid.cells if check else unfinished(grid, folder), asked.metric)
    elif asked.metric is not None:
        asked.metric.check_name()
    if check:
        _say_cells(grid, json)
        return
    progress = Progress() if show else _run(grid, folder, jobs or grid.sweep.jobs, asked)
    found = swept(grid, folder, asked, progress.states)
    say_rows(found.rows, found.objective, markdown=markdown, csv=csv, json=json)
    if plot:
        draw(found.drawn, folder / "plots", found.objective)
    if "failed" in progress.states.values():
        raise typer.Exit(1)


def _run(grid: "Grid", folder: Path, jobs: int, asked: Asked) -> "Progress":
    from atoll.cli.experiments.sweep_progress import SweepProgress
    from atoll.simulations.experiments.sweep import last_words, run_cells

    shown = SweepProgress(sys.stderr, note, grid, lambda name: last_words(folder / name))
    try:
        with handled_by(_interrupt):
            return run_cells(grid, folder, jobs=jobs, watch=watching(grid, folder, asked, shown.see))
    except KeyboardInterrupt:
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        shown.close()
        if_stopped("")


def _interrupt(_number: int, _frame: object) -> None:
    """Raise what Ctrl-C raises, which ends the running cells first."""
    raise KeyboardInterrupt


def _say_cells(grid: "Grid", json: bool) -> None:
    if json:
        as_json([{"folder": cell.folder, "task": cell.task, "settings": cell.settings} for cell in grid.cells])
        return
    say_table([*grid.columns, "folder"], [[*cell.varied.values(), cell.folder] for cell in grid.cells], empty="")
