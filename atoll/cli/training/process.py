"""The training in this process, which is one rank of it or the whole of it."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from atoll.cli.exports.live import live_export
from atoll.cli.faults import EXIT_AWAY, EXIT_OPERATOR, TEMPORARY, CommandError, RunFailed, temporary_cause
from atoll.cli.printing import note
from atoll.cli.task_failures import failure_of_the_task
from atoll.cli.temporary import START_BYTES, TryAgain, disk_fault
from atoll.cli.training.fault import Fault
from atoll.cli.training.folder import folder_lock, folder_of_all_ranks
from atoll.cli.training.progress import progress
from atoll.cli.training.request import Request, device_of
from atoll.exports.folders import TrainingFolder
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch
from atoll.parallel.engine.agreement import CallsDiffer
from atoll.parallel.engine.borrowed import NotGathered
from atoll.parallel.engine.inplace import CopiesDiffer
from atoll.parallel.engine.passes import ReadyTwice
from atoll.parallel.engine.repetition import NotRepeatable
from atoll.parallel.heap import keep_freed_blocks
from atoll.parallel.task.errors import NotFinite, TaskBroken
from atoll.parallel.task.randomness import generators_kept
from atoll.parallel.trainer.job import Job, JobRefused
from atoll.parallel.trainer.logs import Report, json_log, to_all
from atoll.parallel.trainer.run import LOG, Result, Surroundings, train
from atoll.parallel.trainer.saver import RunDiffers
from atoll.parallel.world import is_lost_peer, read_world
from atoll.protocol.signals import end_by_default, handled_by

REFUSED = (
    JobRefused,
    CopiesDiffer,
    CallsDiffer,
    NotGathered,
    ReadyTwice,
    NotRepeatable,
    TaskBroken,
    RunDiffers,
    CheckpointMismatch,
    CheckpointBroken,
)
"""The operator's mistakes, with exit code 2."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable of the file from which torchrun reads a rank's error."""

FAILED = (NotFinite, CheckpointFailed)
"""Failures of the training whose message needs no traceback, with exit code 1."""


def train_in_process(job: Job, request: Request) -> Result | Fault:
    """Train in this process: alone, or as the rank that a launcher's environment variables name."""
    keep_freed_blocks()
    train_rank = _recorded if ERROR_FILE in os.environ else _train
    try:
        with _stop_request() as is_stopping, _alone(request):
            return train_rank(job, request, is_stopping, progress(sys.stderr, note))
    except Exception as error:
        return _fault_of(error, request)


def outcome_of(
    make_job: Callable[[], Job], request: Request, is_stopping: Callable[[], bool]
) -> tuple[Result | Fault, Exception | None]:
    """Train as a rank of `atoll train --nproc`, which holds the lock on the folder; return the error of a fault, too.

    Args:
        make_job: loads the task.
        request: the options.
        is_stopping: returns whether to save and end.
    """
    try:
        return _train(make_job(), request, is_stopping, progress(sys.stderr, note)), None
    except Exception as error:
        return _fault_of(error, request), error


def train_for_a_program(job: Job, request: Request, show: Report) -> Result:
    """Train in this process, for a program: signals are its own, and its random generators are set back.

    Args:
        job: the job.
        request: the options.
        show: the report of events, beside the log.

    Raises:
        CommandError: the training is refused, or has failed; with the sentences of the command.
    """
    try:
        with _alone(request), generators_kept():
            return _train(job, request, lambda: False, show)
    except Exception as error:
        if (fault := _expected(error, request)) is None:
            raise
        raise failure_of(fault) from error


def failure_of(fault: Fault) -> CommandError:
    """Return a fault as an error with its exit code."""
    lines = [line.removeprefix("atoll: ") for line in fault.lines]
    if fault.code == EXIT_AWAY:
        return TryAgain(*lines)
    return CommandError(*lines) if fault.code == EXIT_OPERATOR else RunFailed(*lines)


def _alone(request: Request) -> AbstractContextManager[None]:
    """Return the lock on the training's folder, for all of its ranks."""
    if (world := read_world()).size > 1:
        return folder_of_all_ranks(request.folder, world, device_of(request))
    return folder_lock(request.folder)


def _recorded(job: Job, request: Request, is_stopping: Callable[[], bool], show: Report) -> Result:
    """Train under torchrun, and write an error where torchrun looks for the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import record

    result = record(_train)(job, request, is_stopping, show)
    assert result is not None
    return result


def _train(job: Job, request: Request, is_stopping: Callable[[], bool], show: Report) -> Result:
    world, folder = read_world(), request.folder
    report: Report = _ignore
    exports = live_export(request.exports if world.is_first else (), TrainingFolder(folder), folder)
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        report = to_all(json_log(folder / LOG), show, exports.take)
    here = Surroundings(
        world=world,
        device=device_of(request),
        folder=folder,
        clock=time.monotonic,
        is_told_to_stop=is_stopping,
        report=report,
    )
    with exports:
        return train(job, here)


@contextmanager
def _stop_request() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a signal has asked the training to stop.

    The signals are handled from its first call on, after the first step: until then there is nothing to save, and a
    signal ends the command. The second signal has its default effect.
    """
    is_stopping = is_handled = False

    def on_signal(_number: int, _frame: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        end_by_default()

    with ExitStack() as handling:

        def is_told() -> bool:
            nonlocal is_handled
            if not is_handled:
                is_handled = True
                handling.enter_context(handled_by(on_signal))
            return is_stopping

        yield is_told


def _fault_of(error: Exception, request: Request) -> Fault:
    if (fault := _expected(error, request)) is not None:
        return fault
    rank = f"rank {read_world().rank}:\n" if read_world().size > 1 else ""
    return Fault(1, tuple((rank + traceback.format_exc()).splitlines()))


def _expected(error: Exception, request: Request) -> Fault | None:
    """Return an expected error as a fault; None: it is a bug, or the loss of another rank."""
    if isinstance(error, CommandError):
        return Fault(error.code, tuple(f"atoll: {line}" for line in error.faults))
    if (cause := _temporary(error)) is not None and failure_of_the_task(error) is None:
        said = (f"atoll: {error}",) if isinstance(error, FAILED) else ()
        return Fault(EXIT_AWAY, (*said, f"atoll: --out: {disk_fault(cause, request.folder, START_BYTES)}"))
    if isinstance(error, REFUSED):
        return Fault(2, tuple(f"atoll: {line}" for line in str(error).split("; ")))
    if isinstance(error, FAILED):
        return Fault(1, (f"atoll: {error}",))
    if not is_lost_peer(error) and (line := failure_of_the_task(error)) is not None:
        return Fault(2, (f"atoll: {line}",))
    return None


def _temporary(error: Exception) -> BaseException | None:
    """Return the error of a full disk or absent mount; of a checkpoint, whose ranks report their faults as text."""
    if isinstance(error, CheckpointFailed):
        return next((OSError(number, "") for number in TEMPORARY if os.strerror(number) in str(error)), None)
    return temporary_cause(error)


def _ignore(_event: object) -> None:
    """Ignore an event: only the first rank reports."""
