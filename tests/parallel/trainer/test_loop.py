"""A centralized training in one process: what it learns, when it stops, and how it goes on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointMismatch
from atoll.parallel.engine.blueprint import Blueprint
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.data import data_of_sites, pooled
from atoll.parallel.trainer.flops import flops_per_example
from atoll.parallel.trainer.job import Job, JobRefused
from atoll.parallel.trainer.logs import read_log
from atoll.parallel.trainer.saver import RunDiffers
from atoll.parallel.trials import way
from atoll.parallel.trials.mesh import try_on_mesh
from atoll.task import metrics
from atoll.task.errors import NotFinite, TaskBroken
from atoll.tensors.safetensors_file import BUFFERS, read_metadata
from atoll.training.data.batches import fetcher
from atoll.training.local.training import evaluate, seed_everything
from atoll.training.model.parameters import state_of
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import CONFIG, mesh, model, run

STEPS = 28
"""4 epochs of 7 batches."""


def test_it_learns_what_a_plain_loop_over_the_pooled_data_learns(tmp_path: Path) -> None:
    result = run(tmp_path, task=tasks.in_order, config=replace(CONFIG, seed=3))
    expected, losses = plain_loop(seed=3)
    assert list(tasks.losses(tmp_path)) == list(range(1, STEPS + 1))
    assert list(tasks.losses(tmp_path).values()) == pytest.approx(losses, abs=1e-6)
    for name, value in model(tmp_path).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-6)
    assert (result.why, result.steps, result.epochs, result.examples) == ("finished", STEPS, 4.0, 4 * 52)
    test = metrics.values(tasks.task.metrics, evaluate(tasks.task, expected, tasks.load_test()))
    assert {name: result.metrics[f"test/{name}"] for name in test} == pytest.approx(test, abs=1e-6)


def plain_loop(seed: int) -> tuple[nn.Module, list[float]]:
    seed_everything(seed)
    net, losses = tasks.make_model(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5)
    sites = [tasks.load_site(site, "train") for site in tasks.SITES]
    points, sides = (torch.cat([site.tensors[i] for site in sites if site is not None]) for i in (0, 1))
    for _ in range(4):
        for x, y in zip(points.split(8), sides.split(8), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return net, losses


def test_an_interrupted_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", task=tasks.with_dropout, config=replace(CONFIG, noise_every=3))
    for stop in (5, 14, 27):
        part = run(tmp_path / "parts", task=tasks.with_dropout, config=replace(CONFIG, noise_every=3), stop_after=stop)
        assert (part.why, part.steps) == ("interrupted", stop)
        assert not (tmp_path / "parts" / "model.safetensors").exists()
    end = run(tmp_path / "parts", task=tasks.with_dropout, config=replace(CONFIG, noise_every=3))
    assert tasks.losses(tmp_path / "parts") == tasks.losses(tmp_path / "whole")
    assert replace(end, seconds=0) == replace(whole, seconds=0)
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    scales = [
        [event.get("noise_scale") for event in read_log(tmp_path / each / "log.jsonl", "step").values()]
        for each in ("parts", "whole")
    ]
    assert scales[0] == scales[1]
    assert any(scales[0])


@pytest.mark.slow
def test_what_has_finished_is_not_trained_again_and_may_be_trained_on(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path)
    assert replace(again, seconds=0) == replace(first, seconds=0)
    longer = run(tmp_path, config=replace(CONFIG, epochs=5))
    assert longer.steps == 35
    assert run(tmp_path / "other", config=replace(CONFIG, epochs=5)).metrics == longer.metrics
    assert tasks.losses(tmp_path) == tasks.losses(tmp_path / "other")


def test_a_folder_with_other_settings_is_refused_with_what_differs(tmp_path: Path) -> None:
    run(tmp_path, config=replace(CONFIG, epochs=1))
    with pytest.raises(RunDiffers, match=r"settings: local\.lr was 0\.2, now 0\.3; train\.seed was 0, now 1; continue"):
        run(
            tmp_path,
            task=replace(tasks.task, local=replace(tasks.task.local, lr=0.3)),
            config=replace(CONFIG, epochs=1, seed=1),
        )
    with pytest.raises(CheckpointMismatch, match="another model"):
        run(tmp_path, task=replace(tasks.task, model=lambda: nn.Linear(6, 2)), config=replace(CONFIG, epochs=1))


@pytest.mark.parametrize(
    ("change", "are_tensors", "found"),
    [
        (lambda rows: rows[:-1], True, "a training on 52 rows, and now there are 50"),
        (lambda rows: [*rows, rows[0]], False, "a training on 52 rows, and now there are 54"),
        (lambda rows: [*rows[1:], rows[0]], False, "a training on other rows than the 52 of now"),
        (
            lambda rows: [*rows[:7], (rows[7][0], 1 - rows[7][1]), *rows[8:]],
            True,
            "a training on other rows than the 52",
        ),
    ],
    ids=["fewer", "more", "in another order", "a label"],
)
def test_a_training_does_not_continue_on_other_rows(
    change: Callable[[Any], Any], are_tensors: bool, found: str, tmp_path: Path
) -> None:
    def data(site: str, split: str, change: Callable[[Any], Any] = list) -> Any:
        found = tasks.load_site(site, "train")
        assert found is not None
        rows = change([found[index] for index in range(len(found))])
        return TensorDataset(*map(torch.stack, zip(*rows, strict=True))) if are_tensors else rows

    begun = replace(tasks.task, data=data)
    other = replace(begun, data=lambda site, split: data(site, split, change))
    run(tmp_path, task=begun, stop_after=3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RunDiffers, match=f"{found}.*give the task the data of its beginning again"):
        run(tmp_path, task=other)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert run(tmp_path, task=begun).why == "finished"
    with pytest.raises(RunDiffers, match=f"--set train.start={tmp_path}/model.safetensors"):
        run(tmp_path, task=other)


def test_it_stops_early_when_the_metric_gets_no_better_and_keeps_the_best_model(tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=40, eval_every=2, patience=3, watch="accuracy", goal="max")
    result = run(tmp_path, config=config)
    assert result.why == "early"
    seen = [event["sites/accuracy"] for event in read_log(tmp_path / "log.jsonl", "evaluation").values()]
    best = max(seen)
    assert len(seen) == result.steps // 2 == seen.index(best) + 1 + 3
    net = tasks.make_model()
    net.load_state_dict(load(tmp_path / "best.safetensors"))
    site = tasks.load_site("north", "test")
    assert metrics.values(tasks.task.metrics, evaluate(tasks.task, net, site))["accuracy"] == best
    assert run(tmp_path, config=config).steps == result.steps


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_a_loss_that_is_no_number_ends_training_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    broken = replace(tasks.task, loss=tasks.Breaking(12))
    with pytest.raises(NotFinite, match=r"in step 12 \(learning rate 0\.2\); the checkpoint of step 10 is kept"):
        run(tmp_path, task=broken, config=replace(CONFIG, log_every=100, checkpoint_every=5, eval_every=100))
    run(tmp_path, config=replace(CONFIG, checkpoint_every=5, eval_every=100))
    begins = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in begins if event["event"] == "begin"] == [0, 10]


def test_a_damaged_checkpoint_is_refused_and_without_it_the_older_one_continues_to_the_same_bits(
    tmp_path: Path,
) -> None:
    config = replace(CONFIG, epochs=1, checkpoint_every=3)
    run(tmp_path / "whole", config=config)
    run(tmp_path / "parts", config=config, stop_after=6)
    damaged = tmp_path / "parts" / "checkpoints" / "step-00000006"
    file = damaged / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"\x3e", b"\x3f", 1))
    with pytest.raises(CheckpointBroken, match=r"step-00000006/__0_0\.distcp is damaged.*continues from step 3"):
        run(tmp_path / "parts", config=config)
    damaged.rename(tmp_path / "away")
    run(tmp_path / "parts", config=config)
    assert tasks.losses(tmp_path / "parts") == tasks.losses(tmp_path / "whole")
    models = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("parts", "whole")]
    assert models[0] == models[1]
    complete = read_log(tmp_path / "whole" / "log.jsonl", "checkpoint")
    assert sorted(complete) == [3, 6, 7]


def test_a_training_whose_first_checkpoint_was_cut_off_starts_from_the_given_file_again(tmp_path: Path) -> None:
    run(tmp_path / "first", config=replace(CONFIG, epochs=1))
    config = replace(CONFIG, epochs=1, start=str(tmp_path / "first" / "model.safetensors"))
    run(tmp_path / "whole", config=config)
    (tmp_path / "cut" / "checkpoints" / "step-00000007.tmp").mkdir(parents=True)
    run(tmp_path / "cut", config=config)
    assert tasks.losses(tmp_path / "cut") == tasks.losses(tmp_path / "whole")


def test_the_exported_model_is_what_the_federation_would_export(tmp_path: Path) -> None:
    with_norm = replace(tasks.task, model=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    run(tmp_path, task=with_norm, config=replace(CONFIG, epochs=1))
    arrays = state_of(with_norm.model())
    found = model(tmp_path)
    assert {name: (a.dtype, a.shape) for name, a in arrays.items()} == {
        name: (t.dtype, t.shape) for name, t in found.items()
    }
    assert json.loads(read_metadata(tmp_path / "model.safetensors")[BUFFERS]) == ["1.running_mean", "1.running_var"]


def test_a_norm_never_meets_a_batch_of_one_example(tmp_path: Path) -> None:
    with_norm = replace(tasks.task, model=lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert run(tmp_path, task=with_norm, config=replace(CONFIG, epochs=1, batch_size=51)).steps == 1


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    own_loop = replace(tasks.task, fit=lambda *_: 1.0, sites=[])
    with pytest.raises(JobRefused) as error:
        run(tmp_path, task=own_loop, config=replace(CONFIG, batch_size=3, noise_every=1), plan=mesh(pp=4, tp=2))
    faults = str(error.value).split("; ")
    for words in ("8 ranks, but there are 1", "its own loop (fit)", "no sites", "noise_every", "tp=2", "of 3 is too"):
        assert any(words in fault for fault in faults), (words, faults)


def test_a_task_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskBroken, match="none of the sites north, south has data to train on"):
        run(tmp_path, task=replace(tasks.task, data=lambda _site, _split: None))


def test_a_step_on_the_whole_data_is_that_of_the_union(tmp_path: Path) -> None:
    fedsgd = replace(tasks.task, local=Local(epochs=2, batch_size=None, lr=0.1), test_data=None)
    assert run(tmp_path, task=fedsgd, config=replace(CONFIG, batch_size=None)).steps == 2


ROWS = [{"point": torch.ones(6), "side": index % 2} for index in range(4)]


def collated(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([row["point"] for row in rows]), torch.tensor([row["side"] for row in rows])


def own_rows(make_model: Callable[[], nn.Module]) -> tuple[Job, Any]:
    """Return a training on rows that only the task can collate, and its data."""
    task = replace(tasks.task, model=make_model, data=lambda site, split: ROWS, collate=collated)
    return Job(name="own", task=task, config=TrainConfig(), plan=Plan(mesh=Mesh(pp=2))), pooled(
        data_of_sites(task, "train")
    )


def look_at(make_model: Callable[[], nn.Module]) -> None:
    job, data = own_rows(make_model)
    try_on_mesh(job.task, job.plan, job.config.seed, data)


def test_the_trial_of_a_forward_pass_takes_the_rows_as_the_task_collates_them() -> None:
    look_at(tasks.make_model)
    with pytest.raises(TaskBroken, match="forward changes them in place"):
        look_at(tasks.clamped.model)


class Skipping(nn.Module):
    """A skip connection from layer to layer, of which the blueprint says nothing."""

    blueprint = Blueprint(chain=("first", "second", "last"))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(inputs + self.second(self.first(inputs)))
        return outputs


class Wider(Skipping):
    """The same in other sizes, so that the stages fail where the model does not."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs))
        outputs: torch.Tensor = self.last(hidden[:, :1] + inputs)
        return outputs[:, :1] + hidden


@pytest.mark.parametrize("make_model", [Skipping, Wider])
def test_a_chain_that_is_not_all_that_a_forward_pass_does_is_refused(make_model: Callable[[], nn.Module]) -> None:
    with pytest.raises(TaskBroken, match="pp=2: the stages one after another give other outputs than the model"):
        look_at(make_model)


def test_the_chain_of_a_model_that_is_too_large_to_build_is_followed_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "SMALL", 1)
    look_at(tasks.make_model)
    look_at(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 2)))
    with pytest.raises(TaskBroken, match="pp=2: last does not take what the piece before it returned, so forward does"):
        look_at(Skipping)


def test_the_operations_of_a_model_are_counted_on_a_row_as_the_task_collates_it() -> None:
    """Each product once forward and twice backward, but for the gradient of the input, which is not needed."""
    job, data = own_rows(tasks.make_model)
    products = [2 * 6 * 12, 2 * 12 * 12, 2 * 12 * 2]
    assert flops_per_example(job.task, fetcher(data)(torch.arange(1))[0]) == 3 * sum(products) - products[0]
