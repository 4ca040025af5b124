"""`atoll flower export`: a native task's client as a Flower app, for a return to Flower."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, note, say
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.task_failures import task_failures_in_one_line
from atoll.task.apps import is_app, with_app

if TYPE_CHECKING:
    from atoll.cli.flower.app_files import Fitted
    from atoll.cli.flower.counterparts import Counterpart
    from atoll.server.config.run import RunFile
    from atoll.task.array_task import ArrayTask
    from atoll.task.arrays import Arrays
    from atoll.task.task import Task

What = Annotated[
    str,
    typer.Argument(
        metavar="TASK | RUN.toml",
        help="A task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults, or a run's TOML.",
    ),
]
To = Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; it is created if it is missing.")]


def export(
    what: What,
    folder: To,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    json: options.Json = False,
) -> None:
    """Write a native task as a Flower app: its client, and the strategy that gives the same versions.

    The app trains with Atoll as a library, in Flower's processes. What no strategy of Flower has is refused; what
    changes only when a round ends is left out, and reported.
    """
    from atoll.cli.flower.app_files import AppFiles
    from atoll.cli.flower.counterparts import counterpart
    from atoll.cli.flower.sources import sources_of
    from atoll.operations.load import load_run, load_user_task, note_unused_settings

    if is_app(with_app(what)):
        raise CommandError(f"{what} is a folder, such as a Flower app: name a native task, path/to/file.py:attribute")
    file = load_run(what, overrides)
    if is_app(file.task):
        raise CommandError(f"task: {file.task} is a Flower app already: name a native task")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} exists, and is not overwritten: name another folder")
    found = counterpart(file)
    note_unused_settings(file, what, why="an app has no coordinator")
    task = load_user_task(file.task)
    fitted = _fitted(file, task, found)
    found, sources = fitted.found, sources_of(file.task)
    files = AppFiles(file.task, getattr(task, "sites", ()), fitted, sources).files
    for place, data in files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if json:
        told = {"strategy": found.strategy, "arguments": dict(found.arguments), "left_out": found.left_out}
        as_json({"folder": folder, "files": sorted(files), **told, "data": sources.data})
        return
    say(f"wrote {file.task} as a Flower app to {folder}: {found.strategy}, {count_of(file.rounds, 'round')}")
    if found.left_out:
        note(f"left out, as Flower has no counterpart: {', '.join(found.left_out)}")
    if sources.data:
        note(f"data files are not copied: {', '.join(sources.data)}")
    if not sources.files:
        note(f"the code is not copied: install {', '.join(sources.packages)} at each node")
    say(f"\nnext: cd {folder}, and read README.md")


def _fitted(file: "RunFile", task: "Task | ArrayTask", found: "Counterpart") -> "Fitted":
    """Check that a run fits its task and a Flower strategy, and return its settings for the app.

    Raises:
        CommandError: they do not fit the task, or its model, to the strategy.
        TaskFailed: the task's code failed.
    """
    from atoll.cli.flower.app_files import Fitted
    from atoll.flower.exported.run_values import RunValues
    from atoll.task.given import FROZEN
    from atoll.task.overrides import OverridesRefused
    from atoll.training.worker.benches import bench_of
    from atoll.training.worker.warm_start import Start, StartRefused, started

    sites, cohort = getattr(task, "sites", ()), file.round.cohort_size
    if sites and cohort > len(sites):
        raise CommandError(
            f"round.cohort_size: got {cohort}; allowed: at most {len(sites)}, the task's sites ({', '.join(sites)})"
        )
    given = dict(file.given)
    try:
        with task_failures_in_one_line():
            bench = bench_of(task, {"rounds": file.rounds, "local": given})
            initial, frozen, buffers = bench.initial(file.seed), bench.frozen(file.seed), bench.buffers()
            if file.model.start:
                started(initial, bench.aliases(), Start(Path(file.model.start), file.model.is_strict))
            measures = bool(file.evaluation.server_every) and not bench.measures().why_not_here
    except OverridesRefused as error:
        raise CommandError(*error.faults) from error
    except StartRefused as error:
        raise CommandError(*(f"model.start: {fault}" for fault in error.faults)) from error
    if frozen:
        given.setdefault(FROZEN, frozen)
    given = _plain_of(task, file) | given | _without_rounds(file)
    values = RunValues(file.name, file.rounds, file.seed, given, file.model.start, file.model.is_strict)
    return Fitted(_fitting(found, initial, buffers), values, measures)


def _fitting(found: "Counterpart", initial: "Arrays", buffers: Sequence[str]) -> "Counterpart":
    """Check that a Flower strategy fits a model, and return it with the differences that remain.

    Raises:
        CommandError: it would step tensors that are only averaged here.
    """
    from atoll.tensors.layout import BESIDE
    from atoll.training.worker.warm_start import listed

    whole = [name for name, array in initial.items() if array.dtype.kind != "f"]
    beside = [name for name in initial if name.startswith(BESIDE)]
    if found.steps and (still := sorted({*whole, *beside, *buffers})):
        raise CommandError(
            f"optimizer.name: Flower's {found.strategy} would also step {listed(still)}, which Atoll only averages; "
            "allowed: fedavg with lr 1"
        )
    if found.strategy in ("FedAvg", "FedAvgM") or not whole:
        return found
    return replace(found, left_out=(*found.left_out, f"the mean of the integers {listed(whole)}"))


def _without_rounds(file: "RunFile") -> dict[str, Any]:
    """Return the schedules that end with the run, without its number of rounds, which a run config may change."""
    return {
        key: {name: value for name, value in file.given[key].items() if name != "rounds"}
        for key, schedule in file.schedule.local.items()
        if schedule.rounds is None
    }


def _plain_of(task: "Task | ArrayTask", file: "RunFile") -> dict[str, Any]:
    """Return the task's values that a run config can have, so that `flwr run --run-config` may set others."""
    from atoll.task.given import OPTION, Plain

    declared = getattr(task, "options", {})
    plain = {f"{OPTION}{name}": value for name, value in declared.items() if isinstance(value, Plain)}
    local = getattr(task, "local", None)
    fields = getattr(type(local), "__dataclass_fields__", {})
    scheduled = file.schedule.local
    own = {name: getattr(local, name) for name in fields if name not in scheduled}
    return plain | {name: value for name, value in own.items() if isinstance(value, Plain)}
