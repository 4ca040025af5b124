"""A pipeline whose batches have other forms from step to step."""

import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.pipeline import FORMS_MAX
from atoll.parallel.engine.plan import Plan
from tests.parallel.engine.cases import mine, plan
from tests.parallel.engine.reference import make_optimizer
from tests.parallel.ranks import call_on_ranks


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def losses_of(plan: Plan) -> list[float]:
    """Return the losses of batches that are padded to their longest example, as collation does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), Mean())
    axes = Axes(plan.mesh, "cpu") if plan.mesh.size > 1 else None
    optimization = Optimization(
        loss=nn.functional.cross_entropy, make_optimizer=lambda named: make_optimizer("sgd", named)
    )
    engine = assemble(model, plan, optimization, axes=axes)
    found = []
    for length in (3, 5, 3, *range(4, 5 + FORMS_MAX), 3):
        inputs = torch.randint(0, 11, (8, length))
        found.append(engine.step(mine(inputs, torch.randint(0, 3, (8,)), axes)).loss.item())
        seen: list[float] = []
        engine.evaluate(
            mine(inputs[:, :2], torch.zeros(8).long(), axes),
            lambda outputs, _targets, rows, seen=seen: seen.append(outputs.sum().item()),
        )
        assert (axes is not None and axes.coordinates["pp"] == 0) or len(seen) == plan.microbatches
    return found


def test_each_batch_has_its_own_length() -> None:
    expected = losses_of(plan())
    for found in call_on_ranks(losses_of, 2, plan(pp=2)):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
