"""The memory of a forked rank: its garbage collections do not visit what the fork server has imported."""

import gc
import multiprocessing
import resource
from multiprocessing.connection import Connection

import pytest

from atoll.parallel.engine.forked import FROZEN, PRELOAD
from tests.waiting import BOUND_S


def _collect(sender: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gc.collect()
    sender.send(
        (gc.get_freeze_count(), len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    )


@pytest.mark.real
def test_a_forked_process_collects_nothing_that_the_fork_server_has_imported() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, FROZEN])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_collect, args=(sender,), daemon=True)
    process.start()
    assert receiver.poll(BOUND_S)
    num_frozen, num_collected, num_copied_pages = receiver.recv()
    process.join(BOUND_S)
    assert num_frozen > 100_000, "the objects of torch"
    assert num_collected < num_frozen / 5
    assert num_copied_pages < 2_000  # without it, more than twenty thousand
