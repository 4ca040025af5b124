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
import logging, os, pytest, sys
from pathlib import Path

logging.getLogger("of a library").addHandler(logging.StreamHandler(sys.stdout))

@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    place = Path(os.environ["PLACE"]) / str(os.getpid())
    place.write_text("open")
    yield str(tmp_path_factory.getbasetemp())
    place.write_text("closed")
"""
ONE = """
import logging, os

def test_a(opened):
    print("what a prints")
    assert "worker-" in opened

def test_b():
    os._exit(7)

def test_c(opened, tmp_path):
    print("what c", "prints")
    logging.getLogger("of a library").warning("what c logs")
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
    assert "what c logs" in told
    assert "Logging error" not in told
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


MEETING = """
import os, time
from pathlib import Path

def test_meets_those_of_the_other_kind():
    place, until = Path(os.environ["PLACE"]), time.monotonic() + 150
    (place / __name__).write_text(str(os.getpid()))
    while len([*place.glob("test_OTHER_*")]) < NUMBER:
        assert time.monotonic() < until
        time.sleep(0.05)
"""
OF_RANKS = MEETING.replace("OTHER", "another").replace("NUMBER", "4")
OTHERS = MEETING.replace("OTHER", "ranks").replace("NUMBER", "6")


def test_files_whose_tests_call_ranks_go_to_two_workers(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "parallel"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text("")
    for number in range(6):
        (folder / f"test_ranks_{number}.py").write_text(OF_RANKS)
    for number in range(10):  # a worker takes its next file before the last test of the one before
        (tmp_path / f"test_another_{number}.py").write_text(OTHERS)
    code, told = run(tmp_path, "--workers", "6", "--ignore", "test_one.py", "--ignore", "test_other.py")
    assert code == 0, told
    processes = {path.name: path.read_text() for path in (tmp_path / "place").glob("test_*")}
    assert len(processes) == 16
    assert len({pid for name, pid in processes.items() if "ranks" in name}) <= 2
    assert len({pid for name, pid in processes.items() if "another" in name}) >= 4
