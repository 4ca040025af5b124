"""`atoll simulate`: simulate a whole federation on this machine, under virtual time."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from atoll.aggregation.printable import count_of, printable_size
from atoll.cli import options
from atoll.cli.experiments.interrupting import with_signals
from atoll.cli.exports.live import Exports, live_export
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, best_text, note, say, say_settings, seconds
from atoll.cli.runs.sites import say_sites
from atoll.cli.stopping import INTERRUPTED, if_stopped
from atoll.parallel.loading import loading

if TYPE_CHECKING:
    from atoll.parallel.task.array_task import ArrayTask
    from atoll.parallel.task.task import Task
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.federation import Federation
    from atoll.simulations.federation.report import Json

NO_COORDINATOR = "a simulation has no coordinator's process"

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[TASK | RUN.toml]",
        help="A task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults, or a run's TOML, as "
        "for a deployed run; it may also have the tables population, devices, attack and simulation.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The folder of the run; by default atoll-sim-NAME.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Rounds of the run; short for rounds.")]
Clients = Annotated[
    int | None,
    typer.Option(
        "--clients",
        metavar="N",
        help="Simulated clients, with an iid split of the data unless population.kind is set; short for "
        "population.clients. Of a Flower app: the number of its nodes.",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="Engine of the local training; short for simulation.engine."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed of the run; short for seed."),
]
Sites = Annotated[
    bool, typer.Option("--sites", help="Also print the metrics of each site, by its newest evaluation and training.")
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh/--resume", help="Refuse a folder that has a run already, instead of resuming the run."),
]


def simulate(
    what: What = None,
    rounds: Rounds = None,
    clients: Clients = None,
    drop_empty: options.DropEmpty = False,
    engine: Engine = None,
    out: Out = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    seed: Seed = None,
    fresh: Fresh = False,
    exports: Exports = [],  # noqa: B006
    sites: Sites = False,
    check: options.Check = False,
    json: options.Json = False,
) -> None:
    """Simulate a federation: the state machines of coordinator and clients, real training, virtual time.

    An interrupted run resumes from the end of its last round. Exit code 1: the run failed; 2: a mistake in the
    arguments, settings or task; 130: Ctrl-C or SIGTERM.
    """
    if what is None:
        raise CommandError("name a task or a run's TOML")
    from atoll.cli.files import overriding
    from atoll.simulations.populations.opened_files import OPENED

    OPENED.watch()  # before the task's file is imported, which may read data
    simulate_as_asked(
        what,
        overriding(overrides, seed=seed, population__drop_empty=drop_empty or None),
        Request(rounds, clients, engine, out, fresh, exports, sites, check, json),
    )


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `atoll simulate` beside the settings."""

    rounds: int | None = None
    clients: int | None = None
    engine: str | None = None
    out: Path | None = None
    fresh: bool = False
    exports: Sequence[str] = ()
    sites: bool = False
    check: bool = False
    json: bool = False
    unnamed: str = "atoll-sim-{name}"
    """The folder where `out` is None, with the name of the run."""

    def folder(self, file: "SimulationFile") -> Path:
        """Return the folder of the run."""
        return self.out or Path(self.unnamed.format(name=file.name))


def simulate_as_asked(what: str, overrides: list[str], request: Request) -> NoReturn:
    """Simulate a run, print its result, and exit with its code.

    Args:
        what: a run's TOML, or a reference to the task.
        overrides: `key=value`.
        request: the other options.

    Raises:
        typer.Exit: with the exit code.
        ConfigError: all mistakes in the settings.
        CommandError: the task cannot be loaded, or fails.
    """
    if_stopped("before a round began; nothing was written")
    with loading():
        from atoll.cli.experiments.simulation_progress import RoundProgress
        from atoll.cli.task_failures import task_failures_in_one_line
        from atoll.exports.folders import SimulatedFolder
        from atoll.parallel.heap import keep_freed_blocks
        from atoll.parallel.trainer.logs import to_all
        from atoll.protocol.settings import effective
        from atoll.simulations.experiments.lifeline import end_with_the_sweep
        from atoll.simulations.federation.setting import setting_of

    end_with_the_sweep()
    file, task = with_task(what, overrides, rounds=request.rounds, clients=request.clients, engine=request.engine)
    if file.run.is_of_messages:
        raise typer.Exit(_simulate_messages(file, task, request))
    if request.check:
        with task_failures_in_one_line():
            setting = setting_of(file, task)
            file.aggregation.build()
        for line in setting.notes:
            note(line)
        say_settings(effective(file), json=request.json)
        raise typer.Exit
    folder = request.folder(file)
    if_stopped("before a round began; the same command goes on")
    exports = live_export(request.exports, SimulatedFolder(folder.absolute()), folder.absolute())  # the task may change
    keep_freed_blocks()
    with RoundProgress(sys.stderr, note, rounds=file.rounds) as progress, exports:
        report = to_all(progress.round, exports.take)
        result = run_simulation(file, task, folder, report, is_fresh=request.fresh, handling=with_signals)
    if_stopped("")
    measured = _sites_of(folder) if request.sites else {}
    if request.json:
        as_json(result | ({"sites": measured} if measured else {}))
    else:
        _say_result(result, folder, progress.faults)
        for kind, part in measured.items():
            say_sites(f"{kind}, version {part['version']}", part)
    if result["state"] == "interrupted":
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result["state"] == "finished" else 1)


def _simulate_messages(file: "SimulationFile", task: "Task | ArrayTask", request: Request) -> int:
    """Simulate a run of messages, or check its settings; return the exit code.

    Raises:
        CommandError: options that a run without rounds does not take, or as `run_messages`.
    """
    from atoll.cli.experiments.messages import run_messages, say_messages
    from atoll.cli.task_failures import task_failures_in_one_line
    from atoll.protocol.settings import effective
    from atoll.simulations.messages.run import setting_of

    given = {"--rounds": request.rounds is not None, "--export": bool(request.exports), "--sites": request.sites}
    if of_rounds := [name for name, is_given in given.items() if is_given]:
        raise CommandError(f"a run of messages (program.main) has no rounds: leave out {', '.join(of_rounds)}")
    if request.check:
        with task_failures_in_one_line():
            setting_of(file, task)
        say_settings(effective(file), json=request.json)
        return 0
    folder = request.folder(file)
    result = run_messages(file, task, folder, is_fresh=request.fresh, handling=with_signals)
    if request.json:
        as_json(result)
    else:
        say_messages(result, folder)
    return {"finished": 0, "interrupted": INTERRUPTED}.get(result["state"], 1)


def with_task(
    what: str,
    overrides: list[str],
    *,
    rounds: int | None,
    clients: int | None,
    engine: str | None = None,
    task: "Task | ArrayTask | None" = None,
) -> "tuple[SimulationFile, Task | ArrayTask]":
    """Load the settings of a simulated run and its task, and note what a simulation does not use.

    Args:
        what: a run's TOML, or the task's reference.
        overrides: `key=value`.
        rounds: short for the setting.
        clients: short for the setting.
        engine: short for the setting.
        task: the task that `what` names; None: it is loaded.

    Raises:
        ConfigError: all mistakes in the settings.
        CommandError: the task cannot be loaded.
    """
    from atoll.cli.files import load_user_task

    file = load_simulation(what, overrides, rounds=rounds, clients=clients, engine=engine)
    note_unused(file, what)
    return file, load_user_task(file.task, nodes=clients) if task is None else task


def run_simulation(
    file: "SimulationFile",
    task: "Task | ArrayTask",
    folder: Path,
    report: "Callable[[Json], None]",
    *,
    is_fresh: bool = False,
    handling: "Callable[[Federation], AbstractContextManager[None]]" = lambda _: nullcontext(),
) -> "Json":
    """Run or resume a simulation in its folder, and return its result.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        report: a callback for each round's line.
        is_fresh: refuse a folder that has a run.
        handling: what surrounds the run, such as the handling of signals.

    Raises:
        ConfigError: all faults of the settings, the task or the folder, before anything runs.
        CommandError: the task's code, or a worker process, has failed.
    """
    from atoll.cli.task_failures import task_failures_in_one_line
    from atoll.simulations.federation.run import opened

    with (
        task_failures_in_one_line(),
        opened(file, task, folder, on_round=report, is_fresh=is_fresh, tell=note) as federation,
        handling(federation),
    ):
        return federation.run()


def _sites_of(folder: Path) -> dict[str, Any]:
    """Return the metrics of the sites by evaluation and training, where there are any."""
    from atoll.simulations.experiments.report import read_run
    from atoll.simulations.experiments.sites import sites

    return {kind: part for kind, part in sites(read_run(folder).rounds).items() if part["sites"]}


def load_simulation(
    what: str, overrides: list[str], *, rounds: int | None, clients: int | None, engine: str | None = None
) -> "SimulationFile":
    """Load the settings of a simulated run; the keyword arguments are short forms of some settings.

    Raises:
        ConfigError: all mistakes in the settings.
    """
    from atoll.cli.files import all_faults, load_run, overriding, state_of
    from atoll.parallel.task.flower_app import is_app, with_app
    from atoll.server.config.model import run_and_version
    from atoll.simulations.federation.config import SimulationFile

    kind = {"population__kind": "iid"} if clients is not None and not _sets_kind(what, overrides) else {}
    dealt = {} if is_app(with_app(what)) else {"population__clients": clients, **kind}
    short = overriding(overrides, rounds=rounds, simulation__engine=engine, **dealt)
    with all_faults(_of_a_coordinator_alone(overrides)):
        file = load_run(what, short, kind=SimulationFile, nodes=clients)
    if run_and_version(file.model.start) is None:
        return file
    from atoll.cli.runs.starts import file_of_start

    start = file_of_start(file.model.start, setting="model.start", state=state_of(file, what, None))
    host = file.coordinator.model_copy()
    host.model_fields_set.discard("state")  # it is used, and not noted as unused
    return file.model_copy(update={"model": file.model.model_copy(update={"start": start}), "coordinator": host})


def _of_a_coordinator_alone(overrides: list[str]) -> list[str]:
    """List the overrides that only a coordinator's process would use, as faults."""
    from atoll.simulations.federation.config import OF_A_COORDINATOR

    keys = [override.partition("=")[0].strip() for override in overrides]
    unused = [key for key in keys if key.startswith(("coordinator.", "notify.")) and key not in OF_A_COORDINATOR]
    return [f"{key}: {NO_COORDINATOR}: leave it out" for key in unused]


def note_unused(file: "SimulationFile", what: str) -> None:
    """Note what a TOML sets for a coordinator's process, which a simulated run does not have."""
    from atoll.cli.files import note_unused_settings
    from atoll.simulations.federation.config import OF_A_COORDINATOR

    used = [key.removeprefix("coordinator.") for key in OF_A_COORDINATOR]
    note_unused_settings(file, what, used=used, why=f"{NO_COORDINATOR}; `model.keep_versions` is of the run")


def _sets_kind(what: str, overrides: list[str]) -> bool:
    """Return whether the TOML or an override sets population.kind."""
    import tomllib

    from atoll.aggregation.text_files import text_of

    if any(override.partition("=")[0].strip() == "population.kind" for override in overrides):
        return True
    if not what.endswith(".toml"):
        return False
    try:
        return "kind" in tomllib.loads(text_of(Path(what).read_bytes(), what)).get("population", {})
    except (OSError, ValueError, RecursionError, AttributeError):
        return False  # loading the file reports it


def _of_invitations(account: Mapping[str, int]) -> str:
    """Return the account of an asynchronous run's invitations in words, with the dropped ones."""
    invited, dropped = account.get("invited", 0), account.get("too_old", 0)
    share = f" ({100 * dropped / invited:.3g} %)" if invited else ""
    return (
        f"{count_of(invited, 'invitation')}, {account.get('reported', 0)} reported, {dropped} dropped as too old{share}"
    )


def _say_result(result: dict[str, Any], folder: Path, faults: Sequence[str]) -> None:
    from atoll.simulations.federation.app import APP

    say(
        f"{result['state']}: {result['cause'] or 'rounds are left'}; version {result['version']} after "
        f"{count_of(result['rounds'], 'round')}, {seconds(result['virtual_s'])} of virtual time in "
        f"{seconds(result['real_s'])}"
    )
    say(
        f"{count_of(result['trainings'], 'training')} by the {result['engine']} engine; "
        f"{printable_size(result['bytes_down'])} down, {printable_size(result['bytes_up'])} up"
    )
    if best := result.get("best"):
        say(best_text(best))
    for sentence in result.get("undecided", ()):
        say(sentence)
    if account := result.get("invitations"):
        say(_of_invitations(account))
    if (folder / APP).is_dir():
        say(f"the files of main() are in {folder / APP}")
    for fault in faults:
        say(f"{fault} (all of them: {folder / 'rounds.jsonl'})")
    if result["state"] == "interrupted":
        say(f"the same command resumes the run: {folder}")
    else:
        say(f"everything is in {folder}")
