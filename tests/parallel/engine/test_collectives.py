"""The number of collectives in a step of three micro-batches, beside the theory (Rajbhandari et al. 2020, section 7):
all that can wait for the last micro-batch do. Beside them are the few bytes by which ranks agree on what they have
used: one all-reduce for each forward pass of a sharded model, and one for each step.
"""

from collections import Counter

import pytest
import torch

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine import reference
from tests.parallel.engine.cases import mine, small
from tests.parallel.engine.test_step import engine_of
from tests.parallel.ranks import call_on_ranks

GROUPS = 3
"""Two blocks, each sharded by itself, and the rest."""

MICROBATCHES = 3

GATHER, SCATTER, REDUCE = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"


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
        (Mesh(dp_replicate=2), None, (0, 0, 1 + 1)),
        (Mesh(dp_shard=2), 1, (GROUPS, GROUPS, MICROBATCHES + 1)),
        (Mesh(dp_shard=2), 2, (GROUPS, GROUPS * MICROBATCHES, MICROBATCHES + 1)),
        (Mesh(dp_shard=2), 3, (2 * GROUPS * MICROBATCHES, GROUPS * MICROBATCHES, MICROBATCHES + 1)),
    ],
    ids=["ddp", "zero-1", "zero-2", "zero-3"],
)
def test_what_can_wait_for_the_last_micro_batch_waits(
    mesh: Mesh, zero: int | None, expected: tuple[int, int, int]
) -> None:
    plan = Plan(mesh=mesh, zero=zero, accumulate=MICROBATCHES)
    for counted in call_on_ranks(collectives, 2, plan):
        assert (counted[GATHER], counted[SCATTER], counted[REDUCE]) == expected
        assert counted.keys() <= {GATHER, SCATTER, REDUCE}
