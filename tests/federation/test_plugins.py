"""A rule, a sampler and a codec of an installed package, by name, in deployed and simulated runs of real processes."""

import json
import os
import subprocess

import pytest

from atoll.tensors.codecs import installed
from tests.cli.invoking import faults_in
from tests.federation.processes import ATOLL, ended_after, federation
from tests.federation.test_ranks import SITES, Ranked, is_finished
from tests.plugins.packages import CODEC, LION, RULE, SAMPLER, install
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
    return done.stdout if code == 0 else [f"atoll: {fault}" for fault in faults_in(done.stderr)]


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


# ------------------------------------------------------------ codecs

CODECS = {
    "atoll.codecs": {"rounded": "acme_codecs:Rounded", "sign": "acme_codecs:Rounded", "worn": "acme_codecs:worn"},
    "atoll.local_optimizers": {"lion": "acme_codecs:Lion"},
}
MORE = """

class Worn(Rounded):
    def decode(self, data, n):
        raise RuntimeError("the table is worn")


worn = Worn()
"""
CODED = {"aggregation.codec": "rounded", "aggregation.codec_options.levels": 3}
STEPPED = {"local.optimizer": "lion", "local.lr": 0.01}


def codecs(folder, version="1.2"):
    return install(folder, "acme-codecs", version=version, modules={"acme_codecs": CODEC + MORE + LION}, points=CODECS)


def saved(it):
    """The bytes that the codec has saved on each accepted update, by client."""
    return {
        client: each.plain_bytes - each.num_bytes
        for record in it.rounds()
        for client, each in record.clients.items()
        if each.num_bytes
    }


@pytest.mark.long
@pytest.mark.slow
def test_a_simulation_with_a_codec_of_a_package(tmp_path):
    folder = codecs(tmp_path / "site")
    found = {
        "own": simulated(folder, tmp_path / "a", CODED),
        "again": simulated(folder, tmp_path / "b", CODED | {"aggregation.codec_options.levels": "3"}),
        "finer": simulated(folder, tmp_path / "c", {"aggregation.codec": "rounded"}),
        "plain": simulated(folder, tmp_path / "d", {}),
    }
    assert found["own"] == found["again"]
    assert len(set(found.values())) == 3
    (line,) = simulated(tmp_path, tmp_path / "refused", STEPPED, code=2)
    assert "local.optimizer: must be one of sgd, adam, adamw, or a name that one installed package declares" in line

    def fault(**given):
        options = {f"aggregation.{key}": value for key, value in given.items()}
        (line,) = simulated(folder, tmp_path / "refused", options, code=2)
        return line

    assert "a codec of a package has its name once the package is installed on this machine" in fault(codec="rounde")
    assert '| "rounded" (acme-codecs 1.2)' in fault(codec="acme_codecs:Rounded"), "no code is named by a reference"
    assert "aggregation.codec: rounded: aggregation.codec_options: levels: must be in 1..127, got 0" in fault(
        codec="rounded", **{"codec_options.levels": 0}
    )
    assert "codec_options are for a custom codec, and codec is qsgd8" in fault(
        codec="qsgd8", **{"codec_options.levels": 3}
    )
    assert "it is a built-in codec, and the package acme-codecs 1.2 declares one" in fault(codec="sign")
    assert "decode raised RuntimeError: the table is worn" in fault(codec="worn")


@pytest.mark.long
@pytest.mark.slow
def test_each_side_without_the_package_or_with_another_version_is_named(tmp_path, monkeypatch):
    """A deployed run has the bits of the simulation; a restart needs the same package; an old agent sends plain."""
    folder, newer = codecs(tmp_path / "site"), codecs(tmp_path / "newer", version="2.0")
    monkeypatch.syspath_prepend(folder)
    family = next(name for name in installed.families() if name.startswith("rounded@"))
    with federation(tmp_path, task=TASK) as it:
        start = ("--state", it.state, "--set", f"coordinator.listen={it.address}")
        start = (*start, "--set", "coordinator.enrol=127.0.0.1:0")
        (fault,) = atoll(
            folder, "coordinator", TASK, *start, *("--set", "aggregation.codec=worn", "--set", "rounds=1"), code=2
        )
        assert "aggregation.codec: worn: " in fault
        assert not list((it.state / "runs").glob("*")), "no run was made"
        it.coordinator(environment={"PYTHONPATH": str(folder)}.items(), **(SETTINGS | CODED | STEPPED))
        for site in line_task.SITES:
            it.agent(site, threads=1, exit_when_done=False, environment={"PYTHONPATH": str(folder)}.items())
        it.wait_for(lambda: "committed as version 2\n" in it.log("coordinator"))
        it.kill("coordinator")
        (fault,) = atoll(tmp_path, "coordinator", *start, code=2)
        assert fault.partition(": allowed")[0] == "atoll: run trouble-1: aggregation.codec: got 'rounded'"
        it.start("coordinator", "coordinator", *start, PYTHONPATH=str(folder))
        it.wait_for(lambda: str(it.history().run("trouble-1").state) == "finished")
        assert all(number > 0 for number in saved(it).values())
        digest = str(it.history().versions("trouble-1")[-1].digest)
        assert "updates are sent without a codec" not in it.log("coordinator")

    second = tmp_path / "second"
    second.mkdir()
    with federation(second, task=TASK) as it:
        it.coordinator(environment={"PYTHONPATH": str(folder)}.items(), **(SETTINGS | CODED | {"rounds": 8}))
        places = dict(zip(line_task.SITES, [folder, newer, tmp_path, folder], strict=False))
        for site in line_task.SITES:
            place = places.get(site, folder)
            it.agent(site, threads=1, exit_when_done=False, environment={"PYTHONPATH": str(place)}.items())
        it.wait_for(lambda: is_finished(it, "trouble-1"))
        by_client = saved(it)
        log = it.log("coordinator")
        for site, place in places.items():
            if site in by_client:
                assert (by_client[site] > 0) == (place == folder)
                has = {folder: None, newer: "has rounded@2.0-", tmp_path: "does not have it"}[place]
                told = f"updates are sent without a codec: the codec is {family}, and client {site} {has}"
                assert (told in log) == (has is not None)
    assert digest == simulated(folder, tmp_path / "simulated", CODED | STEPPED)


@pytest.mark.slow
def test_updates_to_a_rank_without_the_package_are_plain(tmp_path):
    folder = codecs(tmp_path / "site")
    here = {"PYTHONPATH": str(folder)}
    with ended_after(Ranked(tmp_path)) as it:
        it.host(rounds=1, environment=here.items(), aggregation__codec="rounded")
        it.rank(0, **here)
        it.rank(1)
        it.wait_for(lambda: all(f"rank {number} is connected" in it.log("coordinator") for number in (0, 1)))
        for site in SITES:
            it.agent(site, environment=here.items())
        it.wait_for(lambda: is_finished(it, "trouble-1"), every=0.1)
        kinds = {number > 0 for number in saved(it).values()}
        assert kinds == {True, False}, it.log("coordinator")
        assert "and aggregation rank 1 does not have it: install the same version of its package" in it.log(
            "coordinator"
        )
