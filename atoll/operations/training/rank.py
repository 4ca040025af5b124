"""A rank that `launch` has started: it trains; the first one sends its events to the launcher's process."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from atoll.ground.process.heap import keep_freed_blocks
from atoll.ground.process.loading import keep_modules
from atoll.operations.faults import CommandError, RunCrashed
from atoll.operations.requests import TrainRequest
from atoll.operations.training.job import job_of
from atoll.operations.training.launch import CRASH
from atoll.operations.training.process import crash_of, failures_of, train_job
from atoll.parallel.launch.line import Line, dial
from atoll.parallel.launch.rank_fault import RankFault
from atoll.parallel.trainer.logs import Report
from atoll.parallel.world import is_lost_peer, read_world

DIAL_S = 60.0
"""Seconds in which the launcher must take rank 0's line."""


def main(folder: str, encoded: str) -> None:
    """Train as one rank that `launch` has started.

    Args:
        folder: the folder of the launcher.
        encoded: the request.

    Raises:
        SystemExit: the training has failed, on this rank or another.
    """
    keep_modules()
    keep_freed_blocks()
    request, world = TrainRequest.decode(encoded), read_world()
    line = dial(Path(folder), {}, DIAL_S) if world.is_first else None
    show: Report = line.tell if line else lambda event: None
    try:
        with failures_of(request):
            train_job(job_of(request), request, show, _stop_request(line) if line else lambda: False)
    except Exception as error:
        fault = error if isinstance(error, CommandError) else crash_of(error)
        if any(is_lost_peer(each) for each in (error, error.__context__) if each is not None):
            lost = fault.faults[-1].partition(". ")[0]
            logging.getLogger("atoll").warning("rank %d has lost another rank: %s", world.rank, lost)
        else:
            kind = CRASH if isinstance(fault, RunCrashed) else str(fault.code)
            RankFault(rank=world.rank, kind=kind, detail="\n".join(fault.faults)).write(Path(folder))
        raise SystemExit(fault.code) from None


def _stop_request(line: Line) -> Callable[[], bool]:
    """Return a function that says whether to stop: the launcher has asked for it, or is gone.

    Its first call tells the launcher that the ranks look for a request from now on; until then they load the task.
    """
    told = threading.Event()

    def read() -> None:
        for _ in line.messages():
            told.set()
        told.set()

    threading.Thread(target=read, name="line", daemon=True).start()
    has_begun = False

    def is_told() -> bool:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            line.tell({"begun": True})
        return told.is_set()

    return is_told
