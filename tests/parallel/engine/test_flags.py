"""A forward pass that freezes a layer trains as in a plain loop, or is refused by the layer's name."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from atoll.task.errors import TaskBroken
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer.tasks import losses
from tests.parallel.trainer.training import run

GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(48, 6, generator=GENERATOR), torch.randint(0, 3, (48,), generator=GENERATOR)
REFUSED = "first.weight: the model's forward pass has set its requires_grad to False, which a sharded plan"


class Freezing(nn.Module):
    """A model whose third pass freezes its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(6, 8), nn.Linear(8, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 3:
            self.first.requires_grad_(False)
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


TASK = Task(
    model=Freezing,
    data=lambda _site, split: TensorDataset(INPUTS, TARGETS) if split == "train" else None,
    loss=nn.functional.cross_entropy,
    sites=["a"],
    local=Local(lr=0.5, shuffle=False),
)
CONFIG = TrainConfig(batch_size=8, log_every=1, steps=6)


def plain() -> list[float]:
    """Return the losses of a loop by hand."""
    torch.manual_seed(CONFIG.seed)
    model, found = Freezing(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for start in range(0, 48, 8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(INPUTS[start : start + 8]), TARGETS[start : start + 8])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def on_ranks(folder: Path, plan: Plan) -> None:
    run(folder, task=TASK, config=CONFIG, plan=plan)


def test_one_process_follows_it_and_a_sharded_one_refuses(tmp_path: Path) -> None:
    run(tmp_path / "plain", task=TASK, config=CONFIG)
    assert [*losses(tmp_path / "plain").values()] == pytest.approx(plain(), rel=1e-6)
    with pytest.raises(TaskBroken, match=REFUSED):
        run(tmp_path / "zero", task=TASK, config=CONFIG, plan=Plan(zero=3))


@pytest.mark.real
def test_copies_follow_it_and_shards_refuse(tmp_path: Path) -> None:
    call_on_ranks(on_ranks, 2, tmp_path / "copies", Plan(mesh=Mesh(dp_replicate=2)))
    assert [*losses(tmp_path / "copies").values()] == pytest.approx(plain(), rel=1e-6)
    for zero in (1, 3):
        with pytest.raises(RankFailed, match=REFUSED):
            call_on_ranks(on_ranks, 2, tmp_path / f"{zero}", Plan(mesh=Mesh(dp_shard=2), zero=zero))
