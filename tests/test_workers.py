"""Workers that are forks: every test once, whatever a worker does, with the fixtures of a session for each of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import BOUND_S

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[1]

CONFTEST = """
import os, pytest
from pathlib import Path

@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    place = Path(os.environ["PLACE"]) / str(os.getpid())
    place.write_text("open")
    yield str(tmp_path_factory.getbasetemp())
    place.write_text("closed")
"""
ONE = """
import os

def test_a(opened):
    print("what a prints")
    assert "worker-" in opened

def test_b():
    os._exit(7)

def test_c(opened, tmp_path):
    print("what c", "prints")
    assert not tmp_path

def test_d():
    pass
"""
OTHER = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_e(opened, number):
    print(number)

def test_f():
    pytest.skip("of no use here")
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(ONE)
    (folder / "test_other.py").write_text(OTHER)
    (folder / "place").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "tests.workers", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PLACE": str(folder / "place")}
    done = subprocess.run(
        [*command, str(folder)], env=environment, cwd=folder, capture_output=True, text=True, timeout=BOUND_S
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("number", [1, 3])
def test_a_worker_that_dies_fails_its_test_and_another_runs_the_rest(number: int, tmp_path: Path) -> None:
    code, told = run(tmp_path, "--workers", str(number))
    assert code == 1
    assert "2 failed, 22 passed, 1 skipped" in told
    assert "the process of the tests ended in this one, with exit code 7" in told
    assert told.count("what c prints") == 1
    assert re.search(r"FAILED test_one.py::test_b", told)
    assert re.search(r"PASSED test_one.py::test_d", told)
    states = sorted(path.read_text() for path in (tmp_path / "place").iterdir())
    assert states.count("open") == 1, "the worker that died could not close its session"
    assert states.count("closed") >= 1
    assert re.search(r"^[2-9] workers, the largest with \d+ MB$", told, re.MULTILINE)


def test_the_first_failure_ends_a_run_that_is_told_so(tmp_path: Path) -> None:
    code, told = run(tmp_path, "--workers", "1", "-x")
    assert code == 1
    assert "1 failed" in told
    assert "test_e" not in told
