"""Clipped sums of example gradients of many clients at once: equal to a loop over clients and rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.simulations.engines.batched import private_sums
from atoll.simulations.engines.batched.private_sums import BY_ROW, CAPTURED, KINDS
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.training.private.example_gradients import SLACK
from tests.training.private import models
from tests.training.private.models import Case, loop

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

CLIP, CLIENTS = 0.3, 3
SIZES = [6, 0, 4]
"""Rows of the clients' samples, one of them empty; all have six places."""

BOTH, ROWS = (CAPTURED, BY_ROW), (BY_ROW,)
WAYS = [
    *((case, BOTH) for case in (models.mlp, models.cnn, models.shared, models.tied, models.embedding)),
    *((case, BOTH) for case in (models.decoder, models.lora, models.lora_frozen_a, models.tied_decoder)),
    *((case, ROWS) for case in (models.lstm, models.elsewhere)),
]


def weights_of(case: Case) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    named = {name: p.detach() for name, p in case.model.named_parameters() if p.requires_grad}
    return [{n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in named.items()} for _ in range(CLIENTS)]


def expected(case: Case, weights: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for name, parameter in case.model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    few = Case(case.model, case.loss, case.inputs[:rows], case.targets[:rows], case.units)
    return loop(few, CLIP)[0]


def found(case: Case, kind: str, weights: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sums = KINDS[kind](case.model, case.loss, CLIP)
    together = {name: torch.stack([each[name] for each in weights]) for name in weights[0]}
    inputs, targets = (torch.stack([each] * CLIENTS) for each in (case.inputs, case.targets))
    is_real = torch.arange(case.rows) < torch.tensor(SIZES)[:, None]
    return sums.sums(together, inputs, targets, is_real)


def largest_difference(found: dict[str, torch.Tensor], case: Case, weights: list[dict[str, torch.Tensor]]) -> float:
    differences = []
    for client, rows in enumerate(SIZES):
        wanted = expected(case, weights[client], rows)
        differences += [float((found[name][client] - each).abs().max()) for name, each in wanted.items()]
    return max(differences)


@pytest.mark.parametrize(("make", "kind"), [(make, kind) for make, kinds in WAYS for kind in kinds])
def test_they_equal_a_loop_for_clients_with_other_weights_and_samples(make: Callable[[], Any], kind: str) -> None:
    case = make()
    case.model.train()
    weights = weights_of(case)
    assert largest_difference(found(case, kind, weights), case, weights) <= 1e-6 * max(1.0, CLIP) + SLACK * CLIP * 6


@pytest.mark.parametrize("kind", BOTH)
def test_passes_that_fit_the_memory_give_the_same_sums(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.cnn()
    weights = weights_of(case)
    monkeypatch.setattr(private_sums, "BYTES_MAX", 1)
    passes: list[int] = []
    of_pass = KINDS[kind]._pass
    monkeypatch.setattr(KINDS[kind], "_pass", lambda *each: passes.append(each[2].shape[1]) or of_pass(*each))
    assert largest_difference(found(case, kind, weights), case, weights) <= 3e-6
    assert passes == [1] * 6


@pytest.mark.parametrize("kind", BOTH)
def test_a_row_that_is_not_finite_adds_nothing_to_its_client_or_to_others(kind: str) -> None:
    case = models.mlp()
    weights = weights_of(case)
    without = Case(case.model, case.loss, case.inputs.clone(), case.targets, case.units)
    case.inputs[5] = torch.inf  # a row of the first client alone: the others' samples have fewer
    sums = found(case, kind, weights)
    wanted = expected(without, weights[0], 5)
    assert max(float((sums[name][0] - each).abs().max()) for name, each in wanted.items()) <= 3e-6
    assert all(bool((each[1] == 0).all()) for each in sums.values())
    assert all(bool(each.isfinite().all()) for each in sums.values())


def test_a_weight_that_is_used_outside_of_its_layer_is_not_captured() -> None:
    case = models.lstm()
    with pytest.raises(CannotBatch, match=r"layer: it takes or returns something else than one tensor"):
        found(case, CAPTURED, weights_of(case))
