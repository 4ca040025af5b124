"""What is found about a model by passes before a training: nothing of it needs ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.engine.blueprint import Blueprint
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trials.between_passes import repeats
from atoll.parallel.trials.mesh import try_on_mesh
from atoll.parallel.trials.way import way_of
from atoll.task.errors import TaskBroken

GENERATOR = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(8, 6, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR))
COPIES, SHARDS = Plan(mesh=Mesh(dp_replicate=2)), Plan(mesh=Mesh(dp_shard=2))


class Layers(nn.Module):
    """A model with two layers, whose kinds differ in what they do between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("passing", torch.zeros(6), persistent=False)
        self.centre: Any = 0.0
        self.calls = 0

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers[1](self.between(self.layers[0](x)))
        return outputs


class Sums(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.get_buffer("seen").add_(x.detach().sum(0))
        return x


class PassingSums(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("passing").add_(x.detach().sum(0))
        return x - self.get_buffer("passing")


class Centre(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0)
        return x - self.centre


class Count(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.get_buffer("seen").add_(1)
        return x / self.calls


class LastOnes(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = x.detach()  # for a picture of it
        return functional.dropout(x, training=self.training)


class Norms(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None))


class ScoresInEvaluation(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        return super().forward(x) if self.training else functional.linear(x, first.weight)[:, :1]


class Checkpointed(Layers):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(torch.tanh, x, use_reentrant=self.calls == 0)
        return inner


class NotReentrant(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 1


class CentredLoss:
    def __init__(self) -> None:
        self.centre = torch.zeros(1)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = functional.mse_loss(outputs - self.centre, targets)
        self.centre = 0.5 * self.centre + 0.5 * outputs.detach().mean(0)
        return loss


def look(model: Callable[[], nn.Module], plan: Plan, loss: Callable[..., Any] = functional.mse_loss) -> list[str]:
    task = Task(model=model, data=lambda site, split: DATA, loss=loss, sites=["a"], local=Local())
    return try_on_mesh(task, plan, 0, DATA)


@pytest.mark.parametrize("plan", [COPIES, SHARDS, Plan(mesh=Mesh(dp_replicate=2), outer="local_sgd:2")])
@pytest.mark.parametrize(
    ("model", "loss", "name"),
    [
        (Sums, functional.mse_loss, "seen: a pass leaves values there"),
        (PassingSums, functional.mse_loss, "the model's state outside of buffers"),
        (Centre, functional.mse_loss, "the model's state outside of buffers"),
        (Layers, CentredLoss(), "the loss's state"),
    ],
)
def test_what_follows_a_ranks_own_examples_is_refused(
    model: Callable[[], nn.Module], loss: Callable[..., Any], name: str, plan: Plan
) -> None:
    with pytest.raises(TaskBroken, match=name):
        look(model, plan, loss)


@pytest.mark.parametrize("model", [Layers, Count, LastOnes, Norms])
def test_what_is_the_same_on_all_ranks_or_never_read_is_not(model: Callable[[], nn.Module]) -> None:
    look(model, COPIES)


def test_one_process_and_tensor_parallelism_see_all_examples() -> None:
    look(Sums, Plan())
    look(Sums, Plan(mesh=Mesh(tp=2)))


def test_a_weight_that_evaluation_alone_uses_elsewhere_is_found() -> None:
    assert look(ScoresInEvaluation, SHARDS) == ["layers.0"]


def test_a_checkpoint_with_a_backward_pass_of_its_own_is_refused_under_copies_alone() -> None:
    with pytest.raises(TaskBroken, match="use_reentrant=False, or train with zero=1"):
        look(Checkpointed, COPIES)
    look(Checkpointed, SHARDS)
    look(NotReentrant, COPIES)


class Temperature(nn.Module):
    """A layer that counts its passes, and whose pass depends on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / self.calls


class Skips(nn.Module):
    """A chain that training alone leaves."""

    blueprint = Blueprint(chain=("first", "second"))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(x))
        return outputs + x[:, :1] if self.training else outputs


def test_a_pipeline_is_compared_in_training_too() -> None:
    pipeline = Plan(mesh=Mesh(pp=2))
    look(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 1)), pipeline)
    counting = nn.utils.parametrizations.spectral_norm
    look(lambda: nn.Sequential(counting(nn.Linear(6, 6)), Temperature(), nn.Linear(6, 1)), pipeline)
    with pytest.raises(TaskBroken, match="give other outputs than the model in training"):
        look(Skips, pipeline)


class Spectral(Layers):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.layers[0])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Layers, ""),
        (Norms, ""),
        (Spectral, "layers.0.parametrizations.weight.0._u, layers.0.parametrizations.weight.0._v"),
        (Count, "seen"),
        (Centre, "the model's state outside of buffers"),
    ],
)
def test_what_several_passes_of_a_step_move_is_named(kind: type[Layers], names: str) -> None:
    task = Task(model=kind, data=lambda site, split: DATA, loss=functional.mse_loss)
    for plan in (Plan(), Plan(accumulate=2)):
        with way_of(task, plan, 0, DATA) as way:
            found = "".join(repeats(way))
        expected = names if plan.microbatches > 1 else ""
        assert found.partition(": each forward pass changes them, and a step has 2 passes")[0] == expected


class Frequencies(nn.Module):
    """A loss whose weights follow how often it has seen each class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        seen = self.get_buffer("seen")
        seen.mul_(0.5).add_(torch.bincount(classes, minlength=3) / len(classes) * 0.5)
        return functional.cross_entropy(outputs, classes, weight=1 / seen)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_weights_of_classes_that_a_rank_counts_by_itself_are_refused(is_sorted: bool) -> None:
    """The first two rows are of one class, whose weight alone changes nothing."""
    classes = torch.tensor([0] * 8 + [1] * 8 + [2] * 8) if is_sorted else torch.tensor([0, 0, 1, 2, 0, 0] * 4)
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(2)), classes)
    task = Task(model=lambda: nn.Linear(6, 3), data=lambda site, split: data, loss=Frequencies(), sites=["a"])
    with pytest.raises(TaskBroken, match="the loss's state: a pass leaves values there"):
        try_on_mesh(task, COPIES, 0, data)
