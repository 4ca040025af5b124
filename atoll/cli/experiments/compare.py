"""`atoll compare`: train a task federated and centralized, and compare the two."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.federation.config import SimulationFile

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
    from atoll.parallel.task.given import Given
    from atoll.parallel.trainer.run import LOG
    from atoll.simulations.experiments.compare import centralized, epochs_of, federated, passes_of, pooled, write
    from atoll.simulations.experiments.plots import main_metric

    central = [override for override in overrides if override.startswith(("train.", "plan."))]
    federated_overrides = [override for override in overrides if override not in central]
    file, task = _load(what[0], rounds, clients, options.dropping_empty(federated_overrides, drop_empty))
    _check_metric(metric, file, task)
    folder = out or Path(f"atoll-compare-{file.name}")
    local = [f"local.{key}={_text(value)}" for key, value in file.local.items()]
    local += [f"task.{key}={_text(value)}" for key, value in file.options.items()]
    for site, values in file.sites.items():
        local += [f"sites.{site}.{key}={_text(value)}" for key, value in values.items()]
    request = _request(file, folder, [*local, *central], epochs or 1)
    if_stopped("before a round began; the same command goes on")
    report = _simulate(file, task, folder / FEDERATED)
    if_stopped("after the federated training; the same command goes on")
    data = pooled(task)

    def in_a_round(round_: int) -> float:
        local = Given.read(file.run.given).local_of(task.local, round_)
        return epochs_of(local, data.num_examples, report.num_clients)

    _train(_request(file, folder, [*local, *central], epochs or passes_of(report, epochs=in_a_round)))
    if_stopped("")
    chosen = metric or main_metric([report])
    central_side = centralized(request.folder / LOG, chosen, data_bytes=data.bytes)
    sides = [federated(report, chosen, epochs=in_a_round), central_side]
    _check_measured(sides, report)
    write(sides, target, folder / RESULT)
    _say(sides, target, json=json)
    if plot:
        _plot(sides, folder / PLOT)


def _load(what: str, rounds: int | None, clients: int | None, overrides: list[str]) -> "tuple[SimulationFile, Task]":
    """Load the settings of the federated run, and its task, which must be a PyTorch task."""
    from atoll.cli.experiments.simulate import load_simulation, note_unused
    from atoll.cli.files import load_user_task
    from atoll.parallel.task.task import Task
    from atoll.simulations.federation.setting import as_given

    file = load_simulation(what, overrides, rounds=rounds, clients=clients)
    note_unused(file, what)
    task = load_user_task(file.task)
    if not isinstance(task, Task):
        raise CommandError(f"{file.task} is an ArrayTask, which trains only federated; `atoll compare` takes a Task")
    if file.schedule.local:
        names = ", ".join(f"local.{name}" for name in file.schedule.local)
        note(f"{what}: the schedule of {names} is of the federated run: `train.schedule` is the centralized training's")
    given = as_given(file, task)
    assert isinstance(given, Task)
    return file, given


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


def _request(file: "SimulationFile", folder: Path, overrides: list[str], epochs: int) -> "Request":
    """Return the options of the centralized training, checked before the federated run begins."""
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
            *overrides,
            *([] if has_length else [f"train.epochs={epochs}"]),
        ],
        is_fresh=False,
    )
    job_of(request)
    return request


def _simulate(file: "SimulationFile", task: "Task", folder: Path) -> "RunReport":
    from atoll.cli.experiments.simulate import with_signals
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.cli.task_failures import task_failures_in_one_line
    from atoll.simulations.experiments.report import read_run
    from atoll.simulations.federation.run import opened

    with (
        task_failures_in_one_line(),
        RoundProgress(sys.stderr, note, rounds=file.rounds) as progress,
        opened(file, task, folder, on_round=progress.round, is_fresh=False, tell=note) as federation,
        with_signals(federation),
    ):
        note("federated")
        result = federation.run()
    if result["state"] == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)
    if result["state"] != "finished":
        raise CommandError(f"the federated run has {result['state']}: {result['cause']}")
    return read_run(folder, FEDERATED)


def _train(request: "Request") -> None:
    from atoll.cli.training.control import Fault
    from atoll.cli.training.process import train_in_process
    from atoll.cli.training.request import job_of

    note("centralized")
    outcome = train_in_process(job_of(request), request)
    if isinstance(outcome, Fault):
        for line in outcome.lines:
            note(line)
        raise typer.Exit(outcome.code)
    if outcome.why == "interrupted":
        note("interrupted; the same command resumes it")
        raise typer.Exit(INTERRUPTED)


def _check_measured(sides: "list[Side]", report: "RunReport") -> None:
    if missing := [side.kind for side in sides if not side.points]:
        raise CommandError(
            f"--metric: {sides[0].metric} was not measured in the {' and the '.join(missing)} training; the federated "
            f"one has {', '.join(report.metrics) or 'none'}, and both need test data of the server or of the clients"
        )


def _say(sides: "list[Side]", target: float | None, *, json: bool) -> None:
    from atoll.cli.printing import seconds
    from atoll.simulations.experiments.compare import COLUMNS, rows

    if json:
        as_json({"metric": sides[0].metric, "target": target, "rows": rows(sides, target)})
        return
    shown = {"bytes": printable_size, "virtual_s": seconds, "real_s": seconds}
    header = {"virtual_s": "virtual time", "real_s": "real time", "passes": "passes over the data"}
    lines = [
        [shown[name](row[name]) if name in shown and row[name] is not None else row[name] for name in COLUMNS]
        for row in rows(sides, target)
    ]
    say(sides[0].metric)
    say_table([header.get(name, name) for name in COLUMNS], lines, empty="")


def _plot(sides: "list[Side]", path: Path) -> None:
    from atoll.simulations.experiments.compare import plot
    from atoll.simulations.experiments.plots import NoMatplotlib

    try:
        note(f"the plot is {plot(sides, path)}")
    except NoMatplotlib as error:
        note(str(error))
