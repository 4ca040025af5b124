"""The cases on a GPU: one rank over NCCL, and DDP's ranks of one GPU over gloo. `make test-cuda` runs this.

Gloo gathers and scatters no tensors of a GPU, and NCCL takes one rank for each GPU: other axes need several of them.
"""

import pytest
import torch

from atoll.parallel.world import World, process_group
from tests.parallel.engine import reference
from tests.parallel.engine.cases import CASES, Case, compare, train, train_by_name
from tests.parallel.forked import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")

ALONE = [case for case in CASES if case.ranks == 1 and "compiled" not in case.name]
SHARED = [case for case in CASES if case.name in ("ddp 2", "ddp accumulate 2")]


def expected(case: Case) -> reference.Trace:
    """Train on the CPU: the bars are those of another device, too."""
    return reference.plain_training(case.model(), case.loss(), case.batches(), case.optimizer, clip_norm=case.clip_norm)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_one_rank_over_nccl_trains_as_the_plain_loop_does(case: Case) -> None:
    with process_group(World(), "cuda"):
        compare(case, [train(case, "cuda:0")], expected(case))


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_ranks_that_share_a_gpu_train_as_the_plain_loop_does(case: Case) -> None:
    compare(case, run_ranks(train_by_name, case.ranks, case.name, "cuda:0", timeout_s=300), expected(case))
