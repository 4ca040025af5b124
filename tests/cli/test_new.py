"""`atoll new` writes a project that works at once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll import Task, load_task
from atoll.client.config import AgentConfig
from atoll.protocol.settings import load
from atoll.server.config.run import RunFile
from tests.cli.invoking import invoke, refused
from tests.waiting import BOUND_S


@pytest.mark.real
def test_the_test_of_a_new_project_passes(tmp_path: Path) -> None:
    assert invoke("new", tmp_path / "project").exit_code == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "project",
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_the_digits_of_a_new_project_are_scikit_learns(tmp_path: Path) -> None:
    invoke("new", tmp_path)
    from sklearn.datasets import load_digits

    task, digits = load_task(f"{tmp_path / 'task.py'}:task"), load_digits()
    assert isinstance(task, Task)
    for number, site in enumerate(task.sites):
        images, targets = task.data(site, "train").tensors
        assert np.array_equal(images, (digits.data[number::4] / 16).astype(np.float32))
        assert np.array_equal(targets, digits.target[number::4])


def test_the_settings_of_a_new_project_are_allowed(tmp_path: Path) -> None:
    invoke("new", tmp_path)
    checked = invoke("coordinator", tmp_path / "run.toml", "--check")
    assert checked.exit_code == 0, checked.output
    assert f'task = "{tmp_path / "task.py"}:task"' in checked.stdout
    assert load(RunFile, tmp_path / "run.toml").rounds == 5
    assert load(AgentConfig, tmp_path / "agent.toml", ["site=north"]).exit_when_done


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine = 1\n")
    (tmp_path / "run.toml").write_text("# mine\n")
    assert refused("new", tmp_path) == [
        f"{tmp_path / name} exists, and is not overwritten: name another folder" for name in ("run.toml", "task.py")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "task.py"]
    assert (tmp_path / "task.py").read_text() == "mine = 1\n"
