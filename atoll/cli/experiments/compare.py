"""`atoll compare`: train a task federated and centralized, and compare the two."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.aggregation.printable import printable_size
from atoll.cli import options
from atoll.cli.experiments.compare_runs import Shown, are_folders, check_one_task, compare_runs
from atoll.cli.experiments.rows import By, Columns, Csv, Markdown
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table
from atoll.cli.stopping import INTERRUPTED, if_stopped

if TYPE_CHECKING:
    from atoll.cli.training.request import Request
    from atoll.parallel.task.array_task import ArrayTask
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.federation import Federation
    from atoll.simulations.federation.report import Json

FEDERATED, CENTRALIZED, RESULT, PLOT = "federated", "centralized", "compare.json", "compare.png"

What = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK | RUN.toml | DIR...",
        help="A task, or the TOML of a simulated run, as for `atoll simulate`; or the folders of simulated runs or "
        "of sweeps, which are compared as they are.",
    ),
]
Rounds = Annotated[
    int | None, typer.Option("--rounds", metavar="N", help="Rounds of the federated run; short for rounds.")
]
Clients = Annotated[
    int | None,
    typer.Option(
        "--clients",
        metavar="N",
        help="Clients of the federated run, with an iid split of the data unless population.kind is set.",
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs",
        metavar="N",
        help="Epochs of the centralized training; by default the federated run's number of passes over all data.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="GROUP/NAME",
        help="The metric to compare, such as server/accuracy; by default the first one.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option("--target", metavar="X", help="Value of the metric: also report the cost of reaching it."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The folder of both trainings; by default atoll-compare-NAME."),
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw PNG files into the folder.")]


def compare(
    what: What,
    rounds: Rounds = None,
    clients: Clients = None,
    drop_empty: options.DropEmpty = False,
    epochs: Epochs = None,
    metric: Metric = None,
    target: Target = None,
    out: Out = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    by: By = None,
    columns: Columns = None,
    markdown: Markdown = False,
    csv: Csv = False,
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Train a task federated (as `atoll simulate`) and centralized (as `atoll train`), and compare them: metric, rounds
    or steps, bytes, virtual and real time.

    `--set train.*` and `plan.*` apply to the centralized training, `local.*` to both, all other settings to the
    federated run. Both continue after an interruption. Exit code 130 after Ctrl-C or SIGTERM.

    Of folders of simulated runs nothing is trained: those that differ in the seed alone are one row, with mean and
    deviation, and `--by` compares runs of different modes at the largest place that all have reached.
    """
    if_stopped("before a round began; nothing was written")
    shown = Shown(by, columns, markdown, csv, json)
    if are_folders(what):
        training = {"--rounds": rounds, "--clients": clients, "--epochs": epochs, "--set": overrides}
        not_used = [name for name, value in (training | {"--drop-empty": drop_empty}).items() if value]
        compare_runs([Path(folder) for folder in what], metric, target, shown, out, plot=plot, not_used=not_used)
        return
    check_one_task(what, shown)
    from atoll.cli.files import overriding

    short = overriding(overrides, population__drop_empty=drop_empty or None, train__epochs=epochs)
    asked = Asked(rounds, clients, epochs, metric, target, out, short)
    found = compare_trainings(what[0], asked, federated=_simulate, centralized=_train)
    if_stopped("")
    if json:
        as_json(found.document)
    else:
        _say(found.sides, target)
    if plot:
        _plot(found.sides, found.folder / PLOT)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a comparison."""

    rounds: int | None
    clients: int | None
    epochs: int | None
    metric: str | None
    target: float | None
    out: Path | None
    overrides: Sequence[str]


@dataclass(frozen=True, slots=True)
class Compared:
    """A federated training beside a centralized one, in a folder."""

    sides: "Sequence[Side]"
    target: float | None
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        """The result in JSON types."""
        from atoll.simulations.experiments.compare import document_of

        return document_of(self.sides, self.target)


def compare_trainings(
    what: str,
    asked: Asked,
    *,
    federated: "Callable[[SimulationFile, Task, Path], Json]",
    centralized: "Callable[[Request, Task], object]",
    task: "Task | ArrayTask | None" = None,
) -> Compared:
    """Train a task federated and centralized, and compare the two.

    Args:
        what: the run's TOML, or the task's reference.
        asked: the options.
        federated: runs the simulation in its folder, and returns its result.
        centralized: runs the centralized training.
        task: the task that `what` names; None: it is loaded.

    Raises:
        ConfigError, CommandError: all mistakes, before anything runs; later a run that has failed.
    """
    from atoll.parallel.task.given import Given
    from atoll.parallel.trainer.run import LOG
    from atoll.simulations.experiments import compare as sides_of
    from atoll.simulations.experiments.plots import main_metric
    from atoll.simulations.experiments.report import read_run

    central = [override for override in asked.overrides if override.startswith(("train.", "plan."))]
    of_federation = [override for override in asked.overrides if override not in central]
    file, as_is, given = _load(what, asked, of_federation, task)
    _check_metric(asked.metric, file, given)
    folder = asked.out or Path(f"atoll-compare-{file.name}")
    of_training = [*_of_both(file), *central]
    _request(file, as_is, folder, of_training, asked.epochs or 1)
    result = federated(file, given, folder / FEDERATED)
    if result["state"] != "finished":
        raise CommandError(f"the federated run has {result['state']}: {result['cause']}")
    report = read_run(folder / FEDERATED, FEDERATED)
    data = sides_of.pooled(given)

    def in_a_round(round_: int) -> float:
        local = Given.read(file.run.given).local_of(given.local, round_)
        return sides_of.epochs_of(local, data.num_examples, report.num_clients)

    epochs = asked.epochs or sides_of.passes_of(report, epochs=in_a_round)
    request = _request(file, as_is, folder, of_training, epochs)
    centralized(request, as_is)
    chosen = asked.metric or main_metric([report])
    sides = [
        sides_of.federated(report, chosen, epochs=in_a_round),
        sides_of.centralized(request.folder / LOG, chosen, data_bytes=data.bytes),
    ]
    _check_measured(sides, report)
    sides_of.write(sides, asked.target, folder / RESULT)
    return Compared(sides, asked.target, folder)


def _of_both(file: "SimulationFile") -> list[str]:
    """Return the settings of the federated run that are also those of the centralized training."""
    both = [f"local.{key}={_text(value)}" for key, value in file.local.items()]
    both += [f"task.{key}={_text(value)}" for key, value in file.options.items()]
    for site, values in file.sites.items():
        both += [f"sites.{site}.{key}={_text(value)}" for key, value in values.items()]
    return both


def _load(
    what: str, asked: Asked, overrides: list[str], task: "Task | ArrayTask | None"
) -> "tuple[SimulationFile, Task, Task]":
    """Load the settings of the federated run, and its task, a PyTorch task, without and with these settings."""
    from atoll.cli.experiments.simulate import with_task
    from atoll.parallel.task.task import Task
    from atoll.simulations.federation.setting import as_given

    file, task = with_task(what, overrides, rounds=asked.rounds, clients=asked.clients, task=task)
    if not isinstance(task, Task):
        raise CommandError(f"{file.task} is an ArrayTask, which trains only federated; `atoll compare` takes a Task")
    if file.schedule.local:
        names = ", ".join(f"local.{name}" for name in file.schedule.local)
        note(f"{what}: the schedule of {names} is of the federated run: `train.schedule` is the centralized training's")
    given = as_given(file, task)
    assert isinstance(given, Task)
    return file, task, given


def _check_metric(metric: str | None, file: "SimulationFile", task: "Task") -> None:
    """Check, as far as the settings tell, that both trainings measure the metric, before either begins."""
    groups = ["server"] * (task.test_data is not None and file.evaluation.server_every > 0)
    groups += ["clients"] * (file.evaluation.clients_every > 0)
    known = [f"{group}/{name}" for group in groups for name in ("loss", *task.metrics)]
    if not known:
        raise CommandError(
            "no metric to compare by: give the task a test_data and leave evaluation.server_every above 0, or set "
            "evaluation.clients_every"
        )
    if metric is not None and metric not in known:
        raise CommandError(f"--metric: got {metric!r}; allowed: {', '.join(known)}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _request(file: "SimulationFile", task: "Task", folder: Path, overrides: list[str], epochs: int) -> "Request":
    """Return the options of the centralized training, checked before the federated run begins."""
    from atoll.cli.runs.starts import with_start_file
    from atoll.cli.training.request import Request, job_of

    has_length = any(override.startswith(("train.epochs=", "train.steps=")) for override in overrides)
    start = [f"train.start={file.model.start}", f"train.strict={_text(file.model.is_strict)}"]
    request = Request(
        task=file.task,
        nproc=None,
        mesh=None,
        zero=None,
        out=folder / CENTRALIZED,
        device=file.simulation.device,
        overrides=[
            *(start if file.model.start else []),  # both begin alike, unless train.start is given beside it
            *with_start_file(overrides),
            *([] if has_length else [f"train.epochs={epochs}"]),
        ],
        is_fresh=False,
    )
    job_of(request, task)
    return request


def _simulate(file: "SimulationFile", task: "Task", folder: Path) -> "Json":
    """Simulate as a command does: it shows its progress, and a signal interrupts it."""
    from atoll.cli.experiments.interrupting import with_signals
    from atoll.cli.experiments.simulate import run_simulation
    from atoll.cli.experiments.simulation_progress import RoundProgress

    def begun(federation: "Federation") -> AbstractContextManager[None]:
        note("federated")
        return with_signals(federation)

    if_stopped("before a round began; the same command goes on")
    with RoundProgress(sys.stderr, note, rounds=file.rounds) as progress:
        result = run_simulation(file, task, folder, progress.round, handling=begun)
    if result["state"] == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)
    if_stopped("after the federated training; the same command goes on")
    return result


def _train(request: "Request", task: "Task") -> None:
    """Train as a command does."""
    from atoll.cli.training.fault import Fault
    from atoll.cli.training.process import train_in_process
    from atoll.cli.training.request import job_of

    note("centralized")
    outcome = train_in_process(job_of(request, task), request)
    if isinstance(outcome, Fault):
        for line in outcome.lines:
            note(line)
        raise typer.Exit(outcome.code)
    if outcome.why == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)


def _check_measured(sides: "Sequence[Side]", report: "RunReport") -> None:
    if missing := [side.kind for side in sides if not side.points]:
        raise CommandError(
            f"--metric: {sides[0].metric} was not measured in the {' and the '.join(missing)} training; the federated "
            f"one has {', '.join(report.metrics) or 'none'}, and both need test data of the server or of the clients"
        )


def _say(sides: "Sequence[Side]", target: float | None) -> None:
    from atoll.cli.printing import seconds
    from atoll.simulations.experiments.compare import COLUMNS, rows

    shown = {"bytes": printable_size, "virtual_s": seconds, "real_s": seconds}
    header = {"virtual_s": "virtual time", "real_s": "real time", "passes": "passes over the data"}
    lines = [
        [shown[name](row[name]) if name in shown and row[name] is not None else row[name] for name in COLUMNS]
        for row in rows(sides, target)
    ]
    say(sides[0].metric)
    say_table([header.get(name, name) for name in COLUMNS], lines, empty="")


def _plot(sides: "Sequence[Side]", path: Path) -> None:
    from atoll.simulations.experiments.compare import plot
    from atoll.simulations.experiments.plots import NoMatplotlib

    try:
        note(f"the plot is {plot(sides, path)}")
    except NoMatplotlib as error:
        note(str(error))
