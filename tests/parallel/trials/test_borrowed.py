"""Weights that a model uses outside of their layer's call are found, and train sharded as in one process."""

from typing import Any

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.blueprint import blocks
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.step_faults import NotGathered, pass_of_shards
from atoll.parallel.trials.watched import borrowed_blocks
from tests.parallel.engine.cases import mine, plan
from tests.parallel.ranks import call_on_ranks
from tests.turns import table

Outputs = tuple[torch.Tensor, torch.Tensor]


class Plain(nn.Module):
    """Three layers, each of which is a block; returns the outputs and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.penalty: Any
        self.register_buffer("penalty", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> Outputs:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs, self.penalty


class Penalized(Plain):
    def forward(self, inputs: torch.Tensor) -> Outputs:
        return super().forward(inputs)[0], sum((layer.get_parameter("weight") ** 2).sum() for layer in self.layers)


class PenalizedFirst(Plain):
    def forward(self, inputs: torch.Tensor) -> Outputs:
        penalty = self.layers[1].get_parameter("weight").abs().sum()
        return super().forward(inputs)[0], penalty


class Reused(Plain):
    """The weight between two calls of its layer."""

    def forward(self, inputs: torch.Tensor) -> Outputs:
        hidden = super().forward(inputs)[0]
        hidden = hidden + nn.functional.linear(hidden, self.layers[1].get_parameter("weight").t())
        return self.layers[1](hidden), self.penalty


class Uncalled(Plain):
    """A layer that is never called."""

    def forward(self, inputs: torch.Tensor) -> Outputs:
        weight = self.layers[0].get_parameter("weight")
        hidden = inputs @ (weight / weight.norm())
        return self.layers[2](self.layers[1](hidden)), self.penalty


class Returned(Plain):
    """A parameter among the outputs."""

    def forward(self, inputs: torch.Tensor) -> Outputs:
        return super().forward(inputs)[0], self.layers[2].get_parameter("bias")


class Weighing(Plain):
    """A parameter of the model itself among the outputs: a weight of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> Outputs:
        return super().forward(inputs)[0], self.weights[:2]


MODELS: dict[str, tuple[type[Plain], list[str]]] = {
    "plain": (Plain, []),
    "penalized": (Penalized, ["layers.0", "layers.1", "layers.2"]),
    "penalized first": (PenalizedFirst, ["layers.1"]),
    "reused": (Reused, ["layers.1"]),
    "uncalled": (Uncalled, ["layers.0"]),
    "returned": (Returned, ["layers.2", ""]),
    "weighing": (Weighing, [""]),
}

PLANS: dict[str, dict[str, Any]] = {
    "zero-1 2": {"dp_shard": 2, "zero": 1},
    "zero-2 2, accumulate 2": {"dp_shard": 2, "zero": 2, "accumulate": 2},
    "zero-3 2": {"dp_shard": 2, "zero": 3},
    "zero-3 2, recomputed": {"dp_shard": 2, "zero": 3, "recompute": "full"},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
}


def loss(outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], targets) + 0.1 * outputs[1].square().mean()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(4)]


def trained(name: str, plan: Plan, found: list[str]) -> list[float]:
    """Train on this rank and return the losses."""
    axes = Axes(plan.mesh, "cpu")
    optimization = Optimization(
        loss=loss, make_optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=0.01)
    )
    engine = assemble(MODELS[name][0](), plan, optimization, axes=axes, borrowed=found)
    return [engine.step(mine(*batch, axes)).loss.item() for batch in batches()]


def expected(name: str) -> list[float]:
    """Return the losses of a plain loop."""
    model, losses = MODELS[name][0](), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, targets in batches():
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_whose_weights_are_used_outside_of_their_call_are_found(name: str, device: str) -> None:
    make, right = MODELS[name]
    with torch.device(device):
        model, inputs = make(), torch.ones(2, 6)
    assert borrowed_blocks(model, blocks(model), lambda: model(inputs)) == right
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.real
@pytest.mark.parametrize(("name", "plan_name"), table(MODELS, PLANS, days=3))
def test_borrowed_weights_train_sharded_as_in_one_process(name: str, plan_name: str) -> None:
    layout = plan(**PLANS[plan_name])
    for losses in call_on_ranks(trained, layout.mesh.size, name, layout, MODELS[name][1]):
        assert losses == pytest.approx(expected(name), abs=1e-6)


@pytest.mark.real
@pytest.mark.parametrize("stage", [1, 3])
def test_a_use_that_no_trial_pass_has_seen_is_refused_with_the_way_out(stage: int) -> None:
    with pytest.raises(RankFailed, match=r"a parameter outside of the call of its block.* train with dp_replicate"):
        call_on_ranks(trained, 2, "uncalled", plan(dp_shard=2, zero=stage), [])


def failing(error: Exception, cause: Exception | None = None) -> None:
    with pass_of_shards(2):
        raise error from cause


def test_an_operator_that_torch_cannot_shard_is_refused_by_its_name_in_a_stage_too() -> None:
    error = NotImplementedError("Operator aten.some_backward does not have a sharding strategy registered.")
    for raised in ((error,), (RuntimeError("Failed to run stage backward"), error)):
        with pytest.raises(NotGathered, match=r"tp=2: Operator aten\.some_backward .* use tp=1"):
            failing(*raised)
