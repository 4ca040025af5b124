"""The part of the table that is quick: odd tasks trained in this process, and a few on ranks and in processes."""

from pathlib import Path

import pytest

from tests.cli.invoking import invoke
from tests.odd_tasks.cells import Answer, cell
from tests.odd_tasks.table import BY_PASS, TASKS, wrong
from tests.turns import in_turn, table

IN_PROCESSES = ("dp=2", "zero=3", "processes")
ON_RANKS = ("routed_experts", "masked_targets")
MORE_ON_RANKS = (
    *("batch_norm", "spectral_norm", "short_counter", "called_again", "borrowed_weights"),
    *("ragged_rows", "odd_parameters", "gpt2", "mixtral"),
)


def run(*arguments: object) -> Answer:
    result = invoke(*arguments)
    return result.exit_code, result.stderr


def check(name: str, way: str, folder: Path) -> None:
    reference, task = TASKS[name]
    assert wrong(name, way, cell(task, reference, way, folder, run, by_pass=name in BY_PASS)) is None


def test_there_are_as_many_odd_tasks_as_promised() -> None:
    assert len(TASKS) >= 40


QUICK = ("train", "accumulate", "sequential", "batched")


@pytest.mark.parametrize(("name", "way"), table(TASKS, QUICK, days=len(QUICK)))
def test_an_odd_task_is_equal_to_a_plain_loop_or_refused(name: str, way: str, tmp_path: Path) -> None:
    check(name, way, tmp_path)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *table(ON_RANKS, IN_PROCESSES, days=3),
        *(pytest.param(name, way, marks=pytest.mark.long) for name in MORE_ON_RANKS for way in IN_PROCESSES),
    ],
)
def test_an_odd_task_on_ranks_and_in_processes_is_equal_or_refused(name: str, way: str, tmp_path: Path) -> None:
    check(name, way, tmp_path)


@pytest.mark.real
@pytest.mark.parametrize(
    "name",
    [
        *(in_turn(name, number=n, days=3) for n, name in enumerate(("text_targets", "list_targets", "mixtral"))),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "vit")),
    ],
)
def test_odd_targets_and_outputs_go_through_a_pipeline(name: str, tmp_path: Path) -> None:
    check(name, "pp=2", tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("name", ["dict_rows_bare", "ragged_rows_bare"])
def test_a_refusal_of_a_worker_process_is_one_sentence(name: str, tmp_path: Path) -> None:
    check(name, "workers", tmp_path)
