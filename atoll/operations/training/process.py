"""The training in this process, which is one rank of it or the whole of it."""

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from atoll.exports.folders import TrainingFolder
from atoll.ground.faults import faults_in
from atoll.operations.exports import live_export
from atoll.operations.faults import TEMPORARY, CommandError, RunCrashed, RunFailed, temporary_cause
from atoll.operations.reporter import interruptible
from atoll.operations.requests import TrainRequest
from atoll.operations.task_failures import failure_of_the_task
from atoll.operations.temporary import START_BYTES, TryAgain, disk_fault
from atoll.operations.training.folder import folder_lock, folder_of_all_ranks
from atoll.operations.training.job import device_of
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch
from atoll.parallel.engine.agreement import CallsDiffer
from atoll.parallel.engine.passes import ReadyTwice
from atoll.parallel.engine.repetition import NotRepeatable
from atoll.parallel.engine.step_faults import CopiesDiffer, NotGathered
from atoll.parallel.private.account import AccountBroken
from atoll.parallel.private.secret import SecretBroken
from atoll.parallel.trainer.job import Job, JobRefused
from atoll.parallel.trainer.logs import Report, json_log, to_all
from atoll.parallel.trainer.run import LOG, Result, Surroundings, train
from atoll.parallel.trainer.saver import RunDiffers
from atoll.parallel.world import is_lost_peer, read_world
from atoll.task.errors import NotFinite, TaskBroken

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
    AccountBroken,
    SecretBroken,
)
"""The errors of a training that are the operator's mistakes, with exit code 2."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable of the file from which torchrun reads a rank's error."""

FAILED = (NotFinite, CheckpointFailed)
"""Failures of the training whose message needs no traceback, with exit code 1."""


def train_here(job: Job, request: TrainRequest, show: Report) -> Result:
    """Train in this process: alone, or as the rank that a launcher's environment variables name.

    Args:
        job: the job.
        request: its request.
        show: the report of events, beside the log.

    Raises:
        CommandError: the training is refused, or has failed.
    """
    with _stop_request() as is_stopping, failures_of(request), _alone(request):
        return (_recorded if ERROR_FILE in os.environ else train_job)(job, request, show, is_stopping)


@contextmanager
def _stop_request() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the caller has asked the training to stop.

    The caller may ask from its first call on, after the first step: until then there is nothing to save.
    """
    asked: list[bool] = []
    is_asking = False
    with ExitStack() as asking:

        def is_told() -> bool:
            nonlocal is_asking
            if not is_asking:
                is_asking = True
                asking.enter_context(interruptible(lambda: asked.append(True)))
            return bool(asked)

        yield is_told


@contextmanager
def failures_of(request: TrainRequest) -> Iterator[None]:
    """Raise an expected error of a training in sentences; a bug, or the loss of another rank, stays unchanged.

    Raises:
        CommandError: the training is refused, or has failed.
    """
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        if (failure := _failure_of(error, request)) is None:
            raise
        raise failure from None  # its code is decided here, whatever its cause is


def _alone(request: TrainRequest) -> AbstractContextManager[None]:
    """Return the context that locks the training's folder, for all of its ranks."""
    if (world := read_world()).size > 1:
        return folder_of_all_ranks(request.folder, world, device_of(request))
    return folder_lock(request.folder)


def _recorded(job: Job, request: TrainRequest, show: Report, is_stopping: Callable[[], bool]) -> Result:
    """Train under torchrun, and write an error where torchrun looks for the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import record

    result = record(train_job)(job, request, show, is_stopping)
    assert result is not None
    return result


def train_job(job: Job, request: TrainRequest, show: Report, is_stopping: Callable[[], bool]) -> Result:
    """Train as one rank of a training whose folder is locked already; arguments as in `train_here`."""
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


def crash_of(error: Exception) -> RunCrashed:
    """Convert an unexpected error of a training: its traceback, and with several ranks the number of this rank."""
    rank = f"rank {read_world().rank}:\n" if read_world().size > 1 else ""
    return RunCrashed(*(rank + "".join(traceback.format_exception(error))).splitlines())


def _failure_of(error: Exception, request: TrainRequest) -> CommandError | None:
    """Convert an expected error into sentences; None: it is a bug, or the loss of another rank."""
    if (cause := _temporary(error)) is not None and failure_of_the_task(error) is None:
        said = (str(error),) if isinstance(error, FAILED) else ()
        return TryAgain(*said, f"--out: {disk_fault(cause, request.folder, START_BYTES)}")
    if isinstance(error, REFUSED):
        return CommandError(*faults_in(error))
    if isinstance(error, FAILED):
        return RunFailed(str(error))
    if not is_lost_peer(error) and (line := failure_of_the_task(error)) is not None:
        return CommandError(line)
    return None


def _temporary(error: Exception) -> BaseException | None:
    """Return the error of a full disk or absent mount; of a checkpoint, whose ranks report their faults as text."""
    if isinstance(error, CheckpointFailed):
        return next((OSError(number, "") for number in TEMPORARY if os.strerror(number) in str(error)), None)
    return temporary_cause(error)


def _ignore(_event: object) -> None:
    """Discard an event: only the first rank reports."""
