"""Clipped sums of example gradients, against a loop over single rows."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atoll.training.private.captured_gradients import CapturedGradients
from atoll.training.private.checks import Trial, choose
from atoll.training.private.example_gradients import ExampleGradients
from atoll.training.private.uses import Lookup, Outer
from tests.training.private import models
from tests.training.private.models import Case, loop

CAPTURED = [
    *(models.mlp, models.cnn, models.shared, models.decoder, models.tied, models.embedding),
    *(models.lora, models.lora_frozen_a),
]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

BY_VMAP_ALONE = [models.lstm, models.elsewhere]


@pytest.mark.parametrize("make", [*CAPTURED, *BY_VMAP_ALONE], ids=lambda make: make.__name__)
def test_each_way_equals_a_loop_over_single_rows(make: Callable[[], Case]) -> None:
    case = make()
    case.model.train()
    _, norms = loop(case, 1.0)
    clip_norm = sorted(norms)[len(norms) // 2] * 1.01  # some rows are clipped, some are not
    expected, _ = loop(case, clip_norm)
    ways = (ExampleGradients, CapturedGradients) if make in CAPTURED else (ExampleGradients,)
    for way in ways:
        found = way(case.model, case.loss, clip_norm).clipped_sum(case.inputs, case.targets, case.rows)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) <= 1e-6 * clip_norm * case.rows, (way, name)


@pytest.mark.parametrize("make", [*CAPTURED, *BY_VMAP_ALONE], ids=lambda make: make.__name__)
def test_the_way_that_equals_single_rows_is_chosen(make: Callable[[], Case]) -> None:
    case = make()
    case.model.train()
    trial = Trial(
        model=case.model, loss=case.loss, units=case.units, inputs=case.inputs, targets=case.targets, rows=case.rows
    )
    found, faults = choose(trial, 1.0)
    assert faults == []
    assert type(found) is (CapturedGradients if make in CAPTURED else ExampleGradients)


def test_parts_by_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.tied()
    expected, _ = loop(case, 0.5)
    monkeypatch.setattr("atoll.training.private.uses.BYTES_AT_ONCE", 1)
    small = ExampleGradients(case.model, case.loss, 0.5, bytes_max=1)
    assert small.at_once == 1
    for way in (small, CapturedGradients(case.model, case.loss, 0.5)):
        for name, value in way.clipped_sum(case.inputs, case.targets, case.rows).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6 * 0.5 * case.rows)


@pytest.mark.parametrize("way", [ExampleGradients, CapturedGradients])
def test_one_row_moves_the_sum_by_at_most_the_clip_norm(way: type[ExampleGradients | CapturedGradients]) -> None:
    case = models.mlp()
    case.inputs[0] *= 100
    case.targets[0] = case.model(case.inputs[:1]).argmin()  # a loss far from its least one
    sums = way(case.model, case.loss, 0.1)
    whole = sums.clipped_sum(case.inputs, case.targets, 6)
    without = sums.clipped_sum(case.inputs[1:], case.targets[1:], 5)
    moved = torch.stack([(whole[name] - without[name]).square().sum() for name in whole]).sum().sqrt()
    assert 0.0999 < float(moved) <= 0.1


@pytest.mark.parametrize("way", [ExampleGradients, CapturedGradients])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_finite_gradient_adds_zero(
    way: type[ExampleGradients | CapturedGradients], value: float
) -> None:
    case = models.mlp()
    sums = way(case.model, case.loss, 0.1)
    expected = sums.clipped_sum(case.inputs[1:], case.targets[1:], 5)
    case.inputs[0, 0] = value
    for name, found in sums.clipped_sum(case.inputs, case.targets, 6).items():
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("way", [ExampleGradients, CapturedGradients])
def test_no_rows_have_a_sum_of_zero(way: type[ExampleGradients | CapturedGradients]) -> None:
    case = models.mlp()
    found = way(case.model, case.loss, 0.1).clipped_sum(case.inputs[:0], case.targets[:0], 0)
    assert all(not value.any() and value.dtype == torch.float64 for value in found.values())


def test_a_ghost_norm_is_the_norm_of_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    a, g = torch.randn(3, 4, 50, generator=generator), torch.randn(3, 4, 60, generator=generator)
    outer = Outer(a, g)
    norms = torch.linalg.matrix_norm(torch.einsum("bto,bti->boi", g.double(), a.double()))
    torch.testing.assert_close(outer.squares().sqrt(), norms, rtol=1e-6, atol=0)
    assert outer.kept is None  # no gradient of a row was made
    few = Outer(a[:, :, :3], g[:, :, :2])
    norms = torch.linalg.matrix_norm(torch.einsum("bto,bti->boi", few.g.double(), few.a.double()))
    torch.testing.assert_close(few.squares().sqrt(), norms, rtol=1e-6, atol=0)
    assert few.kept is not None
    indices = torch.tensor([[1, 1, 2, 1], [0, 3, 3, 0], [4, 4, 4, 4]])
    lookup = Lookup(indices, g, 5)
    torch.testing.assert_close(lookup.squares(), lookup.outer().squares(), rtol=1e-6, atol=0)


def test_dropout_differs_from_row_to_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 1, bias=False))
    rows = ExampleGradients(model, lambda outputs, _: outputs.sum(), 1.0)
    (found,) = rows.gradients(torch.ones(2, 20), torch.zeros(2), 2)
    assert not torch.equal(*found["1.weight"])
