"""`atoll train`: train centrally on the pooled data of all sites, in one process or on a mesh."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.aggregation.printable import count_of
from atoll.cli import options
from atoll.cli.exports.live import Exports
from atoll.cli.printing import as_json, note, say, seconds
from atoll.cli.stopping import INTERRUPTED, if_stopped
from atoll.parallel.loading import loading

if TYPE_CHECKING:
    from atoll.cli.training.fault import Fault
    from atoll.parallel.trainer.run import Result

What = Annotated[
    str, typer.Argument(metavar="TASK", help="The task, `module:attribute` or `path/to/file.py:attribute`.")
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        help="Ranks to start on this machine; without it, train in this process, as one rank under `torchrun`.",
    ),
]
MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="Degrees of the axes pp, dp_replicate, dp_shard and tp, as in dp=2,tp=2; dp is dp_replicate, or dp_shard "
        "with ZeRO; auto: the planner's choice for the model and the ranks' memory. By default dp is the number "
        "of ranks.",
    ),
]
Zero = Annotated[int | None, typer.Option("--zero", metavar="STAGE", help="ZeRO stage 1, 2 or 3; short for plan.zero.")]
Epochs = Annotated[
    int | None, typer.Option("--epochs", metavar="N", help="Passes over the data; short for train.epochs.")
]
Steps = Annotated[int | None, typer.Option("--steps", metavar="N", help="Optimizer steps; short for train.steps.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The folder of the training; by default atoll-train-NAME."),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="KIND", help="Kind of device: cpu, cuda, or auto (cuda where there is a GPU)."),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh/--resume", help="Refuse a folder that is not empty, instead of resuming from its checkpoint."
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", metavar="N", help="Times that all ranks restart after one has died; only with --nproc."
    ),
]


def train(
    task: What,
    nproc: Nproc = None,
    mesh: MeshText = None,
    zero: Zero = None,
    epochs: Epochs = None,
    steps: Steps = None,
    out: Out = None,
    device: Device = "auto",
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    fresh: Fresh = False,
    exports: Exports = [],  # noqa: B006
    max_restarts: Restarts = 3,
    json: options.Json = False,
) -> None:
    """Train a task centrally, on the pooled data of all its sites, in one process or on a mesh.

    The training resumes from the newest checkpoint in its folder. Ctrl-C or SIGTERM saves it. Exit code 1: the training
    failed; 2: a mistake in the arguments, settings or task; 75: the disk is full or away; 130: Ctrl-C or SIGTERM.
    """
    if_stopped("before the first step; nothing was written")
    with loading():
        from atoll.cli.training.request import Request, check_place, job_of
        from atoll.exports.tools import parsed
        from atoll.parallel.engine.plan import AUTO

    from atoll.cli.files import overriding
    from atoll.cli.runs.starts import with_start_file

    request = Request(
        task=task,
        nproc=nproc,
        mesh=mesh,
        zero=zero,
        out=out,
        device=device,
        overrides=overriding(with_start_file(overrides), train__epochs=epochs, train__steps=steps, plan__zero=zero),
        is_fresh=fresh,
        exports=exports,
    )
    check_place(request)
    parsed(exports)
    job = job_of(request)
    if mesh == AUTO:  # for the ranks, which then need not choose
        request = dataclasses.replace(request, mesh=job.plan.mesh.text, zero=job.plan.zero)
    if_stopped("before a step was made; the same command goes on")
    if nproc is not None and nproc > 1:
        from atoll.cli.training.launch import launch

        outcome = launch(request, max_restarts=max_restarts)
    else:
        with loading():
            from atoll.cli.training.process import train_in_process

        outcome = train_in_process(job, request)
    if_stopped("")
    raise typer.Exit(_report(outcome, request.folder, json))


def _report(outcome: "Result | Fault", folder: Path, json: bool) -> int:
    """Print the outcome, and return the exit code."""
    from atoll.cli.training.fault import Fault
    from atoll.cli.training.progress import shown
    from atoll.parallel.world import read_world

    if isinstance(outcome, Fault):
        for line in outcome.lines:
            note(line)
        return outcome.code
    world = read_world()
    if world.is_first:
        if json:
            as_json(outcome)
        else:
            epochs = "1 epoch" if outcome.epochs == 1 else f"{outcome.epochs:.4g} epochs"
            say(
                f"{outcome.task}: {outcome.why} after {count_of(outcome.steps, 'step')} ({epochs}, "
                f"{seconds(outcome.seconds)}) on {outcome.mesh}, {outcome.device}"
            )
            if outcome.metrics:
                say(shown(outcome.metrics))
            say(
                f"everything is in {folder}"
                if outcome.why != "interrupted"
                else "the same command resumes the training"
            )
    is_alone = world.size == 1  # a launcher would take the exit code for a failure
    return INTERRUPTED if outcome.why == "interrupted" and is_alone else 0
