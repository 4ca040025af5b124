"""Nothing that a test or a benchmark has started outlives it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process_table import is_running
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[1]

TEST = """
import subprocess, sys, time
from pathlib import Path

CHILD = '''
import subprocess, sys
from pathlib import Path
grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path("pids").write_text(f"{sys.argv[1]} {grandchild.pid} ")
grandchild.wait()
'''

def test_that_never_ends():
    child = subprocess.Popen([sys.executable, "-c", "import os, sys; exec(sys.argv[2])", "0", CHILD])
    for _ in range(1000):
        if Path("pids").exists() and len(Path("pids").read_text().split()) == 2:
            Path("pids").write_text(f"{child.pid} {Path('pids').read_text().split()[1]} all")
            break
        time.sleep(0.05)
    time.sleep(600)
"""


def pids_in(file: Path, seconds: float = BOUND_S) -> list[int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if file.exists() and file.read_text().endswith("all"):
            return [int(pid) for pid in file.read_text().split()[:2]]
        time.sleep(0.05)
    raise AssertionError("nothing was started")


def gone(pids: list[int], seconds: float = BOUND_S) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_killed_pytest_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_endless.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text("from benchmarks import reaper\nreaper.watch()\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_endless.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as run:
        pids = pids_in(tmp_path / "pids")
        assert all(is_running(pid) for pid in pids)
        run.send_signal(number)
    assert gone(pids), f"still running: {[pid for pid in pids if is_running(pid)]}"


def test_a_killed_benchmark_leaves_no_process_behind(tmp_path: Path) -> None:
    code = "import benchmarks, sys, time; sys.argv[0] = 'x'\n" + TEST + "\ntest_that_never_ends()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("ATOLL_STARTED_BY", None)
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment) as run:
        pids = pids_in(tmp_path / "pids")
        run.kill()
    assert gone(pids), f"still running: {[pid for pid in pids if is_running(pid)]}"


def test_every_process_of_these_tests_is_watched() -> None:
    """The suite's own conftest has marked this process."""
    assert f"{os.getpid()}." in os.environ["ATOLL_STARTED_BY"]
