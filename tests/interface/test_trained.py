"""`atoll.train` beside `atoll train`, in this process and on a mesh."""

import json
import subprocess

import numpy as np
import pytest
import torch

import atoll
from atoll.tensors import safetensors_file
from tests.federation.processes import ATOLL
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

SETTINGS = {"train.batch_size": 8, "local.optimizer": "adam", "local.lr": 0.01, "train.seed": 3}


def trained(**others):
    return atoll.train(line_task.task, epochs=3, set=SETTINGS, progress=False, **others)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "dp=2"])
def test_the_model_is_the_commands(tmp_path, mesh):
    options = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    ranks = ["--nproc", "2", "--mesh", mesh] if mesh else []
    command = [ATOLL, "train", TASK, "--epochs", "3", "--out", tmp_path / "command", "--json", *options, *ranks]
    expected = json.loads(subprocess.check_output(command, text=True))
    it = trained(mesh=mesh)
    assert it.metrics == expected["metrics"]
    there = safetensors_file.read(tmp_path / "command" / "model.safetensors")
    assert all(np.array_equal(it.model()[name], array) for name, array in there.items())


def test_it_has_its_log_prints_nothing_and_sets_the_generators_back(tmp_path, capfd):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    it = trained(out=tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert it.result["why"] == "finished"
    assert it.evaluations.column("test/accuracy")[-1] == it.metrics["test/accuracy"]
    assert "loss" in it.steps.columns
    [axes] = it.plot("accuracy").axes
    assert list(axes.lines[0].get_ydata()) == it.evaluations.column("test/accuracy")
    with pytest.raises(atoll.AtollError, match=r"metric: got 'auc'; allowed: .*test/accuracy"):
        it.plot("auc")
    with pytest.raises(atoll.AtollError, match="version: got 'best'; available: newest"):
        it.model("best")


def test_mistakes_are_raised_before_the_first_step(tmp_path):
    with pytest.raises(atoll.AtollError) as refused:
        atoll.train(line_task.task, set={"train.batch_size": 0, "local.lr": -1.0}, out=tmp_path / "run")
    assert len(refused.value.faults) == 2
    with pytest.raises(atoll.AtollError, match=r"set: train.batch_size: got \[8\]"):
        atoll.train(line_task.task, set={"train.batch_size": [8]})
