"""With units said, every division of a batch gives the training and the means of one process in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import JobRefused
from atoll.parallel.trainer.run import Result
from atoll.task.errors import TaskBroken
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import model, run
from tests.training import weighted
from tests.turns import table

CONFIG = TrainConfig(batch_size=8, log_every=1, epochs=2)

PLANS = {
    "dp 2": Plan(mesh=Mesh(dp_replicate=2)),
    "dp 2, accumulated": Plan(mesh=Mesh(dp_replicate=2), accumulate=2),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), zero=3),
    "pp 2": Plan(mesh=Mesh(pp=2), num_microbatches=4),
}


def trained(folder: Path, kind: str, plan: Plan, is_said: bool = True) -> Result | str:
    try:
        return run(folder, task=weighted.task_of(kind, is_said=is_said), config=CONFIG, plan=plan)
    except TaskBroken as error:
        return str(error)


def check(folder: Path, kind: str, result: Any) -> None:
    weights, losses, of_test = weighted.plain_loop(kind, epochs=2)
    assert list(tasks.losses(folder).values()) == pytest.approx(losses, rel=2e-5)
    assert result.metrics["sites/loss"] == pytest.approx(of_test, rel=2e-5)
    for name, value in model(folder).items():
        torch.testing.assert_close(value.double(), weights[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", weighted.KINDS)
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulation_is_the_plain_loop_in_float64(kind: str, accumulate: int, tmp_path: Path) -> None:
    check(tmp_path, kind, trained(tmp_path, kind, Plan(accumulate=accumulate)))


@pytest.mark.real
@pytest.mark.parametrize(("kind", "plan"), table(weighted.KINDS, PLANS, days=3))
def test_ranks_and_stages_are_the_plain_loop_in_float64(kind: str, plan: str, tmp_path: Path) -> None:
    results = call_on_ranks(trained, 2, tmp_path, kind, PLANS[plan])
    check(tmp_path, kind, results[0])


@pytest.mark.parametrize("kind", weighted.KINDS)
@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_a_wrong_guess_is_refused_where_batches_are_divided(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Of 8 micro-batches each has one row: two of them are compared."""
    found = trained(tmp_path, kind, Plan(accumulate=accumulate), is_said=False)
    assert isinstance(found, str)
    assert found.startswith("the loss of a batch is ")
    assert "Task(units=lambda targets: ...)" in found
    assert not (tmp_path / "model.safetensors").exists()


def test_a_wrong_guess_is_said_once_where_none_is_divided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(trained(tmp_path, "masked", Plan(), is_said=False), Result)
    said = [record.message for record in caplog.records if record.name.endswith("unit_check")]
    assert len(said) == 1
    assert said[0].startswith("the loss of a batch is")


@pytest.mark.real
def test_a_wrong_guess_is_refused_on_ranks(tmp_path: Path) -> None:
    found = call_on_ranks(trained, 2, tmp_path, "padding", PLANS["dp 2"], False)
    assert all("the loss divides by something else" in str(each) for each in found)


def test_a_sum_has_no_noise_scale(tmp_path: Path) -> None:
    config = replace(CONFIG, noise_every=2)
    with pytest.raises(JobRefused, match=r"train\.noise_every: only a mean has a noise scale, got 2"):
        run(tmp_path, task=weighted.task_of("summed"), config=config)
