"""`atoll train` on a GPU, as a user starts it, kills it and starts it again. `make test-cuda` runs this."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.invoking import refused, shown
from tests.cli.training.test_train import EVERY_STEP, TASK, TASKS
from tests.cli.training.test_train import start as start  # a fixture
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")


@pytest.mark.parametrize("options", [(), ("--mesh", "dp_shard=1", "--zero", "3")], ids=["one process", "fsdp"])
def test_a_killed_training_goes_on_with_the_losses_of_the_cpu(
    options: tuple[str, ...], start: Any, tmp_path: Path
) -> None:
    shown("train", TASK, "--out", tmp_path / "cpu", "--device", "cpu", *EVERY_STEP)
    ours = (f"{TASKS}:slow", tmp_path / "gpu", "--device", "cuda", *options)
    trainer = start(*ours)
    trainer.wait_for(8)
    os.kill(trainer.process.pid, signal.SIGKILL)
    trainer.end()
    again = start(*ours)
    again.slowed_by.unlink()
    code, result = again.end()
    assert code == 0, again.errors.read_text()
    assert (result["why"], result["steps"], result["device"]) == ("finished", 28, torch.cuda.get_device_name())
    assert tasks.losses(tmp_path / "gpu") == pytest.approx(tasks.losses(tmp_path / "cpu"), rel=1e-5)
    expected = model(tmp_path / "cpu")
    for name, value in model(tmp_path / "gpu").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


def test_more_ranks_than_gpus_are_refused_with_the_way_out(tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    [fault] = refused("train", TASK, "--out", tmp_path / "out", "--nproc", there + 1, "--mesh", f"dp={there + 1}")
    assert f"this machine has {there}" in fault
    assert "--device cpu" in fault
