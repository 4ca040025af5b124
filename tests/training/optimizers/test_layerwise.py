"""The layer-wise optimizers beyond their formula: skipped layers, zero layers, bad options, no waiting."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.training.optimizers.lamb import LAMB
from atoll.training.optimizers.larc import LARC
from atoll.training.optimizers.lars import LARS
from atoll.training.optimizers.layerwise import LayerwiseOptimizer
from atoll.training.optimizers.norms import norms
from atoll.training.optimizers.novograd import NovoGrad

KINDS: list[type[LayerwiseOptimizer]] = [LARS, LARC, LAMB, NovoGrad]


def stepped(make: Any, start: torch.Tensor, *, steps: int = 4, lr: float = 0.1) -> torch.Tensor:
    """The weights after some steps with gradients that are always the same draw."""
    weights = nn.Parameter(start.clone())
    optimizer, generator = make([weights], lr), torch.Generator().manual_seed(3)
    for _ in range(steps):
        weights.grad = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        optimizer.step()
    return weights.detach()


BIAS = torch.linspace(-1, 1, 7, dtype=torch.float64)
MATRIX = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


@pytest.mark.parametrize("kind", [LARS, LARC])
def test_biases_are_plain_sgd_without_decay(kind: Any) -> None:
    ours = stepped(lambda p, lr: kind(p, lr, momentum=0.9, weight_decay=0.3), BIAS)
    theirs = stepped(lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), BIAS)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_biases_are_adam_under_lamb() -> None:
    ours = stepped(lambda p, lr: LAMB(p, lr, eps=1e-6, weight_decay=0.3), BIAS)
    theirs = stepped(lambda p, lr: torch.optim.Adam(p, lr, eps=1e-6), BIAS)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_biases_do_not_decay_under_novograd() -> None:
    decayed = stepped(lambda p, lr: NovoGrad(p, lr, weight_decay=0.3), BIAS)
    free = stepped(lambda p, lr: NovoGrad(p, lr, weight_decay=0.0), BIAS)
    assert torch.equal(decayed, free)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_can_be_treated_as_layers(kind: Any) -> None:
    as_layer = stepped(lambda p, lr: kind(p, lr, weight_decay=0.3, skip_1d=False), BIAS)
    as_matrix = stepped(lambda p, lr: kind(p, lr, weight_decay=0.3), BIAS.view(1, 7))
    torch.testing.assert_close(as_layer, as_matrix.view(7), rtol=1e-12, atol=1e-15)


def test_larc_that_trusts_everything_is_sgd_with_decay() -> None:
    ours = stepped(lambda p, lr: LARC(p, lr, momentum=0.9, weight_decay=0.3, trust=1e6), MATRIX)
    theirs = stepped(lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.3), MATRIX)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-3, 1e3), lr=st.floats(1e-3, 1.0))
def test_the_first_lars_step_is_trust_times_weights_for_any_gradient_scale(scale: float, lr: float) -> None:
    weights = nn.Parameter(MATRIX.clone())
    weights.grad = scale * torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    LARS([weights], lr, weight_decay=0.0, trust=0.01).step()
    length = (weights.detach() - MATRIX).norm().item()
    assert length == pytest.approx(lr * 0.01 * MATRIX.norm().item(), rel=1e-9)


@pytest.mark.parametrize("kind", [LARS, LARC, LAMB])
def test_a_layer_of_zeros_leaves_zero(kind: Any) -> None:
    moved = stepped(kind, torch.zeros(2, 3), steps=1)
    assert torch.isfinite(moved).all()
    assert (moved != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_zeros_at_rate_zero_changes_nothing_and_is_not_remembered(kind: Any) -> None:
    """This is torch's step of a fresh optimizer before it loads a checkpoint's state."""
    weights = nn.Parameter(MATRIX.clone())
    optimizer = kind([weights], 0.0, weight_decay=0.0)
    weights.grad = torch.zeros_like(weights)
    optimizer.step()
    assert torch.equal(weights.detach(), MATRIX)
    if kind is not LAMB:  # its step is counted, as Adam's is
        weights.grad = torch.ones_like(weights)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        torch.testing.assert_close(weights.detach(), stepped_once_with_ones(kind), rtol=1e-12, atol=0)


def stepped_once_with_ones(kind: Any) -> torch.Tensor:
    weights = nn.Parameter(MATRIX.clone())
    weights.grad = torch.ones_like(weights)
    kind([weights], 0.1, weight_decay=0.0).step()
    return weights.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_the_device(kind: Any) -> None:
    """Meta tensors have no values: whatever reads one raises."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to("meta")
    optimizer = kind(model.parameters(), 0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_follow_float32_ones(kind: Any) -> None:
    exact = stepped(kind, MATRIX.float(), lr=0.1)
    rough = stepped(kind, MATRIX.bfloat16(), lr=0.1)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closure_s_loss_is_returned_and_frozen_parameters_stay(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    frozen, free = model[0].weight.clone(), model[1].weight.detach().clone()
    optimizer = kind(model.parameters(), 0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(5, 4)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss > 0
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[1].weight, free)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_carries_on_exactly(kind: Any) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    whole = nn.Linear(4, 3)
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    first.load_state_dict(whole.state_dict())
    train(whole, kind(whole.parameters(), 0.1), range(5))
    optimizer = kind(first.parameters(), 0.1)
    train(first, optimizer, range(3))
    second.load_state_dict(first.state_dict())
    resumed = kind(second.parameters(), 0.1)
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, range(3, 5))
    assert torch.equal(whole.weight, second.weight)
    assert torch.equal(whole.bias, second.bias)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (
            LARS,
            {"lr": -1.0, "momentum": 1.0, "trust": 0.0},
            r"lars: lr .*-1.0; lars: momentum .*; lars: trust .*0.0",
        ),
        (LARC, {"lr": 0.1, "weight_decay": -0.5, "trust": -1.0}, r"larc: weight_decay .*-0.5; larc: trust .*-1.0"),
        (
            LAMB,
            {"lr": 0.1, "betas": (0.9, 1.0), "bounds": (2.0, 1.0)},
            r"lamb: betas .*0.9, 1.0.; lamb: bounds .*2.0",
        ),
        (NovoGrad, {"lr": float("nan"), "eps": 0.0}, r"novograd: lr .*nan; novograd: eps .*0.0"),
    ],
)
def test_options_out_of_range_are_all_named(kind: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind([nn.Parameter(torch.ones(2, 2))], **options)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        LARS(table.parameters(), 0.1).step()


def test_norms_of_plain_tensors_are_their_norms() -> None:
    tensors = [torch.tensor([[3.0, 4.0]]), torch.zeros(0, 2), torch.full((2, 2), 0.5, dtype=torch.bfloat16)]
    torch.testing.assert_close(norms(tensors), torch.tensor([5.0, 0.0, 1.0]))
    assert norms([]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_many_numbers_is_exact_to_float32(dtype: torch.dtype) -> None:
    """`torch.linalg.vector_norm` is 0.35 % off here."""
    number = torch.tensor(0.01, dtype=dtype)
    ours = norms([number.expand(10_000_000)]).item()
    assert ours == pytest.approx(number.item() * 10_000_000**0.5, rel=1e-6)
