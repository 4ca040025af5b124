"""The store of one start of ranks: another one in each start, also where the launcher keeps its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from atoll.parallel.launch.meeting import PORT, store_of
from atoll.parallel.world import World
from benchmarks.processes import free_address
from tests.waiting import BOUND_S


def meet(environ):
    """The stores of two ranks, who find each other."""
    with ThreadPoolExecutor(2) as threads:
        begun = [threads.submit(store_of, World(rank, rank, 2), BOUND_S, environ) for rank in (1, 0)]
        return [each.result() for each in begun]


def place(port, *, is_shared):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(is_shared)}


@pytest.mark.real
def test_ranks_meet_at_the_address_that_the_launcher_names():
    one, two = meet(place(free_address().rpartition(":")[2], is_shared=False))
    one.set("a", "b")
    assert two.get("a") == b"b"


@pytest.mark.real
def test_each_start_has_a_store_of_its_own_where_the_launcher_keeps_one():
    of_launcher = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    of_launcher.set(PORT, free_address().rpartition(":")[2])  # of ranks that have died
    for start in ("first", "second"):
        one, two = meet(place(of_launcher.port, is_shared=True))
        assert two.add("starts", 1) == 1, "not that of an earlier start"
        one.set("start", start)
        assert two.get("start") == start.encode()
        del one, two


def test_a_rank_alone_needs_no_address_and_several_do():
    assert store_of(World(), 1.0, {}).add("a", 1) == 1
    with pytest.raises(ValueError, match="set MASTER_ADDR and MASTER_PORT to the address where the 2 ranks meet"):
        store_of(World(1, 1, 2), 1.0, {})
