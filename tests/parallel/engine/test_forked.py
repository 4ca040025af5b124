import os
import signal

import pytest
import torch
import torch.distributed as dist

from atoll.parallel.engine.forked import RankFailed
from tests.parallel.forked import run_ranks


def rank_sum(offset: int) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    signal.pause()


def test_every_rank_returns_its_own_result() -> None:
    assert run_ranks(rank_sum, 4, 10) == [(rank, 46.0) for rank in range(4)]


def test_a_failing_rank_is_heard_in_its_own_words() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: Traceback[\s\S]*rank 1 has had enough"):
        run_ranks(fail_on, 2, 1)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailed, match="rank 0: died with exit code -9"):
        run_ranks(die_on, 2, 0)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not end within 1.0 s"):
        run_ranks(hang, 2, timeout_s=1.0)
