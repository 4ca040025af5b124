"""The comparison of simulated runs in their folders, for `atoll compare DIR...`."""

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.experiments.rows import check_formats, draw, say_rows
from atoll.cli.faults import CommandError

if TYPE_CHECKING:
    from atoll.simulations.experiments.grid import Cell
    from atoll.simulations.experiments.report import RunReport

FOLDER = Path("atoll-compare-runs")
"""The default folder of the plots."""

OVER = ("seed",)
NOT_COMPARED = ("name", "simulation", *OVER)
"""The settings in which runs of one row may differ."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The options of the table of a comparison."""

    by: str | None
    columns: str | None
    markdown: bool
    csv: bool
    json: bool


def are_folders(what: Sequence[str]) -> bool:
    """Return whether the arguments are folders of runs, and no task."""
    return all(Path(each).is_dir() for each in what)


def check_one_task(what: Sequence[str], shown: Shown) -> None:
    """Check the arguments of a comparison that trains.

    Raises:
        CommandError: all mistakes.
    """
    given = {"--by": shown.by, "--columns": shown.columns, "--markdown": shown.markdown, "--csv": shown.csv}
    faults = [
        f"{name} is of folders of simulated runs: leave it out, or name their folders"
        for name, value in given.items()
        if value
    ]
    if len(what) > 1:
        faults.append(f"got {' '.join(what)}; allowed: one task or TOML, or folders of simulated runs")
    if faults:
        raise CommandError(*faults)


def compare_runs(
    folders: Sequence[Path],
    metric: str | None,
    target: float | None,
    shown: Shown,
    out: Path | None,
    *,
    plot: bool,
    not_used: Sequence[str],
) -> None:
    """Compare simulated runs in a table and in plots.

    Args:
        folders: their folders.
        metric: the metric, GROUP/NAME; None: the first one that is no loss.
        target: a value of the metric.
        shown: the options of the table.
        out: the folder of the plots; None: `FOLDER`.
        plot: whether to draw plots.
        not_used: the given options that are of a training.

    Raises:
        CommandError: all mistakes.
    """
    from atoll.simulations.experiments.bands import Repeats
    from atoll.simulations.experiments.plots import main_metric
    from atoll.simulations.experiments.table import Objective, chosen, compared, rows

    check_formats(shown.by, markdown=shown.markdown, csv=shown.csv, json=shown.json)
    if not_used:
        raise CommandError(f"{', '.join(not_used)}: nothing is trained for folders of runs: leave it out")
    columns = chosen(shown.columns.split(",") if shown.columns else None, target, shown.by)
    reports = _read(folders)
    known = dict.fromkeys(name for report in reports for name in report.metrics)
    if metric is not None and metric not in known:
        raise CommandError(f"--metric: got {metric!r}; the runs measure {', '.join(known) or 'nothing'}")
    objective = compared(Objective(metric or main_metric(reports), target, shown.by), reports)
    groups = _groups(reports)
    lines = rows(_cells(groups), objective, columns, list(OVER))
    say_rows(lines, objective, markdown=shown.markdown, csv=shown.csv, json=shown.json)
    if plot:
        draw([Repeats(runs[0].name, tuple(runs)) for runs in groups], out or FOLDER, objective)


def _cells(groups: "Sequence[Sequence[RunReport]]") -> "list[tuple[Cell, RunReport, str]]":
    """Return the runs as cells of a sweep, with their states; the first of a group gives its name."""
    from atoll.simulations.experiments.grid import Cell

    return [
        (
            Cell({"run": runs[0].name, "seed": str(run.settings.get("seed", 0))}, {}, ""),
            run,
            str(run.result.get("state", "unfinished")),
        )
        for runs in groups
        for run in runs
    ]


def _read(folders: Sequence[Path]) -> "list[RunReport]":
    """Read the runs, each with a name of its own.

    Raises:
        CommandError: a folder has no run, or is named twice; with all faults.
    """
    from atoll.simulations.experiments.report import NoReport, read_run

    found, faults = [], []
    folders = [run for folder in folders for run in runs_in(folder)]
    whole = [folder.absolute() for folder in folders]
    same_names = len({folder.name for folder in whole}) < len(whole)
    for folder, path in zip(folders, whole, strict=True):
        if whole.count(path) > 1:
            faults.append(f"{folder}: is named twice: leave one out")
        try:
            found.append(read_run(folder, str(folder) if same_names else path.name))
        except NoReport as error:
            faults.append(str(error))
    if faults:
        raise CommandError(*dict.fromkeys(faults))
    return found


def runs_in(folder: Path) -> list[Path]:
    """Return the cells of a sweep's folder; of another one the folder itself."""
    from atoll.simulations.experiments.report import ROUNDS

    cells = sorted(path.parent for path in folder.glob(f"*/{ROUNDS}"))
    return [folder] if (folder / ROUNDS).exists() or not cells else cells


def _groups(reports: "Sequence[RunReport]") -> "list[list[RunReport]]":
    """Return the runs in groups whose settings differ in the seed alone."""
    groups: dict[str, list[RunReport]] = {}
    for report in reports:
        settings = {key: value for key, value in report.settings.items() if key not in NOT_COMPARED}
        groups.setdefault(json_text.dumps(settings, sort_keys=True, default=str), []).append(report)
    return list(groups.values())
