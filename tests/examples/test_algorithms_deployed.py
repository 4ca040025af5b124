"""Algorithms and server optimizers of one's own in real processes: the digests of a simulation, whatever is killed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.federation.processes import ATOLL, federation

HERE = Path(__file__).resolve().parents[2] / "examples" / "algorithms"
TASKS = str(Path(__file__).with_name("algorithms_task.py"))
SITES = ("site-0", "site-1", "site-2")
ROUNDS = 4
SETTINGS = {"round.min_available": 3, "round.deadline": 600.0, "round.cohort_size": 2, "evaluation.clients_every": 2}
OF_ONE = {
    "feddyn": {
        "optimizer.name": f"{HERE}/feddyn.py:FedDyn",
        "optimizer.options.alpha": 0.1,
        "optimizer.options.num_clients": 3,
        "aggregation.weighting": "uniform",
    },
    "fedexp": {"optimizer.name": f"{HERE}/fedexp.py:FedExP"},
    "fedcm": {},
    "ditto": {},
    "pfedme": {"optimizer.lr": 0.9},
    "moon": {},
    "mime": {},
    "ifca": {"aggregation.partial": True, "round.cohort_size": 3},
}


def simulated(folder, name, settings):
    """The digest of the last version, and the clients' values, of a simulation."""
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [ATOLL, "simulate", f"{TASKS}:{name}", "--out", folder, "--engine", "sequential", "--json"]
    command += ["--set", "name=trouble", "--rounds", str(ROUNDS), *sets]
    return json.loads(subprocess.check_output(command, text=True))["model_digest"]


def deployed(it, settings, *, disturb=lambda it: None, **coordinator):
    it.coordinator(rounds=ROUNDS, **settings, **coordinator)
    for site in SITES:
        it.agent(site, threads=1)
    disturb(it)
    it.wait_for(lambda: has_committed(it, ROUNDS))
    it.wait_for(lambda: str(it.history().run("trouble-1").state) == "finished")
    return it.history().versions("trouble-1")[-1].digest


def has_committed(it, version):
    return f"committed as version {version}" in it.log("coordinator")


def kill_two(it):
    """The coordinator and an agent, in the third round or so."""
    it.wait_for(lambda: has_committed(it, 2))
    it.kill("coordinator")
    it.kill("site-1")
    it.start("coordinator", "coordinator", "--state", it.state, "--set", f"coordinator.listen={it.address}")
    it.agent("site-1", threads=1)


@pytest.mark.long
@pytest.mark.slow
def test_feddyn_goes_on_after_kills_with_the_bits_of_a_simulation(tmp_path):
    """The state at each client, and the server's, are those of the rounds that counted."""
    settings = SETTINGS | OF_ONE["feddyn"]
    expected = simulated(tmp_path / "out", "feddyn", settings)
    with federation(tmp_path, task=f"{TASKS}:feddyn") as it:
        assert deployed(it, settings, disturb=kill_two) == expected


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OF_ONE if name != "feddyn"])
def test_an_example_has_the_same_digest_deployed_and_simulated(tmp_path, name):
    settings = SETTINGS | OF_ONE[name]
    expected = simulated(tmp_path / "out", name, settings)
    with federation(tmp_path, task=f"{TASKS}:{name}") as it:
        assert deployed(it, settings) == expected


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["feddyn", "fedexp"])
def test_a_server_optimizer_has_the_same_digest_on_two_ranks(tmp_path, name):
    settings = SETTINGS | OF_ONE[name]
    expected = simulated(tmp_path / "out", name, settings)
    with federation(tmp_path, task=f"{TASKS}:{name}") as it:
        assert deployed(it, settings, coordinator__aggregators=2) == expected


@pytest.mark.slow
def test_a_client_that_has_lost_its_state_says_so_where_the_algorithm_needs_it(tmp_path):
    settings = SETTINGS | OF_ONE["feddyn"] | {"round.cohort_size": 3, "round.quorum": 2, "round.deadline": 20.0}
    with federation(tmp_path, task=f"{TASKS}:feddyn") as it:
        it.coordinator(rounds=50, **settings)
        for site in SITES:
            it.agent(site, threads=1)
        it.wait_for(lambda: has_committed(it, 2))
        it.kill("site-1")
        shutil.rmtree(tmp_path / "site-1" / "personal")
        it.agent("site-1", threads=1)
        it.wait_for(lambda: "is no longer in this agent's state directory (personal/)" in it.log("coordinator"))
