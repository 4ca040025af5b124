"""One bug, planted once in a machine, fails both suites: the pure histories and the suite over real gRPC."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import waiting
from tests.mutants import find, outcome_of, run_in, tree_with

# what the machine gets wrong -> the tests over real gRPC that must notice
POLICY, ROUND = "tests/wire/test_policy.py", "tests/wire/test_round.py"
BUGS = {
    "discount upside down": f"{POLICY}::test_late_update_counts_in_the_next_round_discounted_by_its_staleness",
    "late update accepted": f"{ROUND}::test_late_update_is_refused_with_the_reason",
    "enough is not enough": f"{ROUND}::test_client_is_released_when_enough_others_have_reported",
    "partial work counts in full": f"{POLICY}::test_partial_work_counts_in_full_or_by_its_share",
}


def over_grpc(name: str | None, tmp_path, tests: list[str]):
    """The exit code of these tests in a copy of the tree, with the bug or without one."""
    tree = tree_with(None if name is None else find(name), tmp_path)
    waits_briefly = [] if name is None else ["env", f"{waiting.VARIABLE}=10"]  # a bug may be found by a wait that ends
    return run_in(tree, [*waits_briefly, sys.executable, "-m", "pytest", "-x", "-q", *tests], timeout=900)


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_bug_in_a_machine_fails_the_histories_and_the_suite_over_real_grpc(tmp_path):
    def fails_in_both(name: str) -> tuple[bool, bool]:
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        wire = over_grpc(name, folder, [BUGS[name]])
        caught_by, _ = outcome_of(find(name), seeds=60, unit=False)
        return caught_by.startswith("histories, seed="), wire.returncode == 1 and "1 failed" in wire.stdout

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(BUGS, pool.map(fails_in_both, BUGS), strict=True))
    assert found == dict.fromkeys(BUGS, (True, True))


@pytest.mark.long
def test_without_a_bug_the_same_tests_pass_in_the_copy(tmp_path):
    """It is the control of the test above, and runs with it: without a copy, `make test` runs them in their files."""
    result = over_grpc(None, tmp_path, list(BUGS.values()))
    assert result.returncode == 0, result.stdout
