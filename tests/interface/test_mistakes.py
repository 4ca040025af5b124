"""Mistaken calls of the Python interface: each raises `AtollError` with a sentence, before anything runs."""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atoll
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

CALLS = {
    "simulate": lambda: atoll.simulate(task, rounds=1, progress=False),
    "simulate a reference": lambda: atoll.simulate(TASK, rounds=1, progress=False),
    "train": lambda: atoll.train(task, steps=1, mesh="dp=2", progress=False),
    "sweep": lambda: atoll.sweep({"seed": [1]}, task, jobs=2, progress=False),
    "compare": lambda: atoll.compare(task, rounds=1, progress=False),
}
task = line_task.task
SCRIPT = """
import atoll
from tests.interface.test_mistakes import CALLS, task

CALLS["{call}"]()
"""


@pytest.mark.parametrize("call", CALLS)
def test_a_script_that_trains_while_it_is_loaded_as_a_task_is_refused(tmp_path: Path, call: str) -> None:
    """Its processes would load it, train, start processes that load it, without an end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(call=call))
    with pytest.raises(atoll.AtollError, match=r"script\.py is loaded as a task, and trains while it is"):
        atoll.simulate(f"{script}:task", rounds=1, progress=False)


@pytest.mark.parametrize("settings", [["seed=1"], "seed=1", 3])
@pytest.mark.parametrize("call", [atoll.simulate, atoll.train, atoll.compare])
def test_settings_that_are_no_dictionary_are_refused(call, settings) -> None:
    with pytest.raises(atoll.AtollError, match=r"set: got .*; allowed: a dictionary"):
        call(task, set=settings, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["x", 1.5, None, True])
def test_a_version_that_is_no_number_is_refused(tmp_path: Path, version: object) -> None:
    run = atoll.simulate(task, rounds=1, set={"simulation.engine": "sequential"}, out=tmp_path / "run", progress=False)
    with pytest.raises(atoll.AtollError, match=r"version: got .*; allowed: a number"):
        run.model(version)  # type: ignore[arg-type]


def test_a_number_of_rounds_given_twice_is_refused() -> None:
    with pytest.raises(atoll.AtollError, match="rounds: got 1 by its option and 2 by --set"):
        atoll.simulate(task, rounds=1, set={"rounds": 2}, progress=False)


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "out": (lambda: atoll.simulate(task, rounds=1, out=3), "out: got 3; allowed: the path"),
    "empty out": (lambda: atoll.simulate(task, rounds=1, out=""), "out: got ''; allowed: the path"),
    "NUL": (lambda: atoll.train(task, steps=1, out="a\0"), r"out: got 'a\\x00'; allowed: the path"),
    "folder": (lambda: atoll.SimulatedRun(3), "folder: got 3; allowed: the path"),
    "where": (lambda: atoll.connect(3), "where: got 3; allowed: the path"),
    "mesh": (lambda: atoll.train(task, mesh=2), 'mesh: got 2; allowed: a string, such as "dp=2"'),
    "twice": (
        lambda: atoll.simulate(task, set={"local": {"lr": 1}, "local.lr": 2}),
        "local.lr: got 1 and 2; allowed: one",
    ),
    "epochs twice": (lambda: atoll.train(task, epochs=1, set={"train.epochs": 2}), "train.epochs: got 1 and 2 in set"),
    "no table": (lambda: atoll.simulate(task, set=[]), r"set: got \[\]; allowed: a dictionary"),
    "jobs": (lambda: atoll.sweep({"seed": [1]}, task, jobs="2"), "jobs: got '2'; allowed: a whole number"),
    "target": (lambda: atoll.sweep({"seed": [1]}, task, target="x"), "target: got 'x'; allowed: a finite number"),
    "nan": (lambda: atoll.compare(task, target=float("nan")), "target: got nan; allowed: a finite number"),
    "no grid": (lambda: atoll.sweep(None, task), "grid: got None; allowed: the path of a sweep's TOML"),
    "generator": (lambda: atoll.sweep({"seed": iter([1])}, task), "grid: seed: got <list_iterator.*; allowed: numbers"),
    "option": (lambda: atoll.compare(task, names=["a"]), "compare: got names; allowed for a task: rounds, clients"),
    "no runs": (lambda: atoll.compare("/nope", "/nope"), "compare: got /nope; allowed: simulated and deployed runs"),
    "no run": (lambda: atoll.SimulatedRun("/nope").model(), "/nope: has no rounds.jsonl"),
    "no training": (lambda: atoll.Training("/nope").evaluations, "/nope: has no log.jsonl"),
    "version": (lambda: atoll.Training("/nope").model([]), r"version: got \[\]; available: none"),
}


@pytest.mark.parametrize("call", ODD)
def test_an_odd_argument_is_refused_with_its_value_and_what_is_allowed(call: str) -> None:
    odd, message = ODD[call]
    with pytest.raises(atoll.AtollError, match=message):
        odd()


def test_a_folder_without_a_run_is_shown_all_the_same() -> None:
    assert repr(atoll.SimulatedRun("/nope")) == "SimulatedRun(no run, '/nope')"
    assert "has no rounds.jsonl" in atoll.SimulatedRun("/nope")._repr_html_()
    assert "has no log.jsonl" in atoll.Training("/nope")._repr_html_()


@pytest.mark.parametrize(
    "call",
    [
        lambda: atoll.sweep({"local.lr": [0.1, -1.0]}, task=TASK),
        lambda: atoll.compare(TASK, set={"local.lr": -1.0}),
        lambda: atoll.train(TASK, set={"local.lr": -1.0}),
        lambda: atoll.simulate(TASK, set={"local.lr": -1.0}),
    ],
)
def test_a_refused_call_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(atoll.AtollError, match=r"local\.lr"):
        call()
    gc.collect()  # a training's folder goes with the object, which the traceback held
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("atoll-tasks-")] == []
