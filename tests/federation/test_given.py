"""The values that a run gives to its task, and a site's own, in deployed runs beside simulated ones."""

import json
from pathlib import Path

import pytest

from tests.cli.invoking import ran, shown
from tests.federation.processes import federation
from tests.simulations.federation import scheduled_task
from tests.simulations.federation.simulating import simulate
from tests.waiting import BOUND_S

TASK = str(Path(scheduled_task.__file__)) + ":task"
SCALES = {site: 1.0 + number / 4 for number, site in enumerate(scheduled_task.SITES)}
RUN = """
name = "given"
seed = 4
rounds = 12

[task]
reference = {task}
smoothing = 0.4

[round]
cohort_size = 4
min_available = 4
deadline = 600.0

[schedule.local]
lr = {{kind = "cosine", end = 0.01, warmup = 2}}
batch_size = {{kind = "list", values = [4, 8], rounds_from = [1, 5]}}

[schedule.optimizer]
lr = {{kind = "step", factor = 0.5, every = 4}}
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(task=json.dumps(TASK)))
    return path


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_with_schedules_options_and_settings_as_a_simulation(tmp_path, run_file):
    sites = "".join(f"\n[sites.{site}]\nscale = {scale}\n" for site, scale in SCALES.items())
    simulated_file = tmp_path / "simulated.toml"
    simulated_file.write_text(run_file.read_text() + sites)
    simulated = shown("simulate", simulated_file, "--out", tmp_path / "out", "--engine", "sequential")
    with federation(tmp_path, task=TASK) as it:
        start = ("--state", it.state, "--set", f"coordinator.listen={it.address}")
        it.start("coordinator", "coordinator", run_file, *start, "--set", "coordinator.enrol=127.0.0.1:0")
        for site, scale in SCALES.items():
            it.agent(site, threads=1, **{"task.scale": scale})
        it.wait_for(lambda: "committed as version 3\n" in it.log("coordinator"))
        it.kill("coordinator")
        it.start("coordinator", "coordinator", *start)
        it.wait_for(lambda: str(it.history().run("given-1").state) == "finished")
        versions = it.show("model", "list", "--run", "given-1")
    assert versions[-1]["digest"] == simulated["model_digest"]
    plain, _ = simulate(tmp_path / "plain", "rounds=12", "seed=4", "round.cohort_size=4", task=TASK)
    assert plain["model_digest"] != simulated["model_digest"]


@pytest.mark.slow
def test_a_resume_changes_the_course_and_the_record_says_from_which_round_on(tmp_path, run_file):
    """What does not fit is refused, and the run stays as it was."""
    with federation(tmp_path, task=TASK) as it:
        start = ("--state", it.state, "--set", f"coordinator.listen={it.address}")
        it.start("coordinator", "coordinator", run_file, *start, "--set", "coordinator.enrol=127.0.0.1:0", "--stay")
        for site in scheduled_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "committed as version 12\n" in it.log("coordinator"))
        it.wait_for(lambda: str(it.history().run("given-1").state) == "finished")
        resume = ("run", "resume", "given-1", "--state", it.state, "--rounds", "14")
        for wrong, sentence in (
            ("task.smoothin=0.1", "task.smoothin: unknown key"),
            ("task.width=5", "task.width"),
            ('schedule.local.lr={kind = "linear", end = -1.0}', "local.lr: must be positive and finite"),
        ):
            assert sentence in ran(*resume, "--set", wrong, code=2).stderr
        other = ("--set", "task.smoothing=0.2", "--set", "schedule.local.lr.end=0.1")
        done = ran(*resume, *other)
        assert "schedule.local.lr ends in round 14 now and did so in round 12 until here" in done.stdout
        it.wait_for(lambda: "committed as version 14\n" in it.log("coordinator"))
        it.wait_for(lambda: str(it.history().run("given-1").state) == "finished")
        run = it.show("run", "show", "given-1")
    assert run["version"] == 14
    [change] = run["changes"]
    assert change["round"] == 13
    assert change["values"]["task.smoothing"] == {"before": 0.4, "after": 0.2}
    assert change["values"]["schedule.local.lr.end"] == {"before": 0.01, "after": 0.1}


@pytest.mark.slow
def test_a_setting_that_no_task_declares_ends_the_agent_with_its_name(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(round__cohort_size=4)
        agent = it.agent("a", **{"task.scal": 2.0})
        assert agent.wait(BOUND_S) == 2
        assert "task.scal: unknown key (known, from the settings of" in it.log("a")
