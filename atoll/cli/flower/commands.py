"""`atoll flower ...`: run a Flower app unchanged, and report how it will run."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.flower.export import export
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, note, say
from atoll.operations.faults import CommandError
from atoll.task.apps import with_app

if TYPE_CHECKING:
    from atoll.operations.flower_plan import AppPlan

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Run Flower apps unchanged, and check how they will run.")
app.command()(export)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The app's folder, with `\\[tool.flwr.app]` in its pyproject.toml.")
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        metavar="N",
        help="Number of clients; by default num-supernodes of the project's federation. Without one, a check and a run "
        "take the strategy's min_available_nodes, a simulation 10.",
        callback=options.between(1),
    ),
]
Simulate = Annotated[
    bool, typer.Option("--simulate", help="Simulate the clients in this process, under virtual time, one by one.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run; by default atoll-flower-NAME.")
]
Native = Annotated[
    bool,
    typer.Option(
        "--native",
        help="Run the app's strategy as rounds of Atoll instead of its main() loop; short for program.native. "
        "`atoll flower check` tells whether it can.",
    ),
]
Again = Annotated[
    bool,
    typer.Option("--again", help="Start a new run even if one with exactly these settings has ended in its folder."),
]


@app.command()
def check(
    folder: Folder,
    nodes: Nodes = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    json: options.Json = False,
) -> None:
    """Report how each part of an app will run: it runs main() up to its strategy, and loads the ClientApp.

    An app runs hosted, over messages. The check also tells whether its strategy has a native run (--native), and what
    that would be.
    """
    from atoll.operations.flower_plan import plan_of
    from atoll.operations.load import options_among
    from atoll.operations.worker_check import check_in_worker

    reference = _reference(folder)
    given = options_among(reference, overrides)
    plan = plan_of(reference, given, nodes=nodes)
    if json:
        told = {name: value for name, value in asdict(plan).items() if name != "app"}
        as_json({"app": plan.app.task, "version": plan.app.version, "native": not plan.reasons, **told})
    else:
        _say_plan(plan)
    check_in_worker(reference, site="check", what="the ClientApp cannot be loaded here: ", options=given)


@app.command()
def run(
    folder: Folder,
    simulate: Simulate = False,
    nodes: Nodes = None,
    out: Out = None,
    again: Again = False,
    native: Native = False,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
) -> None:
    """Run an app on this machine, from its folder to the end of its main().

    A coordinator, main() beside it, and a process for each client, without certificates, on loopback alone. The same
    command resumes a run that was killed, and starts none where it has ended, unless by --again.
    `--set task.NAME=VALUE` changes the run config, every other `--set` the run, as for `atoll coordinator`.
    """
    if_stopped("before a round began; nothing was written")
    reference = _reference(folder)
    overrides = [*overrides, *(["program.native=true"] if native else [])]
    if simulate and again:
        raise CommandError(
            "--again applies only to a run in processes: leave it out, or name another folder with --out"
        )
    if simulate:
        from atoll.cli.experiments.simulate import simulate_as_asked
        from atoll.operations.requests import SimulateRequest

        unnamed = "atoll-flower-{name}-simulated"
        simulate_as_asked(SimulateRequest(what=reference, overrides=overrides, clients=nodes, out=out, unnamed=unnamed))
    from atoll.cli.flower.processes import run_app

    raise typer.Exit(run_app(reference, overrides, nodes=nodes, out=out, again=again))


def _reference(folder: Path) -> str:
    if not folder.is_dir():
        raise CommandError(f"{folder} is not a folder: name the folder with the app's pyproject.toml")
    return with_app(str(folder.absolute()))


def _say_plan(plan: "AppPlan") -> None:
    app = plan.app
    say(f"{app.task} {app.version}, in {app.folder}")
    say(f"ClientApp  {app.clientapp}: in the worker of each agent")
    say(f"ServerApp  {app.serverapp}: hosted, its own main() over messages")
    if plan.reasons:
        say("with --native it cannot run:")
        for reason in plan.reasons:
            say(f"  {reason}")
        return
    say(f"with --native it would run as rounds, {plan.strategy}:")
    width = max(map(len, plan.became), default=0)
    for setting, here in plan.became.items():
        say(f"  {setting:{width}}  ->  {here}")
    for line in plan.notes:
        note(line)
    sys.stdout.flush()
