"""`atoll simulate`: a whole federation on this machine, under virtual time."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, note, say, seconds
from atoll.protocol.printable import printable_size

if TYPE_CHECKING:
    from atoll.simulations.experiments.logs import Log
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.federation import Federation

INTERRUPTED = 130
NUM_SEEDS = 1000
"""Histories that are judged when nobody says how many."""

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[TASK | RUN.toml]",
        help="A task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults, or a run's TOML: "
        "that of a deployed run, which may also have the tables population, devices, attack and simulation.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where everything is kept; by default atoll-sim-NAME.")
]
Rounds = Annotated[int | None, typer.Option("--rounds", metavar="N", help="Short for rounds.")]
Clients = Annotated[
    int | None,
    typer.Option("--clients", metavar="N", help="Short for population.clients; alone it deals the data evenly."),
]
Engine = Annotated[str | None, typer.Option("--engine", metavar="NAME", help="Short for simulation.engine.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also draw every number of each round into DIR/tensorboard.")
]
Faults = Annotated[
    str | None,
    typer.Option(
        "--faults",
        metavar="PRESET",
        help="Train nothing: judge histories in which everything goes wrong, a seed each (docs/faults.md).",
    ),
]
Seeds = Annotated[
    int | None, typer.Option("--seeds", metavar="N", help="With --faults: so many histories; by default 1000.")
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Short for seed; with --faults: show the history of this one.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        callback=options.between(0),
        help="With --faults: processes; by default 0, one for each core.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh/--resume", help="Insist on a folder without a run, instead of going on with it.")
]


def simulate(
    what: What = None,
    rounds: Rounds = None,
    clients: Clients = None,
    engine: Engine = None,
    out: Out = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    seed: Seed = None,
    faults: Faults = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    fresh: Fresh = False,
    tensorboard: TensorBoard = False,
    check: options.Check = False,
    json: options.Json = False,
) -> None:
    """Simulate a federation: the coordinator's and the clients' own logic, real training, virtual time.

    It goes on with what an interrupted run has left in its folder, from the end of a round. Ctrl-C or SIGTERM ends it
    with 130. A mistake in what was asked for ends with 2, a run that fails with 1. With --faults the machines of both
    sides are tried instead, in as many seeded histories of crashes, cuts and full disks as you like.
    """
    if faults is not None:
        from atoll.simulations.histories.command import judge_histories

        beside = {
            what or "": what is not None,
            "--rounds": rounds is not None,
            "--clients": clients is not None,
            "--engine": engine is not None,
            "--out": out is not None,
            "--set": bool(overrides),
            "--fresh": fresh,
            "--tensorboard": tensorboard,
            "--check": check,
        }
        wrong = []
        if named := [name for name, is_given in beside.items() if is_given]:
            wrong.append(f"--faults tries the machines without a task: leave out {', '.join(named)}")
        if seed is not None and seeds is not None:
            wrong.append("--seed shows one history, --seeds judges many: leave one of them out")
        if seed is not None and jobs is not None:
            wrong.append("--seed shows one history, in this process: leave --jobs out")
        if wrong:
            raise CommandError(*wrong)
        count = NUM_SEEDS if seeds is None else seeds
        raise typer.Exit(judge_histories(faults, seeds=count, seed=seed, jobs=jobs or 0, as_json=json))
    of_faults = [name for name, value in (("--seeds", seeds), ("--jobs", jobs)) if value is not None]
    if of_faults:
        raise CommandError(*(f"{name} is of --faults: leave it out, or name a preset" for name in of_faults))
    if what is None:
        raise CommandError("name a task or a run's TOML, or --faults PRESET")
    _simulate(
        what,
        [*overrides, *([f"seed={seed}"] if seed is not None else [])],
        Request(rounds, clients, engine, out, fresh=fresh, tensorboard=tensorboard, check=check, json=json),
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What else was asked for."""

    rounds: int | None
    clients: int | None
    engine: str | None
    out: Path | None
    fresh: bool
    tensorboard: bool
    check: bool
    json: bool


def _simulate(what: str, overrides: list[str], asked: Request) -> None:
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.cli.experiments.task_failures import task_failures_in_one_line
    from atoll.cli.files import load_user_task
    from atoll.parallel.trainer.logs import to_all
    from atoll.protocol.settings import effective
    from atoll.simulations.experiments.lifeline import end_with_the_sweep
    from atoll.simulations.federation.run import opened
    from atoll.simulations.federation.setting import setting_of

    end_with_the_sweep()
    file = simulated(what, overrides, rounds=asked.rounds, clients=asked.clients, engine=asked.engine)
    task = load_user_task(file.task)
    if asked.check:
        with task_failures_in_one_line():
            setting_of(file, task)
        say(effective(file).rstrip("\n"))
        return
    folder = asked.out or Path(f"atoll-sim-{file.name}")
    logs = [_tensorboard(folder / "tensorboard")] if asked.tensorboard else []
    with (
        task_failures_in_one_line(),
        RoundProgress(sys.stderr, note, rounds=file.rounds) as progress,
        opened(
            file, task, folder, on_round=to_all(progress.round, *logs), is_fresh=asked.fresh, tell=note
        ) as federation,
        with_signals(federation),
    ):
        result = federation.run()
    if asked.json:
        as_json(result)
    else:
        _conclude(result, folder, progress.failures)
    if result["state"] == "interrupted":
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if result["state"] == "finished" else 1)


def _tensorboard(folder: Path) -> "Log":
    from atoll.simulations.experiments.logs import NoTensorBoard, tensorboard

    try:
        return tensorboard(folder)
    except NoTensorBoard as error:
        raise CommandError(f"--tensorboard: {error}") from error


def simulated(
    what: str, overrides: list[str], *, rounds: int | None, clients: int | None, engine: str | None = None
) -> "SimulationFile":
    """The settings of a simulated run; the options are short for some of them.

    Raises:
        ConfigError: with everything that is wrong.
    """
    from atoll.cli.files import load_run, overriding
    from atoll.simulations.federation.config import SimulationFile

    dealt = {"population__kind": "iid"} if clients is not None and not _names_a_kind(what, overrides) else {}
    short = overriding(overrides, rounds=rounds, population__clients=clients, simulation__engine=engine, **dealt)
    return load_run(what, short, kind=SimulationFile)


def _names_a_kind(what: str, overrides: list[str]) -> bool:
    """Whether the population's kind is said elsewhere."""
    import tomllib

    if any(override.partition("=")[0].strip() == "population.kind" for override in overrides):
        return True
    if not what.endswith(".toml"):
        return False
    try:
        return "kind" in tomllib.loads(Path(what).read_text("utf-8")).get("population", {})
    except (OSError, ValueError, RecursionError, AttributeError):
        return False  # loading it says what is wrong


@contextmanager
def with_signals(federation: "Federation") -> Iterator[None]:
    """Ctrl-C and SIGTERM let the run return soon; a second one of either ends the process at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        federation.interrupt()
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(result: dict[str, Any], folder: Path, failures: str) -> None:
    say(
        f"{result['state']}: {result['cause'] or 'not at its end yet'}; version {result['version']} after "
        f"{result['rounds']} rounds, {seconds(result['virtual_s'])} of virtual time in {seconds(result['real_s'])}"
    )
    say(
        f"{result['trainings']} trainings by the {result['engine']} engine; "
        f"{printable_size(result['bytes_down'])} down, {printable_size(result['bytes_up'])} up"
    )
    if failures:
        say(f"{failures} (all reasons: {folder / 'rounds.jsonl'})")
    if result["state"] == "interrupted":
        say(f"the same command goes on from here: {folder}")
    else:
        say(f"everything is in {folder}")
