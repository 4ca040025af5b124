"""A rule and a sampler of an installed package, by their names, in deployed and simulated runs of real processes."""

import json
import os
import subprocess

import pytest

from tests.federation.processes import ATOLL, ended_after, federation
from tests.federation.test_ranks import SITES, Ranked
from tests.protocol.packages import RULE, SAMPLER, install
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

SETTINGS = {"name": "trouble", "rounds": 4, "seed": 5, "round.cohort_size": 2, "round.min_available": 4}
BY_NAME = {"aggregation.rule": "loudest", "cohort.sampler": "last"}
POINTS = {
    "atoll.rules": {"loudest": "acme_rules:loudest", "quiet": "acme_rules:quiet", "median": "acme_rules:loudest"},
    "atoll.samplers": {"last": "acme_rules:last"},
    "atoll.populations": {"in_turn": "acme_rules:in_turn"},
    "atoll.devices": {"slow": "acme_rules:slow"},
}
SIMULATED = """
def in_turn(examples, clients, rng):
    return [place % clients for place in range(len(examples))]


def slow(client, rng, least=0.0):
    return {"seconds_per_round": least + rng.random()}
"""


@pytest.fixture
def package(tmp_path):
    """The folder of an installed package."""
    return install(tmp_path / "site", "acme-rules", modules={"acme_rules": RULE + SAMPLER + SIMULATED}, points=POINTS)


def atoll(folder, *arguments, code=0):
    """The output of a command with a folder of packages on its path; a refusal is a line each."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [ATOLL, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else [line for line in done.stderr.splitlines() if line.startswith("atoll: ")]


def simulated(folder, out, given, code=0):
    overrides = [part for key, value in (SETTINGS | given).items() for part in ("--set", f"{key}={value}")]
    answer = atoll(folder, "simulate", TASK, "--engine", "sequential", "--out", out, "--json", *overrides, code=code)
    return json.loads(answer)["model_digest"] if code == 0 else answer


@pytest.mark.slow
def test_a_simulation_ends_with_the_bits_of_the_same_code_in_a_file(tmp_path, package):
    by_file = {key: f"{package}/acme_rules.py:{name}" for key, name in BY_NAME.items()}
    found = {
        "name": simulated(package, tmp_path / "a", BY_NAME),
        "file": simulated(tmp_path, tmp_path / "b", by_file),
        "module": simulated(package, tmp_path / "c", {key: f"acme_rules:{name}" for key, name in BY_NAME.items()}),
        "mean": simulated(package, tmp_path / "d", {"cohort.sampler": "last"}),
    }
    assert found["name"] == found["file"] == found["module"] != found["mean"]
    faults = simulated(package, tmp_path / "e", {"aggregation.rule": "quiet", "cohort.sampler": "lst"}, code=2)
    assert len(faults) == 1
    assert '| "last" (acme-rules 1.2) |' in faults[0]
    (fault,) = simulated(package, tmp_path / "f", {"aggregation.rule": "quiet"}, code=2)
    assert "quiet of the package acme-rules 1.2 is of the type int; allowed: an object with a method `reduce`" in fault
    (fault,) = simulated(package, tmp_path / "g", {"aggregation.rule": "median"}, code=2)
    assert "it is a built-in rule, and the package acme-rules 1.2 declares one of the same name" in fault
    assert not [name for name in "efg" if (tmp_path / name / "state.json").exists()], "nothing was begun"


@pytest.mark.slow
def test_a_coordinator_goes_on_with_the_names_and_refuses_to_without_the_package(tmp_path, package):
    """The versions have the bits of the simulation."""
    with federation(tmp_path, task=TASK) as it:
        start = ("--state", it.state, "--set", f"coordinator.listen={it.address}")
        start = (*start, "--set", "coordinator.enrol=127.0.0.1:0")
        (fault,) = atoll(
            package, "coordinator", TASK, *start, *("--set", "aggregation.rule=quiet", "--set", "rounds=1"), code=2
        )
        assert "acme-rules 1.2 is of the type int" in fault
        assert not list((it.state / "runs").glob("*")), "no run was made"
        it.coordinator(environment={"PYTHONPATH": str(package)}.items(), **(SETTINGS | BY_NAME))
        for site in line_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "committed as version 2\n" in it.log("coordinator"))
        it.kill("coordinator")
        faults = atoll(tmp_path, "coordinator", *start, code=2)
        assert [fault.partition(": allowed")[0] for fault in faults] == [
            "atoll: run trouble-1: aggregation.rule: got 'loudest'",
            "atoll: run trouble-1: cohort.sampler: got 'last'",
        ]
        it.start("coordinator", "coordinator", *start, PYTHONPATH=str(package))
        it.wait_for(lambda: str(it.history().run("trouble-1").state) == "finished")
        (shown,) = [row for row in it.show("run", "list") if row["run"] == "trouble-1"]
        assert it.show("run", "show", "trouble-1")["settings"]["aggregation"]["rule"] == "loudest"
        digest = str(it.history().versions("trouble-1")[-1].digest)
        it.kill("coordinator")
        assert shown["version"] == 4
        it.start("coordinator", "coordinator", *start)  # a run that has ended hinders nothing
        it.wait_for(lambda: it.log("coordinator").count("atoll coordinator on ") == 3)
    assert digest == simulated(package, tmp_path / "simulated", BY_NAME)


@pytest.mark.slow
def test_a_rank_without_the_package_is_named_in_the_record_of_the_round(tmp_path, package):
    here = {"PYTHONPATH": str(package)}
    with ended_after(Ranked(tmp_path)) as it:
        it.host(rounds=1, environment=here.items(), aggregation__rule="loudest", round__retry=1)
        it.rank(0, **here)
        it.rank(1)
        for site in SITES:
            it.agent(site)
        record, *_ = it.wait_for(lambda: [each for each in it.rounds() if each.abandon_reason] or None, every=0.1)
        assert record.abandon_reason == "aggregation_failed"
        assert "rank 1: ConfigError: aggregation.rule: got 'loudest': allowed: " in record.detail
        assert "once the package is installed on this machine" in record.detail


@pytest.mark.slow
def test_a_simulation_has_the_population_and_the_devices_of_a_package(tmp_path, package):
    given = {"population.kind": "in_turn", "population.clients": 6, "devices.model": "slow"}
    given |= {"devices.options.least": 100.0, "rounds": 1}
    by_file = {"population.kind": f"{package}/acme_rules.py:in_turn", "devices.model": f"{package}/acme_rules.py:slow"}
    digest = simulated(package, tmp_path / "a", given)
    assert digest == simulated(tmp_path, tmp_path / "b", given | by_file)
    (line,) = (tmp_path / "a" / "rounds.jsonl").read_text().splitlines()
    assert 100 < json.loads(line)["virtual_s"] < 102
    assert json.loads((tmp_path / "a" / "population.json").read_text())["num_clients"] == 6


def test_the_list_of_a_real_package(tmp_path, package):
    found = json.loads(atoll(package, "plugins", "--json"))
    assert {(each["kind"], each["name"]): bool(each["fault"]) for each in found} == {
        ("device model", "slow"): False,
        ("population", "in_turn"): False,
        ("rule", "loudest"): False,
        ("rule", "median"): True,
        ("rule", "quiet"): True,
        ("sampler", "last"): False,
    }
    text = atoll(package, "plugins")
    assert ["rule", "loudest", "acme-rules", "1.2", "acme_rules:loudest"] in [
        line.split() for line in text.splitlines()
    ]
    assert "\ncannot be used: rule quiet of acme-rules 1.2: " in text
    assert atoll(tmp_path, "plugins") == ""
