"""The interface in the kernel of a notebook: a loop runs, the task is of a cell, nothing is shown but a bar."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.pages.notebooks import run

ROOT = Path(__file__).parents[2]

TASK = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import asyncio, signal
import atoll
from tests.simulations.federation import line_task
task = atoll.Task(model=line_task.model, data=line_task.data, loss=lambda o, t: line_task.task.loss(o, t),
                  sites=line_task.SITES, test_data=line_task.task.test_data)
settings = {{"round.cohort_size": 4, "simulation.engine": "sequential"}}
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
"""
CELLS = {
    "task": TASK,
    "bar": "run = atoll.simulate(task, rounds=3, set=settings)",
    "quiet": "atoll.simulate(task, rounds=3, set=settings, progress=False).digest == run.digest",
    "batched": 'atoll.simulate(task, rounds=2, set={**settings, "simulation.engine": "batched"}).result["engine"]',
    "train": "training = atoll.train(task, epochs=1)",
    "sweep": "sweep = atoll.sweep({'seed': [1, 2]}, task, set={**settings, 'rounds': 1}); len(sweep)",
    "compare": "atoll.compare(run, training)",
    "table": "run",
    "refused": "atoll.simulate(task, rounds=2, set={'simulation.engine': 'processes'})",
    "failed": "atoll.simulate(task, set={'round.cohort_sise': 3, 'seed': -1})",
    "loop": "asyncio.get_running_loop().is_running(), "
    "handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each cell, of one kernel."""
    cells = [new_code_cell(text, metadata={"tags": ["raises-exception"]}) for text in CELLS.values()]
    notebook = new_notebook(cells=cells)
    done = run(nbformat.from_dict(notebook), tmp_path_factory.mktemp("cells"))
    return {name: cell.outputs for name, cell in zip(CELLS, done.cells, strict=True)}


def text_of(outputs: list[Any]) -> str:
    [result] = outputs
    return str(result.data["text/plain"])


@pytest.mark.parametrize("name", ["bar", "train"])
def test_a_bar_is_shown_and_disappears_and_nothing_else_is_printed(outputs: dict[str, list[Any]], name: str) -> None:
    [bar] = outputs[name]
    assert bar.output_type == "display_data"
    assert bar.data == {"text/plain": ""}


def test_without_a_bar_nothing_is_shown(outputs: dict[str, list[Any]]) -> None:
    assert outputs["task"] == []
    assert text_of(outputs["quiet"]) == "True"


def test_a_task_of_a_cell_trains_in_this_process(outputs: dict[str, list[Any]]) -> None:
    bar, engine = outputs["batched"]
    assert bar.data == {"text/plain": ""}
    assert "batched" in engine.data["text/plain"]
    _, number = outputs["sweep"]
    assert number.data["text/plain"] == "2"


@pytest.mark.parametrize("name", ["table", "compare"])
def test_results_are_shown_as_tables(outputs: dict[str, list[Any]], name: str) -> None:
    [shown] = outputs[name]
    assert "<table>" in shown.data["text/html"]


def test_what_is_refused_is_shown_as_the_sentences_of_the_command(outputs: dict[str, list[Any]]) -> None:
    [refused] = outputs["refused"]
    [line] = refused.traceback
    assert line.startswith("AtollError: simulation.engine = 'processes'")
    assert line.endswith(
        "other processes cannot import a task of a cell or of standard input: put it into a file, or leave these out"
    )
    [failed] = outputs["failed"]
    assert len(failed.traceback) == 2
    assert all(line.startswith("AtollError: --set: ") for line in failed.traceback)


def test_the_loop_and_the_handlers_of_signals_stay_as_they_are(outputs: dict[str, list[Any]]) -> None:
    assert text_of(outputs["loop"]) == "(True, True)"
