"""A resumed training goes on bit for bit, whatever its model and its loss hold beside parameters and buffers."""

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import ConcatDataset, TensorDataset

from atoll import Local, Metric, Task
from atoll.ground.noise.generator import SecretGenerator
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.outside import Outside, functions_of
from atoll.task.metrics import of_batch
from atoll.training.model.as_built import AsBuilt
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import model as model_of
from tests.parallel.trainer.training import run

GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(64, 6, generator=GENERATOR), torch.randint(0, 3, (64,), generator=GENERATOR)
calls, counts = 0, [0]


class Holding(nn.Module):
    """A model that holds a value of each kind, and computes with all of them."""

    late: int

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.calls, self.kept = 0, SimpleNamespace(calls=0, mean=torch.zeros(8))
        self.generator = torch.Generator().manual_seed(3)
        self.same_generator = self.generator
        self.of_numpy, self.old, self.of_python = np.random.default_rng(1), np.random.RandomState(5), random.Random(2)
        self.factors, self.last = [1.0], deque([1.0], maxlen=3)
        self.by_name: dict[str, Any] = {"array": np.ones(8)}
        self.centre: torch.Tensor | None = None
        self.register_buffer("passing", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global calls
        h = torch.tanh(self.first(x))
        mean = h.detach().mean(0)
        self.calls, self.kept.calls, calls, counts[0] = self.calls + 1, self.kept.calls + 1, calls + 1, counts[0] + 1
        self.late = getattr(self, "late", 0) + 1
        for draw in (
            *(torch.rand((), generator=generator) for generator in (self.generator, self.same_generator)),
            *(self.of_numpy.uniform(), self.old.uniform(), self.of_python.random()),
        ):
            h = h * (0.5 + float(draw))
        self.factors.append(self.factors[-1] * 0.9)
        self.last.append(self.last[0] * 0.9)
        self.by_name["array"] = self.by_name["array"] * 0.9
        self.kept.mean = 0.5 * self.kept.mean + mean
        self.centre = mean if self.centre is None else 0.5 * self.centre + mean
        self.get_buffer("passing").add_(0.1 * mean)
        moved = (
            self.kept.mean + self.centre + self.get_buffer("passing") + torch.from_numpy(self.by_name["array"]).float()
        )
        count = self.calls + self.kept.calls + calls + counts[0] + self.late
        outputs: torch.Tensor = self.second(h * self.factors[-1] * self.last[0] + moved / count)
        return outputs


class Centred:
    def __init__(self) -> None:
        self.centre = torch.zeros(3)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs - self.centre, targets)
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(0)
        return loss


def enclosing() -> Callable[..., torch.Tensor]:
    number, centre = 0, torch.zeros(3)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        found = functional.cross_entropy(outputs / number - centre, targets)
        centre.add_(outputs.detach().mean(0))
        return found

    return loss


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs - self.get_buffer("centre"), targets)
        self.get_buffer("centre").mul_(0.5).add_(outputs.detach().mean(0))
        return loss


def as_at_the_start(loss: Callable[[], Any]) -> Task:
    global calls
    calls, counts[0] = 0, 0
    return Task(
        model=Holding,
        data=lambda site, split: TensorDataset(INPUTS, TARGETS) if split == "train" else None,
        loss=loss(),
        units=len,
        sites=["a"],
        local=Local(batch_size=8, lr=0.1),
    )


@pytest.mark.parametrize("loss", [Centred, enclosing, WithBuffer])
def test_a_resume_forgets_nothing(loss: Callable[[], Any], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, task=as_at_the_start(loss), config=TrainConfig(batch_size=8, log_every=1, steps=8))
    for steps in (4, 8):
        run(parts, task=as_at_the_start(loss), config=TrainConfig(batch_size=8, log_every=1, steps=steps))
    assert tasks.losses(parts) == tasks.losses(whole)
    for name, value in model_of(whole).items():
        assert torch.equal(model_of(parts)[name], value)


class OtherRanks:
    """The ranks of a mesh, of which the others have a state of their own."""

    def __init__(self, others: list[dict[str, str]]) -> None:
        self.others, self.rank, self.size = others, len(others), len(others) + 1

    def gather(self, value: Any) -> list[Any]:
        return [*self.others, value]


def test_each_rank_gets_its_own_state_and_on_another_mesh_that_of_the_first() -> None:
    model = Holding()
    outside = Outside([model], {"loss": enclosing()}, OtherRanks([{}]))  # type: ignore[arg-type]
    model.calls = 3
    other = outside.state()
    assert [sorted(of_rank) for of_rank in other["ranks"]] == [[], ["model.calls"]]
    first = Outside([model], {"loss": enclosing()}, Ranks())
    model.calls = 5
    state = {"ranks": [*first.state()["ranks"], other["ranks"][1]]}
    outside.load_state(state)
    assert model.calls == 3
    first.load_state(state)
    assert model.calls == 5


def test_what_has_no_form_is_named_once_and_only_if_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    model = Holding()
    model.kept.lock = threading.Lock()
    model.factors = [threading.Lock()]  # type: ignore[list-item]
    outside = Outside([model], {"loss": functional.cross_entropy}, Ranks())
    with caplog.at_level(logging.WARNING):
        assert outside.state() == {"ranks": [{}]}
        assert not caplog.records
        model.factors = [threading.Lock()]  # type: ignore[list-item]
        for _ in range(2):
            assert outside.state() == {"ranks": [{}]}
    (record,) = caplog.records
    assert record.getMessage().startswith("model.factors has changed, and a checkpoint cannot hold it (a lock)")


def test_what_torch_keeps_of_the_parameters_of_a_recurrent_layer_is_no_state_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = nn.LSTM(3, 4)
    outside = Outside([layer], {"loss": nn.functional.cross_entropy}, Ranks())
    with torch.no_grad():
        layer.weight_hh_l0.add_(1.0)
    assert outside.state() == {"ranks": [{}]}
    assert not caplog.records


def test_what_metrics_keep_is_kept_and_what_a_data_set_counts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
            self.calls += 1
            return 1.0, 1.0

        def __len__(self) -> int:
            return 3

    def task_of() -> Task:
        metrics = {"plain": Counting(), "both": Metric(Counting(), lambda sums: sums[0])}
        return Task(model=Holding, data=lambda *_: None, loss=functional.cross_entropy, metrics=metrics, sites=["a"])

    data = ConcatDataset([Counting(), Counting()])  # type: ignore[list-item]
    task, again = task_of(), task_of()
    outside = Outside([], functions_of(task), Ranks(), data)
    of_batch(task.metrics, torch.zeros(1), torch.zeros(1))
    assert sorted(outside.state()["ranks"][0]) == ["metrics.both.calls", "metrics.plain.calls"]
    assert not caplog.records
    data.datasets[1].calls = 5  # type: ignore[attr-defined]
    state = outside.state()
    (record,) = caplog.records
    said = "Counting.calls has changed, and a checkpoint cannot hold it (its rows are read ahead)"
    assert said in record.getMessage()
    Outside([], functions_of(again), Ranks()).load_state(state)
    assert outside.state() == state
    assert again.metrics["both"].statistics.calls == again.metrics["plain"].calls == 1  # type: ignore[union-attr]


def test_generators_of_a_secret_or_of_the_system_have_no_state() -> None:
    model = Holding()
    model.kept.secret, model.kept.system = SecretGenerator(bytes(32)), random.SystemRandom()
    outside = Outside([model], {}, Ranks())
    model.kept.secret.random()
    model.kept.calls = 3
    assert [*outside.state()["ranks"][0]] == ["model.kept"]
    assert AsBuilt({"model": model}).restore().changed == []
