"""The private steps of a client in a federation: what they compute, what leaves a site, and what is refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Algorithm, Local, Task
from atoll.ground.noise.key import key_of
from atoll.task.array_task import ArrayTask
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken
from atoll.task.overrides import OverridesRefused
from atoll.training.base.peft_models import freeze_a
from atoll.training.model.parameters import build_model, load_parameters
from atoll.training.private.noise import add_noise
from atoll.training.private.sampler import PoissonSampler
from atoll.training.worker.array_bench import ArrayBench
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.later import later
from tests.training.private.models import lora, token_loss

peft, transformers = later("peft"), later("transformers")

RATE, CLIP, Z, NOISE = 0.1, 0.5, 0.8, bytes(range(32))
PRIVATE = {
    "privacy.unit": "example",
    "privacy.sample_rate": RATE,
    "privacy.clip_norm": CLIP,
    "privacy.noise_multiplier": Z,
    "privacy.delta": 1e-4,
    "privacy.epsilon": 8.0,
    "privacy.participations_max": 3,
}
ROWS = 23


def points(_site: str, split: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(3 if split == "train" else 4)
    found = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(found, (found.sum(dim=1) > 0).long())


def right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[Any, int]:
    return (outputs.argmax(dim=1) == targets).sum(), len(targets)


TASK = Task(
    model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
    data=points,
    sites=["a"],
    loss=nn.functional.cross_entropy,
    metrics={"right": right},
    local=Local(epochs=4, max_steps=12, batch_size=2, lr=0.2, momentum=0.5, weight_decay=0.01, prox_mu=0.3),
)


def trained(
    task: Task = TASK, *, noise: bytes = NOISE, seed: int = 3, changed: Mapping[str, Any] | None = None, **more: Any
) -> tuple[Outcome, Mapping[str, np.ndarray[Any, Any]]]:
    """Train one round at a site; return the outcome, and the version that it trained from."""
    local = {**PRIVATE, **(changed or {})}
    bench = ModelBench(task, {"site": "a", "local": local})
    version = bench.initial(5)
    request = {"site": "a", "seed": seed, "model_seed": 5, "local": local, "noise": noise.hex(), **more}
    return bench.train(Received(version), request, Deadline.never()), version


def by_hand(
    task: Task, start: Mapping[str, np.ndarray[Any, Any]], steps: int, rate: float = RATE
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the update of DP-SGD with momentum, weight decay and a proximal term, row after row."""
    model = build_model(task, 5).train()
    load_parameters(model, dict(start))
    data = task.data("a", "train")
    inputs, targets = data.tensors
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: p.detach().clone() for name, p in named.items()}
    local = task.local
    optimizer = torch.optim.SGD(named.values(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    key = key_of(NOISE, "private steps", len(data))
    sampler = PoissonSampler(key_of(key, "samples"), len(data), rate)
    for step in range(steps):
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        for row in sampler.indices(step):
            loss = task.loss(model(inputs[row : row + 1]), targets[row : row + 1])
            found = torch.autograd.grad(loss, [*named.values()])
            norm = float(torch.stack([g.double().square().sum() for g in found]).sum().sqrt())
            for total, gradient in zip(sums.values(), found, strict=True):
                total += gradient.double() * min(1.0, CLIP / norm)
        add_noise(sums, key_of(key, "noise"), step, Z * CLIP)
        for name, parameter in named.items():
            gradient = (sums[name] / (rate * len(data))).float()
            parameter.grad = gradient + local.prox_mu * (parameter.detach() - first[name])
        optimizer.step()
    return {name: (p.detach() - first[name]).numpy() for name, p in named.items()}


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("rate", [RATE, 0.02])
def test_a_round_is_dp_sgd_by_hand(rate: float) -> None:
    outcome, version = trained(changed={"privacy.sample_rate": rate})
    assert outcome.report["steps"] == 12
    assert differ(outcome.trained.update, by_hand(TASK, version, 12, rate)) < 1e-6
    key = key_of(key_of(NOISE, "private steps", ROWS), "samples")
    sizes = {len(PoissonSampler(key, ROWS, rate).indices(step)) for step in range(12)}
    assert (0 in sizes, max(sizes) > 2) == (rate < RATE, rate == RATE), "empty samples, and more than a micro-batch"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("freezes_a", [False, True])
def test_adapters_on_a_llama_are_trained_by_dp_sgd(freezes_a: bool) -> None:
    def rows(_site: str, _split: str) -> TensorDataset:
        tokens = torch.randint(0, 32, (12, 12), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens, tokens)

    def model() -> nn.Module:
        found = lora().model
        return freeze_a(found) if freezes_a else found

    task = Task(
        model=model,
        data=rows,
        sites=["a"],
        loss=lambda outputs, tokens: token_loss(outputs.logits.float(), tokens),
        units=lambda tokens: (tokens[:, 1:] != -100).sum(),
        local=Local(max_steps=3, batch_size=4, lr=0.1),
        travels="trained",
    )
    outcome, version = trained(task)
    assert outcome.trained.num_examples == 12, "not the tokens, which no noise covers"
    expected = by_hand(task, version, 3)
    assert any("lora_A" in name for name in expected) is not freezes_a
    assert differ(outcome.trained.update, expected) < 1e-6


def test_a_training_that_is_repeated_has_the_same_bits_and_no_seed_moves_its_noise() -> None:
    first = trained()[0].trained.update
    assert differ(first, trained()[0].trained.update) == 0.0
    assert differ(first, trained(seed=4)[0].trained.update) == 0.0, "seeds are public"
    torch.manual_seed(99)
    np.random.seed(99)
    assert differ(first, trained()[0].trained.update) == 0.0
    assert differ(first, trained(noise=bytes(reversed(NOISE)))[0].trained.update) > 0.01


def test_other_data_have_other_noise() -> None:
    """One row less and the same noise would tell the row's gradient by a difference."""
    small = replace(TASK, data=lambda site, split: TensorDataset(*(t[1:] for t in points(site, split).tensors)))
    one = trained(changed={"privacy.noise_multiplier": 1e6, "max_steps": 1})[0].trained.update
    other = trained(small, changed={"privacy.noise_multiplier": 1e6, "max_steps": 1})[0].trained.update
    assert differ(one, {name: array * (ROWS - 1) / ROWS for name, array in other.items()}) > 1e3


def test_one_noise_a_step_however_the_rows_are_divided() -> None:
    updates = [trained(changed={"batch_size": size})[0].trained.update for size in (1, 3, 64)]
    assert max(differ(updates[0], other) for other in updates[1:]) < 1e-6


def test_the_divisor_is_the_expected_batch() -> None:
    """With one example, all steps are on noise over q, whatever the samples were."""
    alone = replace(TASK, data=lambda site, split: TensorDataset(*(t[:1] for t in points(site, split).tensors)))
    changed = {"privacy.clip_norm": 1e-9, "privacy.noise_multiplier": 1e9, "privacy.delta": 0.5, "max_steps": 1}
    update = trained(alone, changed=changed)[0].trained.update
    sums = {name: torch.zeros(array.shape, dtype=torch.float64) for name, array in update.items()}
    add_noise(sums, key_of(key_of(NOISE, "private steps", 1), "noise"), 0, 1.0)
    start = ModelBench(TASK, {"site": "a"}).initial(5)
    for name, total in sums.items():
        expected = -0.2 * (total.numpy() / RATE + 0.01 * start[name])
        np.testing.assert_allclose(update[name], expected, rtol=1e-4, atol=1e-5)


def test_nothing_that_is_told_of_a_training_comes_from_its_rows() -> None:
    in_units = replace(TASK, units=lambda targets: 2 * len(targets))
    for task in (TASK, in_units):
        outcome, _ = trained(task)
        assert outcome.trained.statistics == {}
        assert outcome.trained.num_examples == ROWS
        assert (outcome.trained.work, outcome.report) == (1.0, {"steps": 12})


def test_the_optimizer_that_stays_at_the_site_goes_on() -> None:
    kept = replace(TASK, local=replace(TASK.local, keep_optimizer=True, optimizer="adam", momentum=0.0))
    outcome, _ = trained(kept)
    assert any("exp_avg" in name for name in outcome.own)
    assert differ(outcome.trained.update, trained(kept)[0].trained.update) == 0.0


def test_without_terms_a_training_is_as_before() -> None:
    bench = ModelBench(TASK, {"site": "a", "local": {}})
    request = {"site": "a", "seed": 3, "model_seed": 5, "local": {}, "noise": NOISE.hex()}
    outcome = bench.train(Received(bench.initial(5)), request, Deadline.never())
    assert outcome.trained.statistics.keys() == {"loss", "right"}


# ---------------------------------------------------------------- refusals


def fits(*_: Any) -> float:
    return 1.0


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.layer(x)
        return h - h.mean(0)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


REFUSED = {
    "fit": (replace(TASK, fit=fits), "task.fit: with privacy.unit"),
    "algorithm": (replace(TASK, algorithm=Algorithm()), "task.algorithm: with privacy.unit"),
    "BatchNorm": (replace(TASK, model=with_norm), "1: BatchNorm1d in training mode"),
    "rows that look at each other": (replace(TASK, model=Mixing), "the outputs of a row alone differ"),
    "a loss of two rows": (
        replace(TASK, loss=lambda out, targets: nn.functional.cross_entropy(out, targets) * (1 + out.std(0).sum())),
        "the mean of their losses|differ|loss",
    ),
    "no data": (
        replace(TASK, data=lambda site, split: TensorDataset(*(t[:0] for t in points(site, split).tensors))),
        "empty",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_private_steps_is_refused_before_the_first_one(what: str) -> None:
    task, said = REFUSED[what]
    with pytest.raises(TaskBroken, match=said):
        trained(task)


def test_the_coordinator_refuses_before_the_run_what_needs_no_data() -> None:
    for what in ("fit", "algorithm", "BatchNorm"):
        with pytest.raises(TaskBroken, match=REFUSED[what][1]):
            ModelBench(REFUSED[what][0], {"local": PRIVATE}).initial(0)


def test_a_site_refuses_a_delta_of_one_over_its_examples() -> None:
    with pytest.raises(TaskBroken, match=r"privacy.delta: got 0.05 with 23 training examples"):
        trained(changed={"privacy.delta": 0.05})
    bench = ModelBench(TASK, {"site": "a", "local": PRIVATE})
    request = {"site": "a", "seed": 3, "model_seed": 5, "noise": NOISE.hex()}
    bench.train(Received(bench.initial(5)), {**request, "local": PRIVATE}, Deadline.never())
    with pytest.raises(TaskBroken, match=r"privacy.delta"):
        bench.train(
            Received(bench.initial(5)), {**request, "local": {**PRIVATE, "privacy.delta": 0.05}}, Deadline.never()
        )


@pytest.mark.parametrize("algorithm", ["scaffold", "fednova"])
def test_corrections_without_noise_are_refused(algorithm: str) -> None:
    plain = replace(TASK, local=Local(max_steps=2, lr=0.1))
    with pytest.raises(TaskBroken, match="algorithm: got"):
        trained(plain, algorithm=algorithm)


def test_terms_that_are_unknown_here_are_refused() -> None:
    with pytest.raises(OverridesRefused, match=r"privacy\.bands: unknown key"):
        trained(changed={"privacy.bands": 4})
    with pytest.raises(ValueError, match=r"privacy\.unit"):
        trained(changed={"privacy.unit": "patient"})


class Custom(ArrayTask):
    def initial(self, seed: int) -> dict[str, Any]:
        return {"w": np.zeros(2, np.float32)}

    def train(self, parameters: Any, instructions: Any) -> Any:
        raise AssertionError("it trains plain")


def test_a_custom_training_is_refused() -> None:
    with pytest.raises(TaskBroken, match="needs gradients of single examples"):
        ArrayBench(Custom(), {"local": PRIVATE})
    bench = ArrayBench(Custom(), {"site": "a"})
    with pytest.raises(TaskBroken, match="needs gradients of single examples"):
        bench.train(Received(bench.initial(0)), {"seed": 1, "local": PRIVATE}, Deadline.never())
