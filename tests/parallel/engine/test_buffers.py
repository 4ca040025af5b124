"""The mean of the ranks' buffers: exact where they are equal, and the same bits on all ranks."""

import math

import pytest
import torch
from torch import nn

from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.buffers import average_buffers
from atoll.parallel.engine.mesh import Mesh
from tests.parallel.ranks import call_on_ranks

EQUAL = [*(n / 7 for n in range(1, 200)), 1e-45, 3e38, math.inf, -math.inf]
"""The mean of three equal floats is another one for some of them, and the sum of large ones is infinite."""


def averaged(mesh: Mesh) -> dict[str, torch.Tensor]:
    """The buffers of this rank after they were averaged."""
    axes, module = Axes(mesh, "cpu"), nn.Module()
    rank = axes.dp_rank
    module.register_buffer("equal", torch.tensor(EQUAL))
    module.register_buffer("halves", torch.tensor([n / 7 for n in range(1, 200)], dtype=torch.bfloat16))
    module.register_buffer("mixed", torch.tensor([0.1, float(rank), 2.0 * rank, math.nan if rank == 1 else 1.0]))
    module.register_buffer("zeros", torch.tensor([-0.0 if rank == 1 else 0.0]))
    module.register_buffer("count", torch.tensor([3 + rank]))
    module.register_buffer("scalar", torch.tensor(0.1))
    average_buffers([module], axes)
    return dict(module.named_buffers())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(dp_replicate=3), Mesh(dp_shard=3)], ids=str)
def test_equal_floats_stay_and_others_become_their_mean(mesh: Mesh) -> None:
    found = call_on_ranks(averaged, 3, mesh)
    for buffers in found:
        assert buffers["equal"].tolist() == torch.tensor(EQUAL).tolist()
        assert buffers["halves"].tolist() == (torch.arange(1, 200) / 7).bfloat16().tolist()
        first, mean, double, unknown = buffers["mixed"].tolist()
        assert (first, mean, double, math.isnan(unknown)) == (torch.tensor(0.1).item(), 1.0, 2.0, True)
        assert (buffers["count"].item(), buffers["scalar"].item()) == (3, torch.tensor(0.1).item())
    signs = [math.copysign(1.0, buffers["zeros"].item()) for buffers in found]
    assert signs == [signs[0]] * 3, "the same bits on all ranks"
