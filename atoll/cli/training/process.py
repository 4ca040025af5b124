"""This process as a rank of a training, or as all of it."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from atoll.cli.printing import note
from atoll.cli.training.control import LAUNCHER, Control, Fault, control_of, stop_requested
from atoll.cli.training.progress import progress
from atoll.cli.training.request import Request, device_of
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch
from atoll.parallel.task.errors import NotFinite, TaskBroken
from atoll.parallel.trainer.job import Job, JobRefused
from atoll.parallel.trainer.logs import Event, Report, has_tensorboard, json_log, tensorboard, to_all
from atoll.parallel.trainer.run import LOG, TENSORBOARD, Result, Surroundings, train
from atoll.parallel.trainer.saver import RunDiffers
from atoll.parallel.world import read_world

REFUSED = (JobRefused, TaskBroken, RunDiffers, CheckpointMismatch, CheckpointBroken)
"""What the operator can mend."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun wants to read of an error."""

FAILED = (NotFinite, CheckpointFailed)
"""What the training has come to, in words that need no traceback."""


def run_here(job: Job, request: Request) -> Result | Fault:
    """Train in this process: alone, or as the rank that a launcher has made it."""
    control = control_of(os.environ)
    try:
        with _told_to_stop(control) as is_told:
            return _recorded(job, request, is_told) if ERROR_FILE in os.environ else _train(job, request, is_told)
    except Exception as error:
        fault = _fault_of(error)
        if control is not None and is_lost_peer(error):
            note(f"rank {read_world().rank} has lost another: {fault.lines[-1].partition('. ')[0]}")
        elif control is not None:
            control.fail(fault)
        return fault


def _recorded(job: Job, request: Request, is_told: Callable[[], bool]) -> Result:
    """Under torchrun, which tells what has failed first."""
    result = record(_train)(job, request, is_told)
    assert result is not None
    return result


def _train(job: Job, request: Request, is_told: Callable[[], bool]) -> Result:
    world, folder = read_world(), request.folder
    report: Report = _nobody
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = tensorboard(folder / TENSORBOARD) if has_tensorboard() else _without_tensorboard
        reports = [json_log(folder / LOG), progress(sys.stderr, note), drawn]
        report = to_all(*reports)
    here = Surroundings(
        world=world,
        device=device_of(request),
        folder=folder,
        clock=time.monotonic,
        is_told_to_stop=is_told,
        report=report,
    )
    return train(job, here)


def is_lost_peer(error: BaseException) -> bool:
    """Whether another rank's end is the reason, as far as a backend's words tell."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in words for word in ("gloo", "nccl", "connection", "peer"))


@contextmanager
def _told_to_stop(control: Control | None) -> Iterator[Callable[[], bool]]:
    """By our launcher through its folder; else by a signal. A second one ends the process as it always would.

    Under our launcher signals keep their meaning, so that a rank that waits for a dead one can be ended at once.
    """
    if control is not None:
        yield stop_requested(control, int(os.environ[LAUNCHER]))
        return
    signals = 0

    def told(number: int, _frame: object) -> None:
        nonlocal signals
        signals += 1
        signal.signal(number, before[number])

    before = {int(number): signal.signal(number, told) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: signals > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, REFUSED):
        return Fault(2, tuple(f"atoll: {line}" for line in str(error).split("; ")))
    if isinstance(error, FAILED):
        return Fault(1, (f"atoll: {error}",))
    rank = f"rank {read_world().rank}:\n" if read_world().size > 1 else ""
    return Fault(1, tuple((rank + traceback.format_exc()).splitlines()))


def _without_tensorboard(event: Event) -> None:
    """Say once that it is not there."""
    if event["event"] == "begin" and event["step"] == 0:
        note("no TensorBoard files: the package is not installed (pip install 'atoll[tensorboard]')")


def _nobody(_event: object) -> None:
    """What a rank reports that does not speak for all."""
