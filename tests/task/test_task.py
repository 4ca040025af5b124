import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import Local, Metric, Task, load_task, task_name
from atoll.task.errors import TaskNotFound
from tests.waiting import BOUND_S

SOURCE = """
from atoll import Task
import neighbour
task = Task(model=lambda: None, data=lambda site, split: None, loss=max, sites=neighbour.SITES)
other = task
number = 7
def later():
    import late
    return late.VALUE
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {"server.py": SOURCE, "neighbour.py": "SITES = ['a', 'b']", "late.py": "VALUE = 5"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("neighbour", "late", "package_of_task"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.real
def test_importing_atoll_imports_no_torch() -> None:
    code = "import atoll, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=BOUND_S).returncode == 0


def test_task_tells_all_its_faults_at_once() -> None:
    with pytest.raises(ValueError, match="Task: ") as caught:
        Task(
            model=None,  # type: ignore[arg-type]
            data=3,  # type: ignore[arg-type]
            loss=len,  # type: ignore[arg-type]
            sites=["a", "a", ""],
            metrics={"accuracy": 1},  # type: ignore[dict-item]
            local={"lr": 1},  # type: ignore[arg-type]
            test_data=4,  # type: ignore[arg-type]
        )
    for part in (
        "model must be callable, got None",
        "data must be callable, got 3",
        "test_data must be callable or None, got 4",
        "local must be a Local",
        "sites: '' is not a name",
        "sites: names must differ",
        "metrics: 'accuracy' must be a name with a function or a Metric, got 1",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[31m", "x" * 201])
def test_a_metric_s_name_prints_on_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"Task: metrics: the name '.*; allowed: 1 to 200 printable characters"):
        Task(model=len, data=len, loss=len, metrics={name: len})  # type: ignore[arg-type]
    assert Task(model=len, data=len, loss=len, metrics={"F1/ä [%]": len})  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [{"sites": "north"}, {"metrics": [1]}, {"sites": [["a"], {}]}])
def test_task_refuses_what_is_of_another_kind(fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Task: {next(iter(fault))}"):
        Task(**({"model": len, "data": len, "loss": len} | fault))


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ([("a", {})], "site_settings must be a mapping from site to its settings"),
        ({"a": 3}, "site_settings: 'a' must be the name of a site with a mapping of its settings, got 3"),
        ({"b": {"file": "x"}}, "site_settings: sites.b: no site of the task"),
        ({"a": {"fil": "x"}}, "site_settings: sites.a.fil: "),
        ({"a": {"file": 3}}, "site_settings: sites.a.file: "),
    ],
)
def test_settings_of_sites_are_declared_ones_of_known_sites(tables: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Task(model=len, data=len, loss=len, sites=["a"], settings={"file": ""}, site_settings=tables)  # type: ignore[arg-type]


def test_task_has_the_documented_defaults() -> None:
    task = Task(model=len, data=len, loss=len, sites=["a"], metrics={"m": Metric(len, len)})  # type: ignore[arg-type]
    assert (task.local, task.sites, task.test_data, task.fit) == (Local(), ("a",), None, None)


def test_a_file_is_loaded_with_its_neighbours_under_a_private_name(folder: Path) -> None:
    task = load_task(f"{folder}/server.py:task")
    assert isinstance(task, Task)
    assert task.sites == ("a", "b")
    assert sys.path[0] != str(folder)
    assert "server" not in sys.modules


def test_a_neighbour_may_be_imported_later(folder: Path) -> None:
    load_task(f"{folder}/server.py:task")
    module = [module for name, module in sys.modules.items() if name.startswith("_atoll_user_server_")][-1]
    assert module.later() == 5


def test_a_module_is_found_in_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "package_of_task.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    assert isinstance(load_task("package_of_task:task"), Task)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("server.py", "neither module:attribute nor path/to/file.py:attribute"),
        (3, "3 is neither module:attribute nor path/to/file.py:attribute"),
        ("server.py:", "neither module:attribute"),
        ("server.py:a b", "neither module:attribute"),
        ("nowhere.py:task", "there is no file .*nowhere.py"),
        ("no_such_module:task", "there is no module no_such_module in"),
        ("os.no_such_module:task", "there is no module os.no_such_module in"),
        ("server.py:tusk", r"there is no tusk in server.py \(tasks there: task, other\)"),
        ("server.py:number", r"number is a int in server.py \(tasks there: task, other\)"),
        ("neighbour:SITES", r"SITES is a list in neighbour \(tasks there: none\)"),
    ],
)
def test_what_is_not_found_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, reference: Any, message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(TaskNotFound, match=message):
        load_task(reference)


def test_an_error_in_the_task_itself_is_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that the task misses is not the module that was asked for."""
    (folder / "broken.py").write_text("import no_such_module_either")
    monkeypatch.chdir(folder)
    for reference in ("broken.py:task", "broken:task"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
            load_task(reference)
    assert not any(name.startswith("_atoll_task_broken") for name in sys.modules)


def test_a_name_is_the_same_on_every_machine() -> None:
    assert task_name(f"{os.sep}some{os.sep}where/digits.py:task") == "digits:task"
    assert task_name("digits.py:task") == "digits:task"
    assert task_name("pkg.digits:task") == "pkg.digits:task"
    assert task_name("digits:task") == "digits:task"


class LearnedLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.body = torch.nn.Parameter(torch.zeros(2)), torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((outputs + self.bias) * scale, targets)


@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_a_loss_with_parameters_of_its_own_is_refused_by_their_names(form: str) -> None:
    """No optimizer would have them."""
    module = LearnedLoss()
    loss = {"module": module, "method": module.forward, "partial": functools.partial(module, scale=2.0)}[form]
    fields: dict[str, Any] = {"model": lambda: torch.nn.Linear(2, 2), "data": lambda site, split: None, "loss": loss}
    with pytest.raises(ValueError, match=r"loss has parameters \(bias\), which no optimizer trains"):
        Task(**fields)
    Task(**fields, fit=lambda model, data, local, deadline: 1.0)  # a loop that may train them
    module.requires_grad_(False)
    Task(**fields)
