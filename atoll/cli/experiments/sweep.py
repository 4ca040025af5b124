"""`atoll sweep`: simulate every combination of a grid of settings, and compare the runs in a table and plots."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.experiments.rows import Csv, Markdown, check_formats, draw, say_rows
from atoll.cli.printing import as_json, note
from atoll.cli.printing import table as say_table
from atoll.cli.requested import requested
from atoll.ground.process.loading import loading
from atoll.operations.faults import Interrupted
from atoll.operations.requests import SweepRequest
from atoll.protocol.signals import ExitCode, handled_by

if TYPE_CHECKING:
    from atoll.operations.sweep import Asked
    from atoll.simulations.experiments.grid import Grid
    from atoll.simulations.experiments.sweep import Progress

Show = Annotated[bool, typer.Option("--show", help="Run nothing; show the results so far.")]
Check = Annotated[
    bool, typer.Option("--check", help="Run nothing; check every cell as `atoll simulate --check`, and list the cells.")
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into DIR/plots.")]


@requested(SweepRequest)
def sweep(
    request: SweepRequest,
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
    check_formats(request.by, markdown=markdown, csv=csv, json=json)
    with loading():
        from atoll.operations.sweep import asked_of, check_grid, grid_of, swept, unfinished
        from atoll.simulations.experiments.sweep import Progress

    grid = grid_of(request)
    folder = request.out or Path(f"atoll-sweep-{request.grid_file.stem}")
    columns = request.columns.split(",") if request.columns else None
    asked = asked_of(grid, request.metric, request.target, columns, request.by)
    if not show:
        check_grid(grid, grid.cells if check else unfinished(grid, folder), asked.metric)
    elif asked.metric is not None:
        asked.metric.check_name()
    if check:
        _say_cells(grid, json)
        return
    progress = Progress() if show else _run(grid, folder, request.jobs or grid.sweep.jobs, asked)
    found = swept(grid, folder, asked, progress.states)
    say_rows(found.rows, found.objective, markdown=markdown, csv=csv, json=json)
    if plot:
        draw(found.drawn, folder / "plots", found.objective)
    if "failed" in progress.states.values():
        raise typer.Exit(ExitCode.FAILED)


def _run(grid: "Grid", folder: Path, jobs: int, asked: "Asked") -> "Progress":
    from atoll.cli.experiments.sweep_progress import SweepProgress
    from atoll.operations.sweep import watching
    from atoll.simulations.experiments.sweep import last_words, run_cells

    try:
        with (
            SweepProgress(sys.stderr, note, grid, lambda name: last_words(folder / name)) as shown,
            handled_by(signal.default_int_handler),  # it raises what ends the running cells first
        ):
            return run_cells(grid, folder, jobs=jobs, watch=watching(grid, folder, asked, shown.see))
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        if_stopped("")


def _say_cells(grid: "Grid", json: bool) -> None:
    if json:
        as_json([{"folder": cell.folder, "task": cell.task, "settings": cell.settings} for cell in grid.cells])
        return
    say_table([*grid.columns, "folder"], [[*cell.varied.values(), cell.folder] for cell in grid.cells], empty="")
