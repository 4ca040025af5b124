"""A private training in one process: what it computes, what it tells, when its budget ends it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Task
from atoll.ground.noise.key import key_of
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.private.account import FILE
from atoll.parallel.private.secret import FILE as KEY
from atoll.parallel.private.secret import SecretBroken, secret_of
from atoll.parallel.private.terms import Terms
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.data import data_of_sites, pooled
from atoll.parallel.trainer.job import Job, JobRefused, check_job
from atoll.task.errors import TaskBroken
from atoll.task.local import epoch_steps
from atoll.training.local.training import seed_everything
from atoll.training.private.noise import add_noise
from atoll.training.private.sampler import PoissonSampler
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import model, run

SECRET, RATE, CLIP, Z = bytes(range(32)), 0.1, 0.5, 0.8
CONFIG = TrainConfig(log_every=1, eval_every=5, checkpoint_every=4)


def terms(steps: int = 12, steps_max: int | None = None, **changed: Any) -> Terms:
    values = {"sample_rate": RATE, "noise_multiplier": Z, "clip_norm": CLIP, "delta": 1e-4, **changed}
    return Terms(
        **values,
        steps=steps,
        allowed=lambda wanted: wanted if steps_max is None else min(wanted, steps_max),
        guarantee=lambda number: {"steps": number},
    )


def known(folder: Path) -> Path:
    """Make a folder whose training has a known secret."""
    folder.mkdir(exist_ok=True)
    (folder / KEY).write_text(SECRET.hex())
    return folder


def by_hand(task: Task, steps: int) -> nn.Module:
    """Train by DP-SGD with momentum and weight decay, row after row."""
    seed_everything(0)
    net = task.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01)
    points, sides = pooled(data_of_sites(task, "train")).tensors
    sampler = PoissonSampler(key_of(SECRET, "samples", 0), len(points), RATE)
    for step in range(steps):
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()}
        for row in sampler.indices(step):
            loss = nn.functional.cross_entropy(net(points[row : row + 1]), sides[row : row + 1])
            found = torch.autograd.grad(loss, [*net.parameters()])
            norm = float(torch.stack([g.double().square().sum() for g in found]).sum().sqrt())
            for total, gradient in zip(sums.values(), found, strict=True):
                total += gradient.double() * min(1.0, CLIP / norm)
        add_noise(sums, key_of(SECRET, "noise", 0), step, Z * CLIP)
        for name, parameter in net.named_parameters():
            parameter.grad = (sums[name] / (RATE * len(points))).float()
        optimizer.step()
    return net


decaying = replace(tasks.task, local=replace(tasks.task.local, weight_decay=0.01))


def test_it_computes_dp_sgd(tmp_path: Path) -> None:
    result = run(known(tmp_path), task=decaying, config=CONFIG, private=terms())
    expected = by_hand(decaying, 12).state_dict()
    for name, value in model(tmp_path).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)
    assert (result.why, result.steps, result.epochs, result.privacy) == ("finished", 12, 1.2, {"steps": 12})
    assert json.loads((tmp_path / FILE).read_text())["steps"] == 12


def test_an_interrupted_training_continues_as_if_it_had_not_been_and_pays_once(tmp_path: Path) -> None:
    run(known(tmp_path / "whole"), task=decaying, config=CONFIG, private=terms())
    part = run(known(tmp_path / "part"), task=decaying, config=CONFIG, private=terms(), stop_after=7)
    assert (part.why, part.privacy) == ("interrupted", {"steps": 7})
    assert (tmp_path / "part" / KEY).stat().st_size
    end = run(tmp_path / "part", task=decaying, config=CONFIG, private=terms())
    assert end.privacy == {"steps": 12}
    for name, value in model(tmp_path / "part").items():
        assert torch.equal(value, model(tmp_path / "whole")[name])
    assert not [*tmp_path.rglob(KEY)]  # an ended training has no steps


def test_steps_that_were_charged_are_done_again_with_other_noise(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        folder, config = known(tmp_path / name), replace(CONFIG, checkpoint_every=3)
        run(folder, task=decaying, config=config, private=terms(), stop_after=None if name == "a" else 6)
        if name == "b":
            shutil.rmtree(folder / "checkpoints" / "step-00000006")
            result = run(folder, task=decaying, config=config, private=terms())
            assert result.privacy == {"steps": 12 + 3}
            assert json.loads((folder / FILE).read_text())["repeats"] == 1
        found.append(model(folder))
    assert all(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_secret_is_for_its_owner_alone_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    secret_of(tmp_path)
    assert (tmp_path / KEY).stat().st_mode & 0o777 == 0o600
    assert secret_of(tmp_path) == bytes.fromhex((tmp_path / KEY).read_text())
    (tmp_path / KEY).write_text("ab")
    with pytest.raises(SecretBroken, match="is damaged: delete it"):
        run(tmp_path, task=decaying, config=CONFIG, private=terms(2))


def test_noise_comes_from_the_system_and_no_seed_repeats_it(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        run(tmp_path / name, task=decaying, config=CONFIG, private=terms(2))
        found.append(model(tmp_path / name))
    assert all(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_no_event_tells_the_loss_or_the_size_of_a_sample(tmp_path: Path) -> None:
    run(tmp_path, task=decaying, config=CONFIG, private=terms())
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 12
    assert all("loss" not in event for event in steps)
    rates = {round(event["examples_per_s"], 3) for event in steps}
    assert len(rates) <= 2, rates  # the expected batch over ticks of the tests' clock


def test_an_empty_sample_is_a_step_on_noise(tmp_path: Path) -> None:
    seed_everything(0)
    before = tasks.make_model().state_dict()
    run(tmp_path, task=tasks.task, config=CONFIG, private=terms(1, sample_rate=1e-6))
    moved = torch.cat([(value - before[name]).double().flatten() for name, value in model(tmp_path).items()])
    assert bool(moved.all())
    within = 6 / (2 * len(moved)) ** 0.5  # six standard deviations, as the noise is fresh
    assert float(moved.std()) == pytest.approx(CLIP * Z / (1e-6 * 52) * 0.2, rel=within)


def test_the_budget_ends_it_by_name(tmp_path: Path) -> None:
    result = run(tmp_path, task=decaying, config=CONFIG, private=terms(12, steps_max=9))
    assert (result.why, result.steps, result.privacy) == ("budget", 9, {"steps": 9})
    assert (tmp_path / "model.safetensors").exists()
    again = run(tmp_path, task=decaying, config=CONFIG, private=terms(12, steps_max=9))
    assert (again.why, again.steps, again.privacy) == ("budget", 9, {"steps": 9})


def test_a_lost_checkpoint_refunds_nothing(tmp_path: Path) -> None:
    run(tmp_path, task=decaying, config=CONFIG, private=terms(8, steps_max=9))
    newest = max((tmp_path / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    for path in sorted(newest.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    newest.rmdir()
    result = run(tmp_path, task=decaying, config=CONFIG, private=terms(8, steps_max=9))
    assert (result.why, result.steps, result.privacy) == ("budget", 5, {"steps": 9})  # from 4, and one is left


def test_a_row_that_looks_at_others_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Centred(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h - h.mean(0)

    centred = replace(tasks.task, model=lambda: nn.Sequential(nn.Linear(6, 4), Centred(), nn.Linear(4, 2)))
    with pytest.raises(TaskBroken) as caught:
        run(tmp_path, task=centred, config=CONFIG, private=terms(delta=0.5))
    assert "1: the outputs of a row alone differ" in str(caught.value)
    assert "privacy.delta: got 0.5 with 52 training examples" in str(caught.value)
    assert not (tmp_path / FILE).exists() or json.loads((tmp_path / FILE).read_text())["steps"] == 0


def test_what_does_not_go_together_is_refused_at_once() -> None:
    config = TrainConfig(
        batch_size=8, sampling="partition", last="drop", lr_rule="linear", base_batch=8, noise_every=2, workers=1
    )
    plan = Plan(
        mesh=Mesh(pp=2),
        recompute="selective",
        compile=True,
        offload=True,
        zero=2,
        reduce_dtype="bf16",
        batchnorm="sync",
    )
    with pytest.raises(JobRefused) as caught:
        check_job(Job(name="t", task=tasks.task, config=config, plan=plan, private=terms()), 2)
    faults = str(caught.value).split("; ")
    for name in ("batch_size", "sampling", "last", "lr_rule", "base_batch", "noise_every", "workers"):
        assert any(fault.startswith(f"train.{name}: got") for fault in faults), name
    for name in ("recompute", "compile", "offload", "reduce_dtype", "batchnorm"):
        assert any(fault.startswith(f"plan.{name}: got") for fault in faults), name
    assert any("a pipeline knows no norm of a whole gradient" in fault for fault in faults)


@pytest.mark.parametrize(
    "plan",
    [Plan(accumulate=3), Plan(recompute="full"), Plan(precision="bf16")],
    ids=["accumulate", "recompute", "bf16"],
)
def test_micro_batches_and_repeated_passes_change_nothing(plan: Plan, tmp_path: Path) -> None:
    run(known(tmp_path), task=decaying, config=CONFIG, private=terms(6), plan=plan)
    expected = by_hand(decaying, 6).state_dict()
    for name, value in model(tmp_path).items():
        within = 2e-6 if plan.precision == "fp32" else 2e-2
        torch.testing.assert_close(value, expected[name], rtol=0, atol=within)


def test_an_epoch_is_the_steps_in_which_each_example_is_expected_once() -> None:
    assert [epoch_steps(rate) for rate in (1.0, 0.7, 0.3, 0.04, 1e-3)] == [1, 1, 3, 25, 1000]
    counts = np.zeros(200)
    sampler = PoissonSampler(SECRET, 200, 0.04)
    for step in range(25 * 40):
        counts[sampler.indices(step)] += 1
    assert counts.mean() == pytest.approx(40, abs=1.5)
