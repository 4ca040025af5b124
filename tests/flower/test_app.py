"""The description of a Flower app: all faults at once, and the values of a run over its defaults."""

import importlib
import sys

import pytest

from atoll.flower.app import read_app
from atoll.task.apps import is_app, with_app
from atoll.task.errors import TaskNotFound
from atoll.task.task import task_name

GOOD = """
[project]
name = "Quick"
version = "1.0.0"
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "quick.server:app"
clientapp = "quick.client:app"
[tool.flwr.app.config]
rounds = 3
lr = 0.1
name = "a"
flag = true
[tool.flwr.app.config.model]
width = 8
[tool.flwr.federations]
default = "here"
[tool.flwr.federations.other]
options.num-supernodes = 3
[tool.flwr.federations.here]
options.num-supernodes = 5
"""


def reference(folder, text):
    (folder / "pyproject.toml").write_text(text)
    return with_app(str(folder))


def test_a_folder_is_short_for_its_app(tmp_path):
    app = reference(tmp_path, GOOD)
    assert app == f"{tmp_path}/pyproject.toml:app"
    assert is_app(app)
    assert not is_app("task.py:task")
    assert with_app("package.module:task") == "package.module:task"
    assert task_name(app) == "flower:bench/Quick"


def test_the_run_config_is_flat(tmp_path):
    app = read_app(reference(tmp_path, GOOD))
    assert app.config == {"rounds": 3, "lr": 0.1, "name": "a", "flag": True, "model.width": 8}
    assert app.num_supernodes == 5
    assert app.run_config({"lr": 1, "model.width": 16})["lr"] == 1.0


def test_values_of_a_run_have_the_types_of_the_defaults(tmp_path):
    app = read_app(reference(tmp_path, GOOD))
    with pytest.raises(ValueError, match="unknown key, got 1") as found:
        app.run_config({"nope": 1, "rounds": 2.5, "flag": 1})
    assert "task.rounds: expected int, got 2.5; task.flag: expected bool, got 1" in str(found.value)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["project.name", "publisher", "serverapp", "clientapp"]),
        ("x =", ["not TOML"]),
        (GOOD.replace("quick.server:app", "quick.server"), ["must be module:attribute, got 'quick.server'"]),
        (GOOD.replace('publisher = "bench"', ""), ["tool.flwr.app.publisher must be a string, got None"]),
        ("tool = 3\nproject = 'x'", ["project must be a table, got 'x'", "tool must be a table, got 3"]),
        ("tool.flwr = [1]", ["tool.flwr must be a table, got [1]"]),
        ("tool.flwr.app = true", ["tool.flwr.app must be a table, got True"]),
        ("tool.flwr.app.components = 'a:b'", ["tool.flwr.app.components must be a table, got 'a:b'"]),
        (
            "tool.flwr.federations = 2\ntool.flwr.app.config = 5",
            ["tool.flwr.app.config must be a table, got 5", "tool.flwr.federations must be a table, got 2"],
        ),
        (GOOD.replace("quick.server:app", "quick.server:"), ["must be module:attribute, got 'quick.server:'"]),
        (GOOD.replace("quick.client:app", ".client:app"), ["must be module:attribute, got '.client:app'"]),
    ],
)
def test_all_faults_are_told_at_once(tmp_path, text, faults):
    with pytest.raises(TaskNotFound) as found:
        read_app(reference(tmp_path, text))
    assert all(any(fault in told for told in found.value.faults) for fault in faults)


@pytest.mark.parametrize("options", ["5", "[5]", "{ num-supernodes = true }", "{ num-supernodes = '5' }"])
def test_a_federation_that_states_no_number_of_clients_has_none(tmp_path, options):
    federations = GOOD.replace("options.num-supernodes = 3", "").replace("options.num-supernodes = 5", "")
    assert read_app(reference(tmp_path, f"{federations}options = {options}\n")).num_supernodes == 0


def test_missing_modules_and_attributes_are_named(tmp_path):
    app = read_app(reference(tmp_path, GOOD))
    with pytest.raises(TaskNotFound, match=r"no module flower_absent_here for flower_absent_here\.client:app"):
        app.load("flower_absent_here.client:app")
    (tmp_path / "flower_present_here.py").write_text("x = 1\n")
    with pytest.raises(TaskNotFound, match="names no attribute"):
        app.load("flower_present_here:app")


def test_two_apps_of_the_same_module_names_are_two_apps(tmp_path):
    """As copies of an app are, in one notebook; what lies deeper, such as an environment, is not theirs alone."""
    apps = []
    for word in ("first", "second"):
        package = tmp_path / word / "flower_twin"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "words.py").write_text(f"word = {word!r}\n")
        (package / "server.py").write_text("from flower_twin.words import word as app\n")
        apps.append(read_app(reference(tmp_path / word, GOOD)))
    below = tmp_path / "first" / "environment" / "site"
    below.mkdir(parents=True)
    (below / "flower_library.py").write_text("x = 1\n")
    sys.path.insert(0, str(below))
    library = importlib.import_module("flower_library")
    try:
        for number in (0, 1, 0):
            assert apps[number].load("flower_twin.server:app") == ("first", "second")[number]
        assert sys.modules["flower_library"] is library
    finally:
        sys.path.remove(str(below))


def test_a_module_from_elsewhere_is_not_taken_for_that_of_an_app(tmp_path):
    (tmp_path / "colorsys.py").write_text("app = 1\n")
    app = read_app(reference(tmp_path, GOOD))
    importlib.import_module("colorsys")
    with pytest.raises(TaskNotFound, match="this process has another module colorsys: <module 'colorsys' from "):
        app.load("colorsys:app")
