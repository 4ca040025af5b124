"""A rank that `atoll train --nproc` has started: it trains, and its launcher prints the outcome."""

import threading
from collections.abc import Callable
from pathlib import Path

from atoll.cli.printing import note
from atoll.cli.training.fault import Fault
from atoll.cli.training.process import outcome_of
from atoll.cli.training.request import Request, job_of
from atoll.parallel.heap import keep_freed_blocks
from atoll.parallel.launch.line import dial
from atoll.parallel.launch.rank_fault import RankFault
from atoll.parallel.loading import keep_modules
from atoll.parallel.world import is_lost_peer, read_world

DIAL_S = 60.0
"""Seconds in which the launcher must take rank 0's line."""


def main(folder: str, encoded: str) -> None:
    """Train as one rank.

    Args:
        folder: of the launcher.
        encoded: the options of the command.

    Raises:
        SystemExit: the training has failed, on this rank or another.
    """
    keep_modules()
    keep_freed_blocks()
    request, world = Request.decode(encoded), read_world()
    is_told = _stop_request(Path(folder)) if world.is_first else lambda: False
    outcome, error = outcome_of(lambda: job_of(request), request, is_told)
    if not isinstance(outcome, Fault):
        return
    if error is not None and is_lost_peer(error):
        note(f"rank {world.rank} has lost another rank: {outcome.lines[-1].partition('. ')[0]}")
    else:
        fault = RankFault(rank=world.rank, kind=str(outcome.code), detail="\n".join(outcome.lines))
        fault.write(Path(folder))
    raise SystemExit(outcome.code or 1)


def _stop_request(folder: Path) -> Callable[[], bool]:
    """Return a function that says whether to stop: the launcher has asked for it, or is gone.

    Its first call tells the launcher that the ranks look for a request from now on; until then they load the task.
    """
    line, told = dial(folder, {}, DIAL_S), threading.Event()

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
