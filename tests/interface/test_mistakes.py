"""Mistaken calls of the Python interface: each raises `AtollError` with a sentence, before anything runs."""

from pathlib import Path

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
