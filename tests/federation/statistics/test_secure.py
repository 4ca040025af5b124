"""Statistics in a secure sum, as operators run them: processes, certificates, pinned peers, kill -9 of both sides."""

import json
import math
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np

from tests.federation.processes import ATOLL, federation
from tests.federation.statistics import csv_sites_task
from tests.federation.test_pinned_sites import DEMANDS, actions_of, introduced
from tests.waiting import BOUND_S

TASK = str(Path(csv_sites_task.__file__)) + ":task"
SITES = "abcde"
EDGES = [0, 40, 60, 120]
PLAN = f"""
task = "{TASK}"
name = "patients"
options = {{scale = 1.5}}

[round]
cohort_size = 4

[secure]
clip_norm = 1.0
examples_max = 100

[secure.statistics]
labels = {{target = 3}}
features = {{age = {EDGES}, income = [9e8, 1.1e9]}}
"""


def asking(it, *more):
    plan = it.folder / "plan.toml"
    plan.write_text(PLAN)
    command = [ATOLL, "run", "statistics", plan, "--state", it.state, "--json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hosting(it, environment=()):
    it.log_before = len(it.log("coordinator")) if (it.folder / "coordinator.log").exists() else 0
    addresses = (f"coordinator.listen={it.address}", "coordinator.enrol=127.0.0.1:0")
    settings = [part for each in addresses for part in ("--set", each)]
    it.start("coordinator", "coordinator", "--state", it.state, *settings, **dict(environment))


def serving(it, site, environment=()):
    """Start the agent of a site that demands sums, and lets merged statistics leave."""
    policy = it.folder / f"{site}.toml"
    policy.write_text(DEMANDS.replace("[secure]", 'statistics = "merged"\nstatistics_min_count = 1\n[secure]'))
    settings = {"exit_when_done": False, "threads": 1, "policy": policy, "task.folder": it.folder}
    it.agent(site, environment=environment, **settings)


def started(it, sites, crash_at):
    """Start the agents of sites, some of which die at a crash point, and wait for them."""
    for site in sites:
        serving(it, site, {"ATOLL_CRASH_AT": crash_at[site]} if site in crash_at else {})
    joined(it, sites)


def joined(it, sites):
    """Wait until sites have joined the newest coordinator."""
    it.wait_for(lambda: all(f"{site} joined" in it.log("coordinator")[it.log_before :] for site in sites) or None)


def rounding(high, mean, sites):
    """Return the most by which each site's rounding to half a step moves n times the variance."""
    exponent = math.ceil(math.log2(high))
    of_total, of_squares = Fraction(1, 2 ** (74 - exponent)), Fraction(1, 2 ** (74 - 2 * exponent))
    return len(sites) * (of_squares / 2 + of_total * abs(mean)) * Fraction(1001, 1000)


def check_sum(found, rows, sites, secure=None):
    """Hold a sum against the pooled rows of its sites."""
    features, outcomes = (np.concatenate([rows[site][k] for site in sites]) for k in (0, 1))
    train = found["merged"]["train"]
    assert found["answered"] == [*sites]
    assert (found["secure"], found["sites"]) == (secure or {"sites": len(sites)}, {})
    assert (train["examples"], train["sites"]) == (len(outcomes), len(sites))
    expected = {str(k): int((outcomes == k).sum()) for k in range(3)} | {"other": int((outcomes > 2).sum())}
    assert train["labels"]["target"]["counts"] == expected
    for name, at, (low, high) in (("age", 0, (0, 120)), ("income", 2, (9e8, 1.1e9))):
        column, shown = features[:, at], train["features"][name]
        within = column[(column >= low) & (column <= high)]
        exact = [Fraction(float(value)) for value in within]
        missing = int(np.isnan(column).sum())
        assert (shown["count"], shown["missing"]) == (len(within), missing)
        assert shown["outside"] == len(column) - missing - len(within)
        assert shown["sum"] == float(sum(exact))
        mean = sum(exact) / len(exact)
        assert shown["mean"] == float(mean)
        variance = sum((value - mean) ** 2 for value in exact) / len(exact)
        assert abs(Fraction(shown["variance"]) - variance) <= (
            rounding(high, mean, sites) / len(exact) + Fraction(math.ulp(shown["variance"])) / 2
        )
        assert "min" not in shown
    assert [*train["feature_bins"]["age"]["counts"].values()] == np.histogram(
        features[:, 0][~np.isnan(features[:, 0])], EDGES
    )[0].tolist()


def test_sites_that_demand_sums_add_their_statistics_and_a_killed_agent_and_coordinator_cost_no_site_its_numbers(
    tmp_path, rows
):
    with federation(tmp_path, task=TASK) as it:
        introduced(it, SITES)
        hosting(it, {"ATOLL_CRASH_AT": "statistics.sites_kept:1"})
        started(it, SITES, {"e": "agent.promised/joined:1"})
        first = asking(it)
        it.running["e"].wait(BOUND_S)
        serving(it, "e")
        it.running["coordinator"].wait(BOUND_S)
        _, said = first.communicate(timeout=BOUND_S)
        assert first.returncode == 2, said
        assert "the coordinator at" in said
        hosting(it)
        joined(it, SITES)
        told, _ = asking(it).communicate(timeout=BOUND_S)
        found = json.loads(told)
        check_sum(found, rows, "abcd")
        assert found["refused"]["e"].startswith("not asked: the newest sums")
        assert found["number"] == 2
        said = subprocess.check_output([ATOLL, "run", "statistics", "--show", "0", "--state", it.state], text=True)
        assert "secure sum of 4 of 4 sites" in said
        assert "[40, 60)" in said
        check_refusals(it)
        actions = [action for action in actions_of(it, "a") if action != "secure.opened"]
        ends = ["secure.joined", "secure.signed", "secure.joined", "secure.left"]
        assert actions[-4:] == ends, "the sum over other sites is left before anything of it is signed"
        assert "asks for a secure sum of train: examples, labels of target (3), age within 0 to 120 (3 bins)" in it.log(
            "a"
        )


def check_refusals(it):
    """Sites that demand sums refuse a plain request, and a sum over other sites."""
    ended = subprocess.run(
        [ATOLL, "run", "statistics", TASK, "--state", it.state, "--json"], capture_output=True, text=True, check=True
    )
    plain = json.loads(ended.stdout)
    assert plain["answered"] == []
    assert set(plain["refused"].values()) == {
        "policy_refused: secure: statistics of the data outside of a secure sum: this site demands one"
    }
    told, _ = asking(it, "--set", f"secure.statistics.sites={json.dumps([*SITES])}").communicate(timeout=BOUND_S)
    other = json.loads(told)
    assert (other["answered"], other["merged"]) == ([], {})
    assert "this site has signed statistics of csv_sites_task:task over 1 set of sites" in other["refused"]["a"]
