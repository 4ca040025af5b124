"""`atoll agent --check`: everything that the site's agent could not use, at once."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.invoking import invoke, refused

OWN = """
from dataclasses import replace
from tests.simulations.federation import line_task
common = replace(line_task.task, data=lambda site, split: line_task.data("a", split))
task = replace(common, settings={"file": "rows.csv", "rows": 3})
other = replace(common, settings={"unit": 1.5})
three = replace(common, metrics={"top": lambda outputs, targets: (1, 2, 3)})
doubled = replace(common, data=lambda site, split: [(x.double(), y) for x, y in line_task.data("a", split)])
"""


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_wrong_settings_of_the_task_and_a_join_code_are_refused_at_once(task_file: Path) -> None:
    options = ("--site", "a", "--check", "--join", "atoll1nonsense", "--state", task_file.parent / "state")
    wrong = ("--set", "task.flie=x.csv", "--set", "task.rows=many", "--set", "task.unit=2.0")
    faults = refused("agent", f"{task_file}:task", f"{task_file}:other", *options, *wrong)
    assert len(faults) == 3, faults
    for words in ("join: ", "task.flie: unknown key", "task.rows: expected"):
        assert any(words in fault for fault in faults), (words, faults)


def test_the_settings_of_all_tasks_are_known_and_a_site_of_another_name_is_noted(task_file: Path) -> None:
    given = ("--set", 'task.file="own.csv"', "--set", "task.unit=2.0", "--state", task_file.parent / "state")
    result = invoke("agent", f"{task_file}:task", f"{task_file}:other", "--site", "z", "--check", *given)
    assert result.exit_code == 0, result.stderr
    assert f"site z is not among the sites of {task_file}:task (a, b, c, d)" in " ".join(result.stderr.split())
    quiet = invoke("agent", f"{task_file}:task", "--site", "a", "--check", *given[:2], *given[4:])
    assert "none of the sites" not in quiet.stderr


def test_a_metric_or_rows_that_the_agent_could_not_use_are_known(task_file: Path) -> None:
    given = ("--site", "b", "--check", "--state", task_file.parent / "state")
    faults = refused("agent", f"{task_file}:three", f"{task_file}:doubled", *given)
    for fault, name, words in zip(faults, ("three", "doubled"), (THREE, DOUBLED), strict=True):
        assert fault.startswith(f"{task_file}:{name}: ")
        assert words in fault


THREE = "of the train data of site 'b', it returns 3 numbers, and a plain metric returns two, (total, count): make"
DOUBLED = "the model takes these inputs as float32: let task.data return it"


@pytest.mark.real
def test_a_task_is_loaded_by_the_interpreter_of_its_site(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "of_the_site.py").write_text("task = 1\n")
    own = tmp_path / "own.py"
    own.write_text(f"import of_the_site\n{OWN}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/library" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    given = ("--site", "a", "--check", "--state", tmp_path / "state")
    (fault,) = refused("agent", f"{own}:task", *given)
    assert "ModuleNotFoundError: No module named 'of_the_site'" in fault
    assert invoke("agent", f"{own}:task", *given, "--set", f'python="{python}"').exit_code == 0
    wrong = ("--set", f'python="{python}"', "--set", "task.rows=many")
    (fault,) = refused("agent", f"{own}:task", *given, *wrong)
    assert fault.startswith(f"{own}:task: task.rows: expected"), fault


@pytest.mark.real
def test_a_client_app_is_loaded_as_the_agent_loads_it(tmp_path: Path) -> None:
    app = shutil.copytree(Path(__file__).parents[2] / "flower" / "apps" / "own_code", tmp_path / "app")
    given = ("--site", "a", "--check", "--state", tmp_path / "state", "--set", "task.partition-id=0")
    assert invoke("agent", app, *given).exit_code == 0
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace("own_code_app:client", "own_code_app:train"))
    (fault,) = refused("agent", app, *given)
    assert fault.endswith("own_code_app:train is a function: tool.flwr.app.components.clientapp must name a ClientApp")
