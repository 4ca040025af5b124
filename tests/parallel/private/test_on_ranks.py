"""A private training on a mesh: the same samples and noise as in one process, once for the whole gradient."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll import Local, Task
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.private.account import FILE
from atoll.parallel.private.secret import FILE as KEY
from atoll.parallel.trainer.run import Result
from atoll.task.errors import TaskBroken
from tests.parallel.forked import run_ranks
from tests.parallel.private.test_training import CLIP, CONFIG, RATE, Z, by_hand, decaying, known, terms
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import model, run
from tests.training.private.models import token_loss

DDP, FSDP, HSDP = (
    Plan(mesh=mesh) for mesh in (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(dp_replicate=2, dp_shard=2))
)


def on_ranks(folder: Path, plan: Plan, stop_after: int | None = None, rate: float = RATE) -> Result:
    private = terms(sample_rate=rate)
    return run(folder, task=decaying, config=CONFIG, plan=plan, private=private, stop_after=stop_after)


def same(one: Path, expected: dict[str, torch.Tensor], within: float = 2e-6) -> None:
    for name, value in model(one).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=within)


@pytest.mark.parametrize("plan", [DDP, FSDP, pytest.param(HSDP, marks=pytest.mark.long)], ids=["DDP", "FSDP", "HSDP"])
def test_it_computes_dp_sgd_with_the_noise_of_one_process(plan: Plan, tmp_path: Path) -> None:
    results = call_on_ranks(on_ranks, plan.mesh.size, known(tmp_path), plan)
    assert {(result.why, result.steps, result.privacy["steps"]) for result in results} == {("finished", 12, 12)}
    same(tmp_path, by_hand(decaying, 12).state_dict())
    assert json.loads((tmp_path / FILE).read_text())["steps"] == 12
    assert not (tmp_path / KEY).exists()


def test_a_training_that_is_interrupted_on_one_mesh_continues_on_every_other(tmp_path: Path) -> None:
    call_on_ranks(on_ranks, 2, known(tmp_path), FSDP, 3)
    assert json.loads((tmp_path / FILE).read_text())["steps"] == 3
    call_on_ranks(on_ranks, 4, tmp_path, HSDP, 6)
    on_ranks(tmp_path, Plan(), 9)
    results = call_on_ranks(on_ranks, 2, tmp_path, DDP)
    assert results[0].privacy == {"steps": 12}
    same(tmp_path, by_hand(decaying, 12).state_dict())


class Mortal(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The rows of a site, of which the second rank reads some after the first checkpoint, and then dies, once."""

    def __init__(self, rows: torch.utils.data.TensorDataset, note: Path, reads: int) -> None:
        self.rows, self.note, self.left = rows, note, reads

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_mortal = os.environ.get("RANK") == "1" and not self.note.exists()
        self.left -= is_mortal and (self.note.parent / "checkpoints" / "step-00000004").exists()
        if self.left == 0:
            self.note.touch()
            os._exit(9)
        points, side = self.rows[index]
        return points, side


def mortal_on_ranks(folder: Path, plan: Plan) -> Result:
    def data(site: str, split: str) -> object:
        rows = tasks.load_site(site, split)
        return Mortal(rows, folder / "died", 3) if rows is not None and split == "train" else rows

    config = replace(CONFIG, log_every=100, eval_every=100)
    return run(folder, task=replace(decaying, data=data), config=config, plan=plan, private=terms())


@pytest.mark.long
def test_a_killed_rank_costs_time_alone_and_refunds_nothing(tmp_path: Path) -> None:
    """It dies between two checkpoints, each of 4 steps; what was not told is done again with its samples and noise.

    If it dies so late that the other rank has charged the next four and their checkpoint lacks its part, these are
    charged again, with other noise.
    """
    with pytest.raises(RankFailed):
        run_ranks(mortal_on_ranks, 2, known(tmp_path), FSDP)
    charged = json.loads((tmp_path / FILE).read_text())["steps"]
    newest = max(int(each.name.removeprefix("step-")) for each in (tmp_path / "checkpoints").glob("step-*"))
    assert (charged, newest) in {(4, 4), (8, 4), (8, 8)}
    results = run_ranks(mortal_on_ranks, 2, tmp_path, DDP)
    assert results[0].privacy == {"steps": charged + 12 - newest}
    assert json.loads((tmp_path / FILE).read_text())["repeats"] == (newest < charged)
    if newest == charged:
        same(tmp_path, by_hand(decaying, 12).state_dict())


def test_ranks_without_examples_take_part(tmp_path: Path) -> None:
    """Of 52 examples with a rate of 1e-6 no rank has one: 12 steps on noise alone."""
    call_on_ranks(on_ranks, 2, known(tmp_path / "two"), FSDP, None, 1e-6)
    on_ranks(known(tmp_path / "one"), Plan(), None, 1e-6)
    scale = CLIP * Z / (1e-6 * 52)
    same(tmp_path / "two", model(tmp_path / "one"), 1e-6 * scale)


WORDS = 18


def tokens(site: str, split: str) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(len(site) + (split == "test"))
    found = torch.randint(0, WORDS, (20, 12), generator=generator)
    return torch.utils.data.TensorDataset(found, found)


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(vocab=WORDS, dim=16, layers=1, heads=2, ffn=20, sequence=12, tied=True))


text = Task(
    model=decoder, data=tokens, sites=["a"], loss=token_loss, metrics={}, local=Local(epochs=1, batch_size=3, lr=0.5)
)


def text_on_ranks(folder: Path, plan: Plan) -> Result:
    return run(folder, task=text, config=CONFIG, plan=plan, private=terms(4, sample_rate=0.3))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(mesh=Mesh(tp=2), sequence_parallel=True), id="TP"),
        pytest.param(Plan(mesh=Mesh(dp_shard=2, tp=2)), id="FSDP and TP"),
    ],
)
def test_divided_layers_get_the_noise_of_their_places(plan: Plan, tmp_path: Path) -> None:
    call_on_ranks(text_on_ranks, plan.mesh.size, known(tmp_path / "mesh"), plan)
    text_on_ranks(known(tmp_path / "one"), Plan())
    same(tmp_path / "mesh", model(tmp_path / "one"), 1e-5)


class Centred(nn.Module):
    """A layer whose rows look at each other."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Map (B, D) to (B, D)."""
        return h - h.mean(0)


class Elsewhere(nn.Module):
    """A weight that is used outside of its layer's call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 6) to (B, 2)."""
        found: torch.Tensor = self.out(nn.functional.linear(self.layer(x).tanh(), self.layer.weight))
        return found


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), Centred(), nn.Linear(4, 2))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def refused(folder: Path, make: Callable[[], nn.Module]) -> str:
    with pytest.raises(TaskBroken) as caught:
        run(folder, task=replace(tasks.task, model=make), config=CONFIG, plan=DDP, private=terms())
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (centred, "1: the outputs of a row alone differ"),
        (normalized, "1: BatchNorm1d in training mode"),
        (
            Elsewhere,
            "layer.weight: the gradients of rows, computed together, differ from those of rows alone; on a mesh",
        ),
    ],
)
def test_what_has_no_gradients_of_rows_is_refused_on_every_rank(
    make: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    for found in call_on_ranks(refused, 2, tmp_path, make):
        assert said in found
    assert not (tmp_path / FILE).exists() or json.loads((tmp_path / FILE).read_text())["steps"] == 0
