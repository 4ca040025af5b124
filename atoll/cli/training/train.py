"""`atoll train`: train centrally on the pooled data of all sites, in one process or on a mesh."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.printing import as_json, complain, note, say, seconds
from atoll.cli.requested import requested
from atoll.ground.printable import count_of
from atoll.ground.process.loading import loading
from atoll.operations.faults import CommandError
from atoll.operations.requests import TrainRequest
from atoll.protocol.signals import ExitCode, handled_by

if TYPE_CHECKING:
    from atoll.parallel.trainer.job import Job
    from atoll.parallel.trainer.run import Result


@requested(TrainRequest)
def train(request: TrainRequest, json: options.Json = False) -> None:
    """Train a task centrally, on the pooled data of all its sites, in one process or on a mesh.

    The training resumes from the newest checkpoint in its folder. Ctrl-C or SIGTERM saves it. Exit code 1: the training
    failed; 2: a mistake in the arguments, settings or task; 75: the disk is full or away; 130: Ctrl-C or SIGTERM.
    """
    if_stopped("before the first step; nothing was written")
    with loading():
        from atoll.operations.training.job import ready

    request, job = ready(request)
    if_stopped("before a step was made; the same command resumes it")
    result = (_launch if (request.nproc or 1) > 1 else train_in_process)(job, request)
    if_stopped("")
    raise typer.Exit(_report(result, request.folder, json))


def train_in_process(job: "Job", request: TrainRequest) -> "Result":
    """Train in this process, show the progress, and let a signal end the training cleanly.

    Raises:
        CommandError: the training is refused, or has failed; a bug, too, ends it with exit code 1.
    """
    with loading():
        from atoll.cli.training.progress import progress
        from atoll.ground.process.heap import keep_freed_blocks
        from atoll.operations.training.process import crash_of, train_here

    keep_freed_blocks()
    try:
        with progress(sys.stderr, note) as show:
            return train_here(job, request, show)
    except CommandError:
        raise
    except Exception as error:
        raise crash_of(error) from None


def _launch(_job: "Job", request: TrainRequest) -> "Result":
    """Train in ranks on this machine; at the first signal they save and end, at a second one they end at once."""
    from atoll.cli.training.progress import progress
    from atoll.operations.training.launch import launch

    signals: list[int] = []
    with handled_by(lambda number, _frame: signals.append(number)), progress(sys.stderr, note) as show:
        result = launch(request, show, lambda: len(signals))
    if result is None:
        complain(f"stopped by {signal.Signals(signals[0]).name} before it was saved; the same command resumes it")
        raise typer.Exit(ExitCode.STOPPED)
    return result


def _of_privacy(result: "Result") -> str:
    """Return the guarantee of a private training, and why it ended before its last step."""
    assert result.privacy is not None
    sentence: str = result.privacy["sentence"]
    return f"the budget of privacy is spent; {sentence}" if result.why == "budget" else sentence


def _report(result: "Result", folder: Path, json: bool) -> int:
    """Print the result, and return the exit code."""
    from atoll.cli.training.progress import shown
    from atoll.parallel.world import read_world

    world = read_world()
    if world.is_first:
        if json:
            as_json(result)
        else:
            epochs = "1 epoch" if result.epochs == 1 else f"{result.epochs:.4g} epochs"
            say(
                f"{result.task}: {result.why} after {count_of(result.steps, 'step')} ({epochs}, "
                f"{seconds(result.seconds)}) on {result.mesh}, {result.device}"
            )
            if result.metrics:
                say(shown(result.metrics))
            if result.privacy is not None:
                say(_of_privacy(result))
            say(
                f"everything is in {folder}" if result.why != "interrupted" else "the same command resumes the training"
            )
    is_alone = world.size == 1  # a launcher would take the exit code for a failure
    return ExitCode.STOPPED if result.why == "interrupted" and is_alone else ExitCode.OK
