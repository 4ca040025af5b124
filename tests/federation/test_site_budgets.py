"""Budgets of sites between real processes: killed before the first step and after the upload, and two coordinators."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoking import shown
from tests.client.policy.test_gate import written
from tests.federation.processes import federation
from tests.federation.test_privacy import atoll
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

FIRST, SECOND = line_task.SITES[:2]
SETTINGS: dict[str, Any] = {
    "rounds": 3,
    "round__cohort_size": 2,
    "round__min_available": 2,
    "evaluation__server_every": 0,
    "aggregation__weighting": "uniform",
    "privacy__epsilon": 9.0,
    "privacy__delta": 1e-5,
    "privacy__clip_norm": 0.5,
    "privacy__noise_multiplier": 4.0,
}


def policy(folder: Path, site: str, shared: Path, epsilon: float) -> Path:
    """A policy whose budget allows a number of uses of noise 4: 1.06, 1.54, 1.93, 2.25, 2.55, 2.82 at delta 1e-6."""
    path = folder / f"{site}.toml"
    budget = (
        f'[[privacy.data]]\nname = "lines"\ntasks = ["*"]\nepsilon_max = {epsilon}\ndelta = 1e-6\nunit = "client"\n'
    )
    ledger = f'[privacy]\nledger = "{shared}"\n'
    path.write_text(f'tasks = ["*"]\nruns = ["*"]\nmetrics = "per_site"\n{ledger}{budget}')
    return path


def budget_of(folder: Path, site: str) -> dict[str, Any]:
    [found] = shown("site", "budgets", "--state", folder / site, "--policy", folder / f"{site}.toml")["budgets"]
    return dict(found)


def charges(folder: Path, site: str) -> list[tuple[str, str]]:
    return [(line["actor"], line["object"]) for line in written(folder / site) if line["action"] == "privacy.charge"]


@pytest.mark.slow
def test_a_site_spends_one_budget_over_kills_and_coordinators_and_a_put_back_ledger_allows_nothing(tmp_path):
    shared = {site: tmp_path / f"ledger-{site}" for site in (FIRST, SECOND)}
    policies = {site: policy(tmp_path, site, shared[site], epsilon=2.6) for site in shared}  # five uses
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**SETTINGS)
        it.agent(SECOND, threads=1, policy=policies[SECOND])
        crashes = {"ATOLL_CRASH_AT": "agent.charged:1"}
        it.agent(FIRST, threads=1, policy=policies[FIRST], environment=crashes).wait(BOUND_S)
        assert budget_of(tmp_path, FIRST)["charges"] == 1, "the charge is durable before the work"
        older = tmp_path / "older"
        shutil.copytree(shared[FIRST], older)
        crashes = {"ATOLL_CRASH_AT": "agent.uploaded:2"}
        it.agent(FIRST, threads=1, policy=policies[FIRST], environment=crashes).wait(BOUND_S)
        it.agent(FIRST, threads=1, policy=policies[FIRST])
        assert it.wait_for_end() == 0
        [first, second] = (budget_of(tmp_path, site) for site in shared)
        assert it.show("run", "show", "trouble-1")["version"] == 3
    assert [(data["charges"], data["uses_left"]) for data in (first, second)] == [(3, 2), (3, 2)]
    assert charges(tmp_path, SECOND) == [("trouble-1", f"round {number}") for number in (1, 2, 3)]
    (tmp_path / "second").mkdir()
    with federation(tmp_path / "second", task=TASK) as it:
        for site in shared:
            (tmp_path / "second" / f"{site}.toml").write_text(policies[site].read_text())
        it.coordinator(name="again", **SETTINGS)
        for site in shared:
            it.agent(site, threads=1, policy=policies[site])
        it.wait_for(lambda: "the budget of data set 'lines' is spent: epsilon 2.5" in it.log(FIRST))
        it.wait_for(lambda: budget_of(it.folder, SECOND)["uses_left"] == 0)
        rounds = it.history().rounds("again-1")
        spent = budget_of(it.folder, FIRST)
    assert [record.phase for record in rounds][:2] == ["committed", "committed"]
    assert spent["charges"] == 5
    assert sorted(run["run"] for run in spent["runs"]) == ["again-1", "trouble-1"]
    assert len({run["coordinator"] for run in spent["runs"]}) == 2
    assert spent["spent"] <= 2.6
    shutil.rmtree(shared[FIRST])
    shutil.copytree(older, shared[FIRST])
    where = ("--site", FIRST, "--insecure", "--state", tmp_path / FIRST, "--policy", policies[FIRST])
    for command in (("agent", TASK, *where, "--check"), ("agent", TASK, *where)):
        assert "it was put back from an older copy, or removed: nothing is allowed" in atoll(*command, code=2)


def test_a_plain_run_is_refused_at_a_site_whose_data_has_a_budget_and_the_record_says_so(tmp_path):
    plain = {name: value for name, value in SETTINGS.items() if not name.startswith("privacy")}
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**plain | {"rounds": 1, "round__quorum": 1})
        it.agent(FIRST, threads=1, policy=policy(tmp_path, FIRST, tmp_path / "ledger", 2.0))
        it.agent(SECOND, threads=1)
        assert it.wait_for_end() == 0
        [record] = it.rounds()
    refused = record.clients[FIRST]
    assert (refused.reason, record.clients[SECOND].reason) == ("policy_refused", "")
    assert refused.detail == (
        "budget: data set 'lines' has a budget, and takes part in nothing that is not accounted: a training without "
        "differential privacy (no [privacy] of the run)"
    )
    assert not charges(tmp_path, FIRST)
    assert any(line["action"] == "train.refused" for line in written(tmp_path / FIRST))
