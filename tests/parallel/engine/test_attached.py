"""Hooks and attributes of parameters are what they are in one process, on every plan."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atoll.parallel.engine.assemble import assemble
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.optimization import Optimization
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.models.decoder import Decoder
from tests.parallel.engine import reference
from tests.parallel.engine.cases import SEQUENCE, VOCAB, decoder, mine, plan
from tests.parallel.ranks import call_on_ranks

CLOSE = 2e-6


class Scaling(nn.Linear):
    """A layer whose forward reads an attribute of its weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.weight.scale  # type: ignore[operator]


def hooked() -> nn.Module:
    """A row of layers with a hook of each kind: masks, clamps, norms, in place, reading its weight, with a state."""
    torch.manual_seed(0)
    layers = (nn.Linear(64, 24), nn.Tanh(), Scaling(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 10))
    model = nn.Sequential(nn.Flatten(), *layers)
    first, middle, last = model[1], model[3], model[7]
    middle.weight.scale = 1.5  # type: ignore[union-attr]
    mask = (torch.rand(24, 64) > 0.5).float()
    first.weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[union-attr]
    first.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[union-attr]
    middle.weight.register_hook(lambda gradient: gradient / gradient.norm())  # type: ignore[union-attr]
    middle.weight.register_hook(lambda gradient: gradient + 0.1 * middle.weight.detach())  # type: ignore[union-attr]

    def cut(bias: torch.Tensor) -> None:
        assert bias.grad is not None
        bias.grad[3:].zero_()

    middle.bias.register_post_accumulate_grad_hook(cut)  # type: ignore[union-attr]

    def project(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.sub_(weight.grad.mean())
        weight.data.clamp_(-0.15, 0.15)

    last.weight.register_post_accumulate_grad_hook(project)  # type: ignore[union-attr]
    momentum = torch.zeros(10)
    last.bias.register_hook(lambda gradient: momentum.mul_(0.5).add_(gradient).clone())  # type: ignore[union-attr]
    return model


def sharing() -> nn.Module:
    """A layer on the first and the third of four stages, with hooks that have a state, on gradient and value."""
    torch.manual_seed(0)
    shared = Scaling(64, 64)
    shared.weight.scale = 1.5  # type: ignore[attr-defined]
    pieces = (nn.Flatten(), shared, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), shared, nn.Tanh(), nn.Linear(64, 10))
    momentum = torch.zeros(64, 64)
    shared.weight.register_hook(lambda gradient: momentum.mul_(0.5).add_(gradient).clone())

    def project(bias: torch.Tensor) -> None:
        assert bias.grad is not None
        bias.grad.sub_(bias.grad.mean())
        bias.data.mul_(0.9)

    shared.bias.register_post_accumulate_grad_hook(project)
    return nn.Sequential(*pieces)


def hooked_decoder() -> nn.Module:
    model = decoder(2, tied=True)
    assert isinstance(model, Decoder)
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            parameter.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
    return model


def trained_on(made: nn.Module, batches: Any, loss: Any, chosen: Plan) -> dict[str, torch.Tensor]:
    axes = Axes(chosen.mesh, "cpu") if chosen.mesh.size > 1 or chosen.is_sharded else None
    optimization = Optimization(loss=loss, make_optimizer=lambda named: reference.make_optimizer("sgd", named))
    engine = assemble(made, chosen, optimization, axes=axes)
    for inputs, targets in batches:
        engine.step(mine(inputs, targets, axes))
    return {name: whole(p.detach()).clone() for name, p in engine.parameters.items()}


PLANS: dict[str, Plan] = {
    "ddp": plan(dp_replicate=2),
    "ddp, accumulate": plan(dp_replicate=2, accumulate=2),
    "zero-1, accumulate": plan(dp_shard=2, zero=1, accumulate=2),
    "zero-2": plan(dp_shard=2, zero=2),
    "zero-3": plan(dp_shard=2, zero=3),
    "zero-3, recomputed": plan(dp_shard=2, recompute="full"),
    "1f1b": plan(pp=2),
    "interleaved": plan(pp=2, schedule="interleaved-1f1b"),
    "zbv": plan(pp=2, schedule="zbv-zero-bubble"),
}
TENSOR_PLANS = {"tp": plan(tp=2), "pp x tp": plan(pp=2, tp=2), "fsdp x tp": plan(dp_shard=2, tp=2)}


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items())


def on_a_rank(names: list[str], make: Callable[[], nn.Module]) -> dict[str, float]:
    torch.set_num_threads(1)
    batches, loss = reference.image_batches(last=7), nn.functional.cross_entropy
    expected = reference.plain_training(make(), loss, batches, "sgd")
    return {name: far(trained_on(make(), batches, loss, PLANS[name]), expected.parameters) for name in names}


def tensors_on_a_rank(names: list[str]) -> dict[str, float]:
    torch.set_num_threads(1)
    batches = reference.token_batches(VOCAB, SEQUENCE)
    expected = reference.plain_training(hooked_decoder(), reference.token_loss, batches, "sgd").parameters
    return {
        name: far(trained_on(hooked_decoder(), batches, reference.token_loss, TENSOR_PLANS[name]), expected)
        for name in names
    }


@pytest.mark.real
@pytest.mark.parametrize("make", [hooked, sharing])
def test_hooks_see_the_gradient_of_the_whole_batch_on_every_plan(make: Callable[[], nn.Module]) -> None:
    for distances in call_on_ranks(on_a_rank, 2, list(PLANS), make, timeout_s=300):
        assert all(distance < CLOSE for distance in distances.values()), distances


@pytest.mark.real
@pytest.mark.parametrize(("ranks", "names"), [(2, ["tp"]), (4, ["pp x tp", "fsdp x tp"])])
def test_hooks_see_whole_tensors_under_tensor_parallelism(ranks: int, names: list[str]) -> None:
    for distances in call_on_ranks(tensors_on_a_rank, ranks, names, timeout_s=300):
        assert all(distance < CLOSE for distance in distances.values()), distances


def test_hooks_see_the_gradient_of_the_whole_batch_where_one_process_accumulates() -> None:
    batches = reference.image_batches(last=7)
    expected = reference.plain_training(hooked(), nn.functional.cross_entropy, batches, "sgd").parameters
    found = trained_on(hooked(), batches, nn.functional.cross_entropy, plan(accumulate=3))
    assert far(found, expected) < CLOSE
    assert far(trained_on(hooked(), batches, nn.functional.cross_entropy, plan()), expected) == 0


def noisy() -> nn.Module:
    model = hooked()
    model[1].weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))  # type: ignore[union-attr]
    return model


def with_noise() -> None:
    trained_on(noisy(), reference.image_batches(), nn.functional.cross_entropy, plan(dp_shard=2))


@pytest.mark.real
def test_a_hook_that_draws_is_refused_on_ranks() -> None:
    with pytest.raises(
        RankFailed, match=r"1\.weight.*: a hook draws random numbers, and each rank draws different ones"
    ):
        call_on_ranks(with_noise, 2)
