"""The orders and votes of ranks that share a store."""

import pytest
import torch.distributed as dist

from atoll.parallel.launch.rank_fault import RankFault
from atoll.parallel.mesh_client.orders import Orders

FAULT = RankFault(rank=1, kind="task_broken", detail="odd data")


def both(timeout_s=60.0):
    store = dist.HashStore()
    return [Orders(store, rank, 2, timeout_s) for rank in (0, 1)]


def test_an_order_reaches_all_ranks_and_a_vote_tells_the_first_of_every_fault():
    first, second = both()
    for number in range(4):
        first.give({"op": "train", "number": number})
        assert second.take() == {"op": "train", "number": number}
        assert second.vote(None) == []
        assert first.vote(None) == []
    first.give({"op": "train"})
    second.take()
    first._store.set("end/5/0", FAULT.encode())  # of rank 0, at the same time
    assert second.vote(FAULT) == [FAULT, FAULT]


@pytest.mark.slow
def test_a_rank_that_has_failed_alone_is_told_to_end():
    first, second = both()
    first.give({"op": "train"})
    second.take()
    assert second.vote(FAULT) is None


def test_the_first_rank_does_not_wait_for_ever_for_a_vote():
    first, second = both(0.2)
    first.give({"op": "train"})
    second.take()
    with pytest.raises(dist.DistError):
        first.vote(None)
