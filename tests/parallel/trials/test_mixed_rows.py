"""What mixes the rows of a batch is named before it is divided; what does not is not."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from atoll import Task
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trials.mixed_rows import mixes_rows
from atoll.parallel.trials.way import way_of
from atoll.task.collated import Collated

GENERATOR = torch.Generator().manual_seed(1)
INPUTS, CLASSES = torch.randn(24, 6, generator=GENERATOR), torch.arange(24) % 3
ROWS = TensorDataset(INPUTS, CLASSES)
TOKENS = TensorDataset(torch.randint(7, (24, 5), generator=GENERATOR), CLASSES)
COPIES, MICRO = Plan(mesh=Mesh(dp_replicate=2)), Plan(accumulate=4)


class Layers(nn.Sequential):
    """A plain classifier, with norms and dropout, which whole batches and parts have alike or by a setting."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs - inputs.mean(0))
        return outputs


class Scaled(Centred):
    """Gradients of the outputs are scaled to one length, in the backward pass alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        outputs.register_hook(lambda gradient: gradient / gradient.norm())
        return outputs


class Masked(Centred):
    """Its weight has a hook, which the engine calls after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient / gradient.norm())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def bag(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3, **options), nn.Flatten(), nn.Linear(15, 3))


class Lengths(Dataset[Any]):
    """Rows of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index][: 2 + index % 5], CLASSES[index]


def padded(rows: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True, padding_value=1.0)
    return inputs, torch.stack([y for _, y in rows])


class Pooled(nn.Module):
    def __init__(self, counts_padding: bool) -> None:
        super().__init__()
        self.layer, self.counts_padding = nn.Linear(1, 3), counts_padding

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        real = torch.ones_like(inputs) if self.counts_padding else (inputs != 1.0).float()
        outputs: torch.Tensor = self.layer((inputs * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))
        return outputs


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def task_of(model: Any = lambda: nn.Linear(6, 3), data: Any = ROWS, **fields: Any) -> tuple[Task, Any]:
    given = {"loss": functional.cross_entropy} | fields
    task = Task(model=model, data=lambda site, split: data, **given)
    return task, data if fields.get("collate") is None else Collated(data, fields["collate"])


MIXED = {
    "contrastive": task_of(loss=contrastive, units=len),
    "centred": task_of(Centred),
    "scaled in the backward pass": task_of(Scaled),
    "scaled by frequency": task_of(lambda: bag(scale_grad_by_freq=True), TOKENS),
    "padding that counts": task_of(lambda: Pooled(counts_padding=True), Lengths(), collate=padded),
}
APART = {
    "classes": task_of(Layers),
    "a sum": task_of(loss=lambda o, t: functional.cross_entropy(o, t, reduction="sum"), units="sum"),
    "weighted": task_of(
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])),
        units=lambda t: float(torch.tensor([1.0, 5.0, 0.2])[t].sum()),
    ),
    "masked": task_of(Masked),
    "embedded": task_of(lambda: bag(padding_idx=0), TOKENS),
    "sparse": task_of(lambda: bag(sparse=True), TOKENS),
    "padding that does not count": task_of(lambda: Pooled(counts_padding=False), Lengths(), collate=padded),
    "wrong units, which their own check refuses": task_of(loss=lambda o, t: o.square().sum()),
    "fails on a part": task_of(loss=lambda o, t: functional.cross_entropy(o[:8], t[:8]) / (len(t) > 4)),
}


def said_of(task: Task, plan: Plan, data: Any) -> str:
    with way_of(task, plan, 0, data) as way:
        return "".join(mixes_rows(way))


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_named(name: str) -> None:
    task, data = MIXED[name]
    assert said_of(task, Plan(), data) == ""
    said = said_of(task, COPIES, data)
    assert said.startswith("the gradient of a batch is not the mean of its parts' (of 8 rows and their halves")
    assert "each of 2 ranks sees its own" in said
    assert "each of 4 micro-batches sees its own" in said_of(task, MICRO, data)


@pytest.mark.parametrize("name", APART)
def test_rows_that_are_apart_are_not(name: str) -> None:
    task, data = APART[name]
    before = torch.get_rng_state()
    assert said_of(task, COPIES, data) == ""
    assert torch.equal(torch.get_rng_state(), before)
