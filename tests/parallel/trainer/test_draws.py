"""Ranks of one pipeline read the same draws; ranks that do not are refused by name before a step."""

from pathlib import Path

import pytest

from atoll.parallel.trainer.run import Result
from atoll.task.errors import TaskBroken
from tests.parallel.ranks import call_on_ranks
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import mesh, run
from tests.training import drawing

pytestmark = pytest.mark.real


def drawn(folder: Path, name: str, degrees: dict[str, int]) -> Result | str:
    try:
        return run(folder, task=getattr(drawing, name), plan=mesh(**degrees))
    except TaskBroken as error:
        return str(error)


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"dp_replicate": 2}])
def test_inputs_and_targets_come_from_one_draw_and_losses_are_those_of_one_process(
    degrees: dict[str, int], tmp_path: Path
) -> None:
    """The model begins as the identity, and targets are inputs: a loss that is not about zero has seen two draws."""
    one = run(tmp_path / "one", task=drawing.task)
    found = call_on_ranks(drawn, 2, tmp_path / "two", "task", degrees)
    assert found[0].metrics == pytest.approx(one.metrics, abs=1e-9)
    assert max(tasks.losses(tmp_path / "two").values()) < 1e-6


def test_data_that_is_built_at_random_is_the_same_on_every_rank(tmp_path: Path) -> None:
    call_on_ranks(drawn, 2, tmp_path, "random_task", {"pp": 2})
    assert max(tasks.losses(tmp_path).values()) < 1e-6


def test_ranks_of_one_pipeline_that_read_different_data_are_refused_in_the_first_step(tmp_path: Path) -> None:
    found = call_on_ranks(drawn, 2, tmp_path, "unequal_task", {"pp": 2})
    assert found[0] == found[1]
    assert found[0].startswith("batch 1: the ranks of one pipeline or tensor group (pp=2, tp=1) have read different")
    assert not (tmp_path / "model.safetensors").exists()
