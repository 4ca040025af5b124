"""Ranks of torch elastic, from a fork server: they restart together, and nothing of them outlives their supervisor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.parallel.launch.launcher import Launcher, elastic, environment_of
from atoll.parallel.launch.spec import Spec
from tests.process_table import descendants, is_running
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[3]


def spec(folder, deed="", **changes):
    fields = {"entry": "tests.parallel.launch.ranks:note", "args": (str(folder), deed), "nproc": 2, "max_restarts": 2}
    return Spec(**{**fields, "folder": str(folder), **changes})


def launched(folder, deed="", **changes):
    command, environment = elastic(spec(folder, deed, **changes))
    with (folder / "log").open("ab") as log:
        return Launcher(command, {**environment, "PYTHONPATH": str(ROOT)}, log=log)


def notes(folder, rank):
    path = folder / f"rank.{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def until(condition):
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_spec_is_one_argument(tmp_path):
    given = spec(tmp_path, "a 'word' {and} \"another\"", preload=("x", "y"), is_bound=True)
    assert Spec.decode(given.encode()) == given


def test_ranks_get_loopback_a_share_of_the_cores_and_what_the_user_has_set_stays():
    found = environment_of(10**6, {"GLOO_SOCKET_IFNAME": "eth7"})
    assert found["OMP_NUM_THREADS"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in found
    assert found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_all_ranks_start_again_when_one_has_failed_and_their_end_is_the_launcher_s(tmp_path):
    assert launched(tmp_path, "fail once").wait(BOUND_S) == 0, (tmp_path / "log").read_text()
    for rank in (0, 1):
        first, second = notes(tmp_path, rank)
        assert first[0] != second[0]
        assert first[1] == second[1] == "3", "the sum over both"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("elastic-")] == []


@pytest.mark.long
def test_more_failures_than_restarts_are_an_exit_code(tmp_path):
    assert launched(tmp_path, "fail", max_restarts=1).wait(BOUND_S) == 1
    assert [len(notes(tmp_path, rank)) for rank in (0, 1)] == [2, 2]


def test_a_killed_rank_is_replaced_and_a_killed_launcher_leaves_no_rank(tmp_path):
    it = launched(tmp_path, "wait", is_bound=True)
    until(lambda: all(len(notes(tmp_path, rank)) == 1 for rank in (0, 1)))
    os.kill(int(notes(tmp_path, 1)[0][0]), signal.SIGKILL)
    until(lambda: all(len(notes(tmp_path, rank)) == 2 for rank in (0, 1)))
    pids = descendants(it.pid)
    assert {int(notes(tmp_path, rank)[1][0]) for rank in (0, 1)} <= set(pids)
    os.kill(it.pid, signal.SIGKILL)
    assert it.wait(BOUND_S) == -signal.SIGKILL
    until(lambda: not any(map(is_running, pids)))


def test_bound_ranks_end_with_their_supervisor(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from tests.parallel.launch.test_launcher import launched;"
        "print(launched(Path(sys.argv[1]), 'wait', is_bound=True).pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as supervisor:
        launcher = int(supervisor.stdout.readline())
        until(lambda: all(notes(tmp_path, rank) for rank in (0, 1)))
        pids = [launcher, *descendants(launcher)]
        supervisor.kill()
    until(lambda: not any(map(is_running, pids)))
