"""One step of examples whose noise the clients share: the clipped sum over the batch, without noise or optimizer."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Local
from atoll.ground.noise.key import key_of
from atoll.task.errors import TaskBroken
from atoll.training.model.parameters import build_model, load_parameters
from atoll.training.private.local_steps import ROUNDING, PrivateTerms
from atoll.training.private.sampler import PoissonSampler
from tests.training.private.test_local_steps import CLIP, NOISE, RATE, ROWS, TASK, Z, trained

BATCH = 2.5
SHARED = {"privacy.noise_by": "clients", "privacy.batch": BATCH, "privacy.bits": 32, "max_steps": 1}


def sums_by_hand(start: Any, rate: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return the sum of the clipped gradients of the sample, row after row."""
    model = build_model(TASK, 5).train()
    load_parameters(model, dict(start))
    inputs, targets = TASK.data("a", "train").tensors
    named = dict(model.named_parameters())
    sampler = PoissonSampler(key_of(key_of(NOISE, "private steps", ROWS), "samples"), ROWS, rate)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for row in sampler.indices(0):
        loss = TASK.loss(model(inputs[row : row + 1]), targets[row : row + 1])
        found = torch.autograd.grad(loss, [*named.values()])
        norm = float(torch.stack([g.double().square().sum() for g in found]).sum().sqrt())
        for total, gradient in zip(sums.values(), found, strict=True):
            total += gradient.double() * min(1.0, CLIP * (1 - ROUNDING) / norm)
    return {name: total.numpy() for name, total in sums.items()}


@pytest.mark.parametrize(
    "local",
    [
        TASK.local,
        Local(optimizer="adamw", lr=0.01, weight_decay=0.5, epochs=9, clip_norm=1e-3),
        Local(optimizer="sgd", momentum=0.9, keep_optimizer=True, prox_mu=3.0, batch_size=1),
    ],
)
def test_the_update_is_the_clipped_sum_over_the_batch_whatever_the_task_says(local: Local) -> None:
    outcome, version = trained(replace(TASK, local=local), changed=SHARED)
    assert (outcome.report["steps"], outcome.trained.statistics) == (1, {})
    expected = sums_by_hand(version, RATE)
    assert any(np.abs(total).max() > 0.1 for total in expected.values()), "the sample is not empty"
    for name, update in outcome.trained.update.items():
        np.testing.assert_allclose(update, -expected[name] / BATCH, atol=1e-6)


def test_the_number_of_examples_divides_nothing() -> None:
    """Twice the batch is half the update; the expected sample q N, which tells N, is nowhere."""
    one, two = (trained(changed={**SHARED, "privacy.batch": batch})[0].trained.update for batch in (BATCH, 2 * BATCH))
    for name in one:
        np.testing.assert_allclose(one[name], 2 * two[name], atol=1e-6)


def test_an_example_moves_the_rounded_sum_by_no_more_than_the_noise_is_for() -> None:
    """The bound of the rounding, tried: random sums with and without an example, rounded as on their way."""
    terms, draw = PrivateTerms(0.1, CLIP, Z, 1e-5, batch=36.0, bits=32), np.random.default_rng(7)
    weights = draw.normal(size=2000).astype(np.float32)
    assert terms.rounding_fault([torch.tensor(weights)]) == ""
    step = CLIP / (2**21 - 1)
    for _ in range(50):
        example = draw.normal(size=2000)
        example *= terms.example_norm / np.linalg.norm(example) / terms.batch
        without = draw.normal(size=2000) * CLIP / 100
        words = []
        for total in (without, without + example):
            update = (weights - total.astype(np.float32)) - weights
            words.append(np.rint(update.astype(np.float64) / step))
        assert np.linalg.norm(words[1] - words[0]) * step <= CLIP / terms.batch


def test_a_batch_whose_rounding_takes_too_much_is_refused_with_the_way_out() -> None:
    with pytest.raises(TaskBroken, match=r"privacy.batch: got 1e\+06: rounding 47 numbers takes .* secure.bits = 64"):
        trained(changed={**SHARED, "privacy.batch": 1e6})
    wide = PrivateTerms(0.1, 1.0, 1.0, 1e-5, batch=1e4, bits=64)
    assert wide.rounding_fault([torch.zeros(1000)]) == ""
    assert replace(wide, bits=32).rounding_fault([torch.zeros(1000)]).startswith("privacy.batch: got 10000: rounding")
    halves = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))]
    assert wide.rounding_fault(halves).endswith("a smaller privacy.batch")


def test_layers_that_a_site_keeps_are_refused_as_they_would_have_no_noise() -> None:
    """What a step without noise leaves at a site is in all its later sums, which are noised for one sample."""
    kept = replace(TASK, local=replace(TASK.local, keep="*"))
    fault = r"local.keep: got '\*': with privacy.unit = \"example\" and noise by the clients"
    with pytest.raises(TaskBroken, match=fault):
        trained(kept, changed=SHARED)
    with pytest.raises(TaskBroken, match=fault):
        trained(changed={**SHARED, "keep": "*"})


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"privacy.batch": -1.0}, "privacy.batch: got -1.0"),
        ({"privacy.batch": "36"}, "privacy.batch: got '36'"),
        ({"privacy.bits": 16}, "secure.bits: got 16"),
        ({"privacy.noise_by": "nobody"}, "privacy.noise_by: got 'nobody'"),
    ],
)
def test_terms_that_are_none_are_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        trained(changed={**SHARED, **changed})
