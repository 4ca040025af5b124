"""`atoll.compare`, and the comparison that it returns."""

import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from atoll.interface.arguments import check_target, folder_for
from atoll.interface.deployed import DeployedRun
from atoll.interface.errors import AtollError, one_error
from atoll.interface.figures import main_of, metric_of
from atoll.interface.overrides import overrides_of, plain_of
from atoll.interface.progress import bar_of
from atoll.interface.simulated import SimulatedRun, in_this_process
from atoll.interface.tables import Table
from atoll.interface.tasks import named
from atoll.interface.trained import Training, train_with
from atoll.interface.turns import in_turn, threads_kept
from atoll.operations.reporter import Reporter, reporting_to
from atoll.operations.requests import CompareRequest
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    import pandas

    from atoll.operations.requests import TrainRequest
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.report import Json

Run = SimulatedRun | Training | DeployedRun

KINDS: Mapping[type, str] = {SimulatedRun: "federated", Training: "centralized"}
"""The names of compared runs by their types; a deployed run has its id."""

LOG = "log.jsonl"
"""The file that the folder of a centralized training has, and no other."""

GROUPS = {"test": "server", "sites": "clients"}
"""The groups of a training's metrics as those of a federation."""


@overload
def compare(
    a: Run | Path | str,
    b: Run | Path | str,
    /,
    *more: Run | Path | str,
    metric: str | None = None,
    target: float | None = None,
    names: Sequence[str] = (),
) -> "Comparison": ...
@overload
def compare(
    a: Task | ArrayTask | str,
    /,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    set: Mapping[str, Any] | None = None,
    metric: str | None = None,
    target: float | None = None,
    out: Path | str | None = None,
    progress: bool = True,
) -> "Comparison": ...
@one_error()
@in_turn()
def compare(a: Any, /, *more: Any, **options: Any) -> "Comparison":
    """Compare runs with each other; or train a task federated and centralized, and compare the two, as `atoll compare`.

    `compare(a, b)` takes two or more of simulated runs, centralized trainings and deployed runs; of the first two also
    their folders. `compare(task)` makes the first two.

    Args:
        a: a run or its folder; or a task, its reference, or a run's TOML.
        more: the other runs, or their folders.
        options: for runs and a task: `metric`, such as "server/accuracy" (by default the first that is no loss), and
            `target`, a value of the metric to reach. For runs: their `names`, by default the ids of deployed ones. For
            a task: `rounds`, `clients`, `set` and `progress`, as of `simulate`, where `train.*` and `plan.*` in `set`
            are of the centralized training, `local.*` of both, and `train.epochs` is by default the federation's
            passes over the data; and `out`, a folder in which interrupted trainings resume.

    Raises:
        AtollError: settings, task or metric have faults, with all of them before anything runs; or a run fails.
    """
    first, *others = every = [_opened(each) for each in (a, *more)]
    check_target(options.get("target"))
    is_a_task = not others and not isinstance(first, Run)
    allowed = [*signature(_of_a_task if is_a_task else _of_runs).parameters][1:]
    if unknown := sorted(options.keys() - set(allowed)):
        raise AtollError(
            f"compare: got {', '.join(unknown)}; allowed for {'a task' if is_a_task else 'runs'}: {', '.join(allowed)}"
        )
    if is_a_task:
        return _of_a_task(first, **options)
    if wrong := [each for each in every if not isinstance(each, Run)]:
        got = type(wrong[0]).__name__ if not isinstance(wrong[0], str | Path) else str(wrong[0])
        runs = "simulated and deployed runs, trainings, folders of these"
        raise AtollError(f"compare: got {got}; allowed: {runs}, or one task alone")
    if not others:
        raise AtollError("compare: got one run; allowed: two or more, or one task")
    return _of_runs(every, **options)


def _opened(what: Any) -> Any:
    """Return the run in a folder; anything else unchanged."""
    if not isinstance(what, str | Path) or not Path(what).is_dir():
        return what
    return Training(what) if (Path(what) / LOG).exists() else SimulatedRun(what)


def _of_a_task(
    task: Task | ArrayTask | str,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    set: Mapping[str, Any] | None = None,
    metric: str | None = None,
    target: float | None = None,
    out: Path | str | None = None,
    progress: bool = True,
) -> "Comparison":
    from atoll.operations.compare import CENTRALIZED, FEDERATED, compare_trainings
    from atoll.operations.simulate import run_simulation
    from atoll.operations.training.job import job_of

    of_call = None if isinstance(task, str) else named(task)
    overrides = overrides_of(set)
    if of_call is not None and of_call.is_of_a_cell:
        overrides = [*in_this_process(set), *overrides]

    def federated(file: "SimulationFile", task: Task, folder: Path) -> "Json":
        with bar_of("rounds", is_shown=progress) as bar, threads_kept():
            return run_simulation(file, task, folder, lambda line: bar(line["version"] or 0, file.rounds))

    def centralized(request: "TrainRequest", task: Task) -> None:
        with bar_of("steps", is_shown=progress) as bar:
            train_with(job_of(request, task), request, bar)

    given = None if of_call is None else of_call.task
    what = str(task) if of_call is None else of_call.reference
    notes: list[str] = []
    with reporting_to(Reporter(notes.append)), folder_for(out) as folder:
        request = CompareRequest(
            what=[what],
            rounds=plain_of(rounds),
            clients=plain_of(clients),
            metric=metric,
            target=target,
            out=folder,
            overrides=overrides,
        )
        found = compare_trainings(request, federated=federated, centralized=centralized, task=given)
    comparison = Comparison(found.sides, target, (), notes)
    comparison.runs = (
        SimulatedRun(folder / FEDERATED, task=given, owner=comparison),
        Training(folder / CENTRALIZED, task=given, owner=comparison),
    )
    if out is None:
        weakref.finalize(comparison, shutil.rmtree, folder, ignore_errors=True)
    return comparison


def _of_runs(
    runs: Sequence[Run], *, metric: str | None = None, target: float | None = None, names: Sequence[str] = ()
) -> "Comparison":
    if names and len(names) != len(runs):
        raise AtollError(f"names: got {len(names)}; allowed: {len(runs)}, one for each run")
    kinds = [run.run_id if isinstance(run, DeployedRun) else KINDS[type(run)] for run in runs]
    numbered = [
        f"{kind} {kinds[: k + 1].count(kind)}" if kinds.count(kind) > 1 else kind for k, kind in enumerate(kinds)
    ]
    known = [_metrics(run) for run in runs]
    both = [name for name in known[0] if all(name in others for others in known)]
    chosen = metric_of(both, metric or main_of(both))
    sides = [_side(run, chosen, name) for run, name in zip(runs, names or numbered, strict=True)]
    return Comparison(sides, target, tuple(runs))


def _metrics(run: Run) -> list[str]:
    """Return the metrics that a run has measured, GROUP/NAME as in a federation."""
    if isinstance(run, SimulatedRun):
        return list(run.report.metrics)
    if isinstance(run, Training):
        parts = [name.partition("/") for name in run.evaluations.columns if "/" in name]
        return [f"{GROUPS.get(group, group)}/{name}" for group, _, name in parts]
    return list(run._metrics())


def _side(run: Run, metric: str, name: str) -> "Side":
    """Return the measurements of a run, as far as its folder and its task tell them."""
    from atoll.simulations.experiments.compare import centralized, federated, pooled

    if isinstance(run, SimulatedRun):
        return federated(run.report, metric, epochs=_epochs(run), kind=name)
    if isinstance(run, Training):
        data_bytes = pooled(run.task).bytes if isinstance(run.task, Task) else None
        return centralized(run.folder / LOG, metric, data_bytes=data_bytes, kind=name)
    return _deployed(run, metric, name)


def _epochs(run: SimulatedRun) -> Callable[[int], float] | None:
    """Return the passes of a client over its data in each round; None: the task is unknown."""
    from atoll.protocol.settings import load_text
    from atoll.simulations.experiments.compare import epochs_of, pooled
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.setting import as_given
    from atoll.task.given import Given

    if not isinstance(run.task, Task):
        return None
    file = load_text(SimulationFile, (run.folder / "run.toml").read_text("utf-8"), name="")
    task = as_given(file, run.task)
    assert isinstance(task, Task)
    data, given = pooled(task), Given.read(file.run.given)
    return lambda round_: epochs_of(given.local_of(task.local, round_), data.num_examples, run.report.num_clients)


def _deployed(run: DeployedRun, metric: str, name: str) -> "Side":
    from atoll.simulations.experiments.compare import Point, Side

    versions = run.versions
    rounds = {row["version"]: row["round"] for row in run.rounds if row["version"] is not None}
    key = run._metrics()[metric]
    begun = versions[0]["created_at"] if len(versions) else 0.0
    points = [
        Point(row[key], rounds[row["version"]], None, None, None, row["created_at"] - begun)
        for row in versions
        if row["version"] in rounds and row.get(key) is not None
    ]
    return Side(name, "rounds", metric, tuple(points))


class Comparison:
    """Runs beside each other: metric, rounds or steps, passes over the data, bytes, time.

    `runs` are the compared runs, of a task the federated one and the centralized training.
    """

    def __init__(
        self, sides: "Sequence[Side]", target: float | None, runs: Sequence[Run], notes: Sequence[str] = ()
    ) -> None:
        self._sides, self.target, self.runs, self.notes = sides, target, runs, notes

    @property
    def metric(self) -> str:
        """The metric that is compared."""
        return self._sides[0].metric

    @property
    def rows(self) -> Table:
        """The table of the command: a row for each run, and with a target a second one with the cost to reach it.

        Bytes are the data that must move; unknown values are None.
        """
        return Table([{"run" if name == "" else name: value for name, value in row.items()} for row in self._rows])

    @property
    def points(self) -> Table:
        """The measurements: run, value, count of rounds or steps, passes, bytes, virtual and real seconds."""
        from dataclasses import asdict

        return Table([{"run": side.kind} | asdict(point) for side in self._sides for point in side.points])

    @property
    def document(self) -> Mapping[str, Any]:
        """The comparison in JSON types, as `atoll compare --json`."""
        from atoll.simulations.experiments.compare import document_of

        return document_of(self._sides, self.target)

    def frame(self) -> "pandas.DataFrame":
        """Return `rows` as a data frame of pandas."""
        return self.rows.frame()

    def plot(self) -> Any:
        """Return a figure of matplotlib with the metric over passes and over real seconds.

        Raises:
            AtollError: matplotlib is not installed.
        """
        from atoll.simulations.experiments.compare import figure_of
        from atoll.simulations.experiments.plots import NoMatplotlib

        with one_error(NoMatplotlib):
            return figure_of(self._sides)

    @property
    def _rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.document["rows"]
        return found

    def __repr__(self) -> str:
        return f"Comparison({self.metric}: {', '.join(side.kind for side in self._sides)})"

    def _repr_html_(self) -> str:
        return f"<p>{self.metric}</p>{self.rows._repr_html_()}"
