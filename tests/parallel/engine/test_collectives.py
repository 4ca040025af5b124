"""The number of collectives in a step of three micro-batches, beside the theory (Rajbhandari et al. 2020, section 7):
all
that can wait for the last micro-batch do.
"""

from collections import Counter

import pytest
import torch

from atoll.parallel.engine.forked import run_ranks
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine, small
from tests.parallel.engine.test_step import engine_of

GROUPS = 3
"""Two blocks, each sharded by itself, and the rest."""

MICROBATCHES = 3


def collectives(plan: Plan) -> Counter[str]:
    """Count those of the third step, by torch's names; the two before build state that stays."""
    engine = engine_of(small(), plan, reference.token_loss)
    *before, last = (mine(*batch, engine.axes) for batch in reference.token_batches(64, 16))
    for batch in before:
        engine.step(batch, total=16 * 16, report=False)
    with torch.profiler.profile() as profile:
        engine.step(last, total=16 * 16, report=False)
    return Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))


@pytest.mark.parametrize(
    ("mesh", "zero", "expected"),
    [
        (Mesh(dp_replicate=2), None, {"c10d::allreduce_": 1}),
        (Mesh(dp_shard=2), 1, {"c10d::_allgather_base_": GROUPS, "c10d::_reduce_scatter_base_": GROUPS}),
        (Mesh(dp_shard=2), 2, {"c10d::_allgather_base_": GROUPS, "c10d::_reduce_scatter_base_": GROUPS * MICROBATCHES}),
        (
            Mesh(dp_shard=2),
            3,
            {
                "c10d::_allgather_base_": 2 * GROUPS * MICROBATCHES,
                "c10d::_reduce_scatter_base_": GROUPS * MICROBATCHES,
            },
        ),
    ],
    ids=["ddp", "zero-1", "zero-2", "zero-3"],
)
def test_what_can_wait_for_the_last_micro_batch_waits(mesh: Mesh, zero: int | None, expected: dict[str, int]) -> None:
    plan = Plan(mesh=mesh, zero=zero, accumulate=MICROBATCHES)
    assert run_ranks(collectives, 2, plan) == [Counter(expected)] * 2
