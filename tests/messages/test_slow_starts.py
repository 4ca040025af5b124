"""A hosted Flower run, killed (-9) at each exchange: coordinator, program and agents, which then take long to start."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from atoll.server.journal.holder import running_coordinator
from tests.federation.processes import ATOLL
from tests.waiting import BOUND_S

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")
pytestmark = pytest.mark.real

APP = Path(__file__).with_name("apps") / "slow_start"


def started(out, seconds, *settings):
    """Start the run, or go on with it, with agents that take these seconds to start."""
    command = [ATOLL, "flower", "run", APP, "--nodes", "2", "--out", out]
    command += [part for text in settings for part in ("--set", text)]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        environment = {**os.environ, "SLOW_START": str(seconds)}
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=environment)


def log_of(out):
    return (out.parent / f"{out.name}.log").read_text(errors="replace")


def killed_at(out, run, number, seconds):
    """Kill the agents and the coordinator once an exchange is under way; the command then ends."""
    until = time.monotonic() + seconds + BOUND_S
    while not re.search(rf"exchange {number}: .* sent", log_of(out)):
        assert run.poll() is None, log_of(out)[-3000:]
        assert time.monotonic() < until, log_of(out)[-3000:]
        time.sleep(0.05)
    coordinator = running_coordinator(out / "coordinator").pid
    children = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
    for pid in (*(child for child in children if child != coordinator), coordinator):
        os.kill(pid, signal.SIGKILL)
    assert run.wait(BOUND_S) == 1, log_of(out)[-3000:]


def result_of(out):
    (run,) = (out / "coordinator" / "runs").iterdir()
    return json.loads((run / "program" / "result.json").read_text())


def ended(out, run, seconds):
    assert run.wait(seconds + BOUND_S) == 0, log_of(out)[-3000:]
    return result_of(out)


def check_killed_at_each_exchange(folder, rounds, seconds, *settings):
    """Compare a run that dies at each of its exchanges with one that lives."""
    settings = (f"task.rounds={rounds}", *settings)
    whole = ended(folder / "whole", started(folder / "whole", 0.0, *settings), seconds)
    out = folder / "killed"
    run = started(out, 0.0, *settings)
    for number in range(1, rounds + 1):
        killed_at(out, run, number, seconds)
        run = started(out, seconds, *settings)
    found = ended(out, run, seconds)
    assert found["model"] == whole["model"], "bit for bit"
    assert found["run_id"] != whole["run_id"], "each run has an id of its own"
    for one in (found, whole):
        assert len(one["told"]) == rounds
        for number, replies in enumerate(one["told"], start=1):
            assert [told["calls"] for told in replies] == [number, number], "no message is lost, none counts twice"
            assert {(told["run_id"], told["run_of_message"]) for told in replies} == {(one["run_id"],) * 2}
            assert len({told["created"] for told in replies}) == 1, "the instant of the exchange, whoever died since"
    instants = [replies[0]["created"] for replies in found["told"]]
    assert instants == sorted(instants)
    assert instants[0] > 1.7e9
    asked = [[told["asked"] for told in replies] for replies in found["told"]]
    assert asked == [[told["asked"] for told in replies] for replies in whole["told"]]


def test_a_run_killed_at_each_exchange_is_the_undisturbed_one(tmp_path):
    """Agents that need longer than a lease, and than a message may take."""
    check_killed_at_each_exchange(tmp_path, 2, 12.0, "coordinator.lease=5.0", "task.timeout=10.0")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_killed_at_each_exchange_is_the_undisturbed_one_after_a_minute_of_imports(tmp_path):
    check_killed_at_each_exchange(tmp_path, 3, 60.0, "task.timeout=45.0")
