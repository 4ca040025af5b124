"""A stock Flower app in a real federation: killed coordinator and agent, durable state, other interpreters."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest

from atoll.server.journal.holder import running_coordinator
from tests.federation.processes import ATOLL, Federation, ended_after
from tests.waiting import BOUND_S

APPS = Path(__file__).parents[2] / "flower" / "apps"
EXAMPLES = Path(__file__).parents[3] / "examples" / "flower"


AT_THE_END = """
from own_code_app import server_app, started

@server_app
def plain(grid, context):
    started(grid)
    raise RuntimeError("no space for plots")
"""


class OfAnApp(Federation):
    """A coordinator and three agents of the app, each of which has its partition."""

    def coordinator(self, **settings):
        given = {
            "name": "trouble",
            "round.cohort_size": 3,
            "round.min_available": 3,
            "coordinator.enrol": "127.0.0.1:0",
        }
        given |= {"coordinator.listen": self.address, **settings}
        overrides = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        return self.start("coordinator", "coordinator", self.task, "--state", self.state, *overrides)

    def agents(self, number, **settings):
        for place in range(number):
            partition = {"task.partition-id": place, "task.num-partitions": number}
            self.agent(f"node-{place}", **partition, **settings)


@pytest.mark.real
def test_a_killed_coordinator_and_agent_lose_nothing_of_an_app(tmp_path):
    """Three clients, six rounds: the state counts each training that counted once, and main() ends after a kill."""
    out = tmp_path / "final.npz"
    with ended_after(OfAnApp(tmp_path, task=str(APPS / "every_strategy"))) as it:
        settings = {"program.native": "true", "task.out": f'"{out}"', "round.quorum": 3, "rounds": 5}
        it.coordinator(**settings)
        it.wait_for(lambda: (it.state / "coordinator.json").exists())
        it.agents(3)
        it.wait_for(lambda: len(it.rounds()) > 2)
        it.kill("coordinator")
        it.kill("node-1")
        it.coordinator(**settings)
        it.agent("node-1", **{"task.partition-id": 1, "task.num-partitions": 3})
        assert it.wait_for_end() == 0
        training = it.history().site_evaluations("trouble-1")
        calls = [(row.version, row.values["calls"]) for row in training if row.source == "training:node-1"]
        assert calls == [(version, version + 1.0) for version in range(5)]
        assert sorted(np.load(out)) == ["a.scale", "b", "w"]
        assert (it.state / "runs" / "trouble-1" / "app.concluded").exists()
        measured = it.history().evaluations("trouble-1")
        assert [row.version for row in measured if row.source == "server"] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_an_app_runs_in_the_sites_own_environment_without_torch(tmp_path):
    """The worker of an agent with another flwr and without torch: neither is imported from the agent's environment."""
    site = tmp_path / "site"
    venv.create(site, with_pip=True)
    python = site / "bin" / "python"
    packages = ["numpy", "safetensors", "flwr==1.41.0"]
    subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    with ended_after(OfAnApp(tmp_path, task=str(APPS / "every_strategy"))) as it:
        it.coordinator(**{"program.native": "true", "rounds": 2})
        it.wait_for(lambda: (it.state / "coordinator.json").exists())
        it.agents(3, python=f'"{python}"')
        assert it.wait_for_end() == 0
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 1


@pytest.mark.real
@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("nowhere/python", "there is no file nowhere/python"),
        ("README.md", "is not executable"),
        (sys.executable.replace("python", "pip"), "is not a Python interpreter"),
    ],
)
def test_an_interpreter_is_checked_before_the_agent_dials(tmp_path, python, told):
    task = str(APPS / "every_strategy")
    command = [ATOLL, "agent", task, "--site", "a", "--insecure", "--set", f'python="{python}"', "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=APPS.parents[2])
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


@pytest.mark.long
def test_the_quickstart_runs_from_its_folder_to_the_end_of_main(tmp_path):
    out = tmp_path / "run"
    command = [
        ATOLL,
        "flower",
        "run",
        EXAMPLES / "quickstart",
        "--nodes",
        "2",
        "--out",
        out,
        "--set",
        "task.num-server-rounds=2",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "coordinator" / "runs" / "quickstart-1" / "program" / "final_model.pt").exists()
    log = (out / "coordinator" / "runs" / "quickstart-1" / "program.log").read_text()
    assert re.search(r"accuracy by round: \{0: 0\.\d+, 1: 0\.\d+, 2: 0\.\d+\}", log)


@pytest.mark.real
@pytest.mark.parametrize(
    ("part", "code", "told"),
    [
        (
            "clientapp",
            "import absent_here",
            "node-0 cannot take part: {app}/pyproject.toml:app: the task cannot be used: ",
        ),
        ("serverapp", AT_THE_END, "the run has finished, and then main() failed: RuntimeError: no space for plots"),
    ],
)
def test_a_run_on_this_machine_tells_the_fault_of_an_app_and_ends(tmp_path, part, code, told):
    app = shutil.copytree(APPS / "own_code", tmp_path / "app")
    module = {"clientapp": "client", "serverapp": "plain"}[part]
    (app / "of_part.py").write_text(code)
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace(f"own_code_app:{module}", f"of_part:{module}"))
    command = [ATOLL, "flower", "run", app, "--native", "--nodes", "2", "--out", tmp_path / "run"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 2
    assert told.format(app=app) in done.stderr.replace("node-1", "node-0"), "either may be the first"
    checked = subprocess.run([ATOLL, "flower", "check", app], capture_output=True, text=True, timeout=BOUND_S)
    assert checked.returncode == (2 if part == "clientapp" else 0)
    assert ("the ClientApp cannot be loaded here" in checked.stderr) == (part == "clientapp")


@pytest.mark.real
def test_a_killed_coordinator_is_told_and_the_same_command_goes_on(tmp_path):
    settings = [
        "--native",
        "--set",
        "rounds=1",
        "--set",
        "round.min_available=2",
    ]  # waits for a second node until the kill
    command = [*map(str, (ATOLL, "flower", "run", APPS / "own_code", "--nodes", "2", "--out", tmp_path, *settings))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        until = time.monotonic() + BOUND_S
        while (coordinator := running_coordinator(tmp_path / "coordinator")) is None:
            assert run.poll() is None, run.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(coordinator.pid, signal.SIGKILL)
        _, told = run.communicate(timeout=BOUND_S)
    assert run.returncode == 1
    assert told.splitlines()[-1] == "atoll: SIGKILL ended the coordinator: the same command resumes the run"
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr
    assert [path.name[-2:] for path in (tmp_path / "coordinator" / "runs").iterdir()] == ["-1"]


@pytest.mark.real
def test_the_same_command_starts_no_second_run_but_by_again(tmp_path):
    settings = ["--native", "--set", "rounds=1", "--set", "round.min_available=1", "--set", "round.cohort_size=1"]
    settings += ["--set", "notify.url=http://127.0.0.1:9/s3cret"]
    command = [ATOLL, "flower", "run", APPS / "own_code", "--nodes", "1", "--out", tmp_path, *settings]
    for again, runs in ((), ["-1"]), ((), ["-1"]), (("--again",), ["-1", "-2"]):
        done = subprocess.run([*map(str, command), *again], capture_output=True, text=True, timeout=BOUND_S)
        assert done.returncode == 0, done.stderr
        found = sorted(path.name for path in (tmp_path / "coordinator" / "runs").iterdir())
        assert [name[-2:] for name in found] == runs, done.stderr
    assert "http://127.0.0.1:9/s3cret" in (tmp_path / "run.toml").read_text(), "its coordinator needs it"
    assert stat.S_IMODE((tmp_path / "run.toml").stat().st_mode) == 0o600
    refused = subprocess.run([*map(str, command), "--simulate", "--again"], capture_output=True, text=True)
    assert (refused.returncode, "--again applies only to a run in processes" in refused.stderr) == (2, True)


@pytest.mark.real
def test_a_run_of_fewer_clients_than_its_strategy_waits_for_is_refused(tmp_path):
    command = [ATOLL, "flower", "run", APPS / "own_code", "--native", "--nodes", "1", "--out", tmp_path / "run"]
    for options in ((), ("--simulate",)):
        done = subprocess.run([*map(str, command), *options], capture_output=True, text=True, timeout=BOUND_S)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] in (
            "atoll: --nodes: got 1; allowed: at least 2, the clients without which no round begins",
            "atoll: round.cohort_size: got 2; allowed: at most 1, the number of clients",
        )


@pytest.mark.real
def test_a_check_tells_what_becomes_of_an_app(tmp_path):
    command = [ATOLL, "flower", "check", APPS / "every_strategy", "--nodes", "7", "--json"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["app"], told["native"], told["strategy"]) == ("flower:tests/every-strategy", True, "FedAvg")
    assert told["settings"]["round"] == {
        "cohort_size": 7,
        "quorum": 1,
        "deadline": 3600.0,
        "failure_rest": 0.0,
        "min_available": 7,
        "selection_timeout": 366 * 86400.0,
    }
    refused = subprocess.run([*map(str, command), "--set", "task.strategy=QFedAvg"], capture_output=True, text=True)
    assert refused.returncode == 2  # it lacks an argument of its own: main() itself fails
    assert "the task cannot be used: TypeError: " in refused.stderr.splitlines()[-1], "in one line"
    none = subprocess.run([*map(str, command), "--set", "task.rounds=0"], capture_output=True, text=True)
    assert json.loads(none.stdout)["reasons"] == ["rounds: got 0; allowed: integer >= 1, <= 2147483648"]


@pytest.mark.real
def test_an_app_with_a_loop_of_its_own_runs_hosted_and_its_state_outlives_a_killed_agent(tmp_path):
    """Mods, a lifespan, a query and a state: each node counts its four trainings, though one was killed after two."""
    app = EXAMPLES / "own_loop"
    with ended_after(OfAnApp(tmp_path, task=str(app))) as it:
        settings = {"name": "loop", "round.cohort_size": 2, "round.quorum": 1, "round.min_available": 2}
        it.coordinator(**settings)
        it.wait_for(lambda: (it.state / "coordinator.json").exists())
        it.agents(2)
        it.wait_for(lambda: "exchange 4: 2 messages (train) closed" in it.log("coordinator"))
        it.kill("node-1")
        it.agent("node-1", **{"task.partition-id": 1, "task.num-partitions": 2})
        assert it.wait_for_end() == 0, it.log("coordinator")
        history = json.loads((it.state / "runs" / "loop-1" / "program" / "history.json").read_text())
    assert [line["calls"] for line in history] == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert history[-1]["accuracy"] > 0.9
    options = ["--simulate", "--nodes", "2", "--set", "name=loop"]
    command = [ATOLL, "flower", "run", app, *options, "--out", tmp_path / "sim"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "18 answers by the sequential engine" in done.stdout
    assert json.loads((tmp_path / "sim" / "program" / "history.json").read_text()) == history, "the same bits"


@pytest.mark.long
def test_an_app_of_the_form_before_main_runs_hosted(tmp_path):
    """A server_fn and a NumPyClient: the old strategy sends from a thread for each client, and hears both each time."""
    command = [ATOLL, "flower", "run", APPS / "legacy", "--nodes", "2", "--out", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = tmp_path / "coordinator" / "runs" / "legacy-1" / "program"
    weighted = 2 / 3  # node-1 adds 1 to each value and has two examples, node-0 adds 0 and has one
    expected = [3 * weighted * number for number in (1, 2, 3)]
    assert json.loads((program / "losses.json").read_text()) == pytest.approx(expected)
    assert "and 1 failures" not in program.with_name("program.log").read_text()
