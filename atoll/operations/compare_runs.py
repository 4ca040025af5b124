"""The comparison of simulated runs in their folders, for `atoll compare DIR...`."""

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.operations.faults import CommandError
from atoll.operations.requests import CompareRequest
from atoll.simulations.experiments.bands import Repeats
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.plots import main_metric
from atoll.simulations.experiments.report import ROUNDS, NoReport, RunReport, read_run
from atoll.simulations.experiments.table import Objective, Row, chosen, compared, rows

OVER = ("seed",)
NOT_COMPARED = ("name", "simulation", *OVER)
"""The settings in which runs of one row may differ."""


@dataclass(frozen=True, slots=True)
class RunsCompared:
    """Simulated runs beside each other: the table, and the curves to draw."""

    rows: Sequence[Row]
    objective: Objective
    drawn: Sequence[Repeats]


def compare_runs(request: CompareRequest) -> RunsCompared:
    """Compare the simulated runs in the folders of a request.

    Raises:
        CommandError: all mistakes.
    """
    training = {name: getattr(request, name) for name in ("rounds", "clients", "epochs")}
    training |= {"set": request.overrides, "drop-empty": request.drop_empty}
    if not_used := [f"--{name}" for name, value in training.items() if value]:
        raise CommandError(f"{', '.join(not_used)}: nothing is trained for folders of runs: leave it out")
    columns = chosen(request.columns.split(",") if request.columns else None, request.target, request.by)
    reports = _read([Path(folder) for folder in request.what])
    known = dict.fromkeys(name for report in reports for name in report.metrics)
    if request.metric is not None and request.metric not in known:
        raise CommandError(f"--metric: got {request.metric!r}; the runs measure {', '.join(known) or 'nothing'}")
    objective = compared(Objective(request.metric or main_metric(reports), request.target, request.by), reports)
    groups = _groups(reports)
    drawn = [Repeats(runs[0].name, tuple(runs)) for runs in groups]
    return RunsCompared(rows(_cells(groups), objective, columns, list(OVER)), objective, drawn)


def _cells(groups: Sequence[Sequence[RunReport]]) -> list[tuple[Cell, RunReport, str]]:
    """Return the runs as cells of a sweep, with their states; the first of a group gives its name."""
    return [
        (
            Cell({"run": runs[0].name, "seed": str(run.settings.get("seed", 0))}, {}, ""),
            run,
            str(run.result.get("state", "unfinished")),
        )
        for runs in groups
        for run in runs
    ]


def _read(folders: Sequence[Path]) -> list[RunReport]:
    """Read the runs, each with a distinct name.

    Raises:
        CommandError: a folder has no run, or is named twice; with all faults.
    """
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
    """Return the cells of a sweep's folder; another folder is returned itself."""
    cells = sorted(path.parent for path in folder.glob(f"*/{ROUNDS}"))
    return [folder] if (folder / ROUNDS).exists() or not cells else cells


def _groups(reports: Sequence[RunReport]) -> list[list[RunReport]]:
    """Return the runs in groups whose settings differ in the seed alone."""
    groups: dict[str, list[RunReport]] = {}
    for report in reports:
        settings = {key: value for key, value in report.settings.items() if key not in NOT_COMPARED}
        groups.setdefault(json_text.dumps(settings, sort_keys=True, default=str), []).append(report)
    return list(groups.values())
