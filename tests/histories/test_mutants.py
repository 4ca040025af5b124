"""The simulator finds planted bugs: a few here, in seconds; all of them by `make mutants`."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants import (
    PLANTED,
    ROOT,
    Outcome,
    find,
    generated,
    on_the_page,
    outcome_of,
    planted,
    report,
    run_in,
    tree_with,
)
from tests.turns import in_turn
from tests.waiting import BOUND_S

QUICK = (
    "quorum ignored at the deadline",
    "overdue only on a tick",
    "retry counts twice",
    "a client counts twice",
    "aggregation forgotten in a crash",
    "a lease from the release",
    "accept with a missing part",
    "partial uploads counted by part",
)


def test_the_code_of_every_planted_bug_occurs_once() -> None:
    for mutant in (*PLANTED, *generated()):
        source = (ROOT / mutant.file).read_text()
        assert planted(mutant, source) != source, mutant.name
    assert len({mutant.name for mutant in PLANTED}) == len(PLANTED) >= 25


def test_a_page_has_what_its_rows_say() -> None:
    bugs = [PLANTED[0], PLANTED[1], *generated()[:2]]
    caught = ["histories, seed=3", "", "tests/a.py::test_b[x|y]", "histories, no end within 300 s"]
    page = report([Outcome(bug, by, 1.0) for bug, by in zip(bugs, caught, strict=True)])
    assert on_the_page(page) == {bug.name: by for bug, by in zip(bugs, caught, strict=True)}


def test_a_bug_whose_code_has_changed_is_reported() -> None:
    with pytest.raises(ValueError, match=r"its code occurs 0 times in server/rounds/cohort_round\.py"):
        planted(PLANTED[0], "")


@pytest.mark.real
@pytest.mark.parametrize("names", [in_turn(QUICK[half::2], number=half, days=2, id=f"half {half}") for half in (0, 1)])
def test_histories_find_planted_bugs_within_a_hundred_seeds(names: Sequence[str]) -> None:
    """Eight of those that `make mutants` plants, in two days; run it for the others."""
    with ThreadPoolExecutor(2) as pool:
        caught = list(pool.map(lambda name: outcome_of(find(name), seeds=100, unit=False)[0], names))
    assert [name for name, by in zip(names, caught, strict=True) if not by.startswith("histories, seed=")] == []


@pytest.mark.real
def test_the_tree_without_a_bug_is_good_and_is_the_copy(tmp_path: Path) -> None:
    tree = tree_with(None, tmp_path)
    where = run_in(
        tree,
        [sys.executable, "-c", "import atoll.server.rounds.run_machine as r; print(r.__file__)"],
        timeout=BOUND_S,
    )
    assert where.stdout.strip() == str(tree / "atoll" / "server" / "rounds" / "run_machine.py")
    assert outcome_of(None, seeds=20, unit=False) == ("", "")


@pytest.mark.real
def test_a_command_that_does_not_end_counts_as_failed(tmp_path: Path) -> None:
    result = run_in(tmp_path, [sys.executable, "-c", "while True: pass"], timeout=0.5)
    assert result.returncode == 124
