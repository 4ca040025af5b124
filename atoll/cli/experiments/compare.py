"""`atoll compare`: the same task federated and centralized, side by side."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, note, say
from atoll.cli.printing import table as say_table
from atoll.protocol.printable import printable_size

if TYPE_CHECKING:
    from atoll.cli.training.request import Request
    from atoll.parallel.task.task import Task
    from atoll.simulations.experiments.compare import Side
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.federation.config import SimulationFile

FEDERATED, CENTRALIZED, FOUND, PLOT = "federated", "centralized", "compare.json", "compare.png"

What = Annotated[
    str, typer.Argument(metavar="TASK | RUN.toml", help="A task, or a simulated run's TOML, as `atoll simulate` takes.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Of the federation; short for rounds.")]
Clients = Annotated[
    int | None, typer.Option("--clients", metavar="N", help="Of the federation, dealt evenly unless a kind is set.")
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", metavar="N", help="Of the centralized training; by default as many as the federation's."),
]
Metric = Annotated[
    str | None, typer.Option("--metric", metavar="WHO/NAME", help="Such as server/accuracy; by default the first.")
]
Target = Annotated[
    float | None, typer.Option("--target", metavar="X", help="Of the metric: also say what it took to get there.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where everything is kept; by default atoll-compare-NAME.")
]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Whether to draw compare.png into the folder.")]


def compare(
    what: What,
    rounds: Rounds = None,
    clients: Clients = None,
    epochs: Epochs = None,
    metric: Metric = None,
    target: Target = None,
    out: Out = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    plot: Plot = True,
    json: options.Json = False,
) -> None:
    """Train the same task federated (as `atoll simulate`) and centralized (as `atoll train`), and compare them: metric,
    rounds or steps, bytes, virtual and real time.

    `--set train.*` and `plan.*` are for the centralized training, `local.*` for both, all others for the federation.
    Each goes on where it was interrupted. Ctrl-C or SIGTERM ends it with 130.
    """
    from atoll.parallel.trainer.run import LOG
    from atoll.simulations.experiments.compare import centralized, epochs_of, federated, passes_of, pooled, rows, write
    from atoll.simulations.experiments.plots import main_metric

    central = [one for one in overrides if one.startswith(("train.", "plan."))]
    file, task = _asked(what, rounds, clients, [one for one in overrides if one not in central])
    _check_metric(metric, file, task)
    folder = out or Path(f"atoll-compare-{file.name}")
    local = [f"local.{key}={_text(value)}" for key, value in file.local.items()]
    request = _request(file, folder, [*local, *central], epochs or 1)
    report = _simulate(file, task, folder / FEDERATED)
    data = pooled(task)
    in_a_round = epochs_of(task.local.with_overrides(file.local), data.num_examples, report.num_clients)
    _train(_request(file, folder, [*local, *central], epochs or passes_of(report, epochs=in_a_round)))
    chosen = metric or main_metric([report])
    sides = [
        federated(report, chosen, epochs=in_a_round),
        centralized(request.folder / LOG, chosen, data_bytes=data.bytes),
    ]
    _check_measured(sides, report)
    write(sides, target, folder / FOUND)
    if json:
        as_json({"metric": chosen, "target": target, "rows": rows(sides, target)})
    else:
        _say(sides, target)
    if plot:
        _plot(sides, folder / PLOT)


def _asked(what: str, rounds: int | None, clients: int | None, overrides: list[str]) -> "tuple[SimulationFile, Task]":
    from atoll.cli.experiments.simulate import simulated
    from atoll.cli.files import load_user_task
    from atoll.parallel.task.task import Task

    file = simulated(what, overrides, rounds=rounds, clients=clients)
    task = load_user_task(file.task)
    if not isinstance(task, Task):
        raise CommandError(f"{file.task} is no PyTorch task: it trains from arrays to arrays, and only federated")
    return file, task


def _check_metric(metric: str | None, file: "SimulationFile", task: "Task") -> None:
    """Insist that both sides can measure it, as far as the settings tell: before they train, not after it."""
    who = ["server"] * (task.test_data is not None and file.evaluation.server_every > 0)
    who += ["clients"] * (file.evaluation.clients_every > 0)
    known = [f"{group}/{name}" for group in who for name in ("loss", *task.metrics)]
    if not known:
        raise CommandError(
            "nothing is measured to compare by: give the task a test_data and leave evaluation.server_every, or set "
            "evaluation.clients_every"
        )
    if metric is not None and metric not in known:
        raise CommandError(f"--metric: got {metric!r}; allowed: {', '.join(known)}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _request(file: "SimulationFile", folder: Path, overrides: list[str], epochs: int) -> "Request":
    """The centralized training, checked: before the federation begins, not an hour later."""
    from atoll.cli.training.request import Request, job_of

    given = any(one.startswith(("train.epochs=", "train.steps=")) for one in overrides)
    request = Request(
        task=file.task,
        nproc=None,
        mesh=None,
        zero=None,
        out=folder / CENTRALIZED,
        device=file.simulation.device,
        overrides=[*overrides, *([] if given else [f"train.epochs={epochs}"])],
        is_fresh=False,
    )
    job_of(request)
    return request


def _simulate(file: "SimulationFile", task: "Task", folder: Path) -> "RunReport":
    from atoll.cli.experiments.simulate import INTERRUPTED, with_signals
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.cli.experiments.task_failures import task_failures_in_one_line
    from atoll.simulations.experiments.report import read_run
    from atoll.simulations.federation.run import opened

    note("federated")
    with (
        task_failures_in_one_line(),
        RoundProgress(sys.stderr, note, rounds=file.rounds) as progress,
        opened(file, task, folder, on_round=progress.round, is_fresh=False) as federation,
        with_signals(federation),
    ):
        result = federation.run()
    if result["state"] == "interrupted":
        note("the same command goes on from here")
        raise typer.Exit(INTERRUPTED)
    if result["state"] != "finished":
        raise CommandError(f"the federated run has {result['state']}: {result['cause']}")
    return read_run(folder, FEDERATED)


def _train(request: "Request") -> None:
    from atoll.cli.training.control import INTERRUPTED, Fault
    from atoll.cli.training.process import run_here
    from atoll.cli.training.request import job_of

    note("centralized")
    outcome = run_here(job_of(request), request)
    if isinstance(outcome, Fault):
        for line in outcome.lines:
            note(line)
        raise typer.Exit(outcome.code)
    if outcome.why == "interrupted":
        note("the same command goes on from here")
        raise typer.Exit(INTERRUPTED)


def _check_measured(sides: "list[Side]", report: "RunReport") -> None:
    if missing := [side.kind for side in sides if not side.points]:
        raise CommandError(
            f"--metric: {sides[0].metric} was not measured {' nor '.join(missing)}; the federation has "
            f"{', '.join(report.metrics) or 'none'}, and both need test data of the server or of the clients"
        )


def _say(sides: "list[Side]", target: float | None) -> None:
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


def _plot(sides: "list[Side]", path: Path) -> None:
    from atoll.simulations.experiments.compare import plot
    from atoll.simulations.experiments.plots import NoMatplotlib

    try:
        note(f"the plot is {plot(sides, path)}")
    except NoMatplotlib as error:
        note(str(error))
