"""The metrics of single sites, in a deployed run with four policies and in a simulated one."""

import json

import pytest

from tests.cli.invoking import said, shown
from tests.federation.processes import federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK

RUN = {"name": "sites", "rounds": 3, "round__cohort_size": 4, "round__min_available": 4, "seed": 4}
EVALUATION = {"evaluation__server_every": 0, "evaluation__clients_every": 1}
POLICY = 'tasks = ["*"]\nruns = ["*"]\n'


def simulated(folder, *overrides):
    settings = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in {**RUN, **EVALUATION}.items()]
    options = [part for setting in (*settings, *overrides) for part in ("--set", setting)]
    return shown("simulate", TASK, "--engine", "sequential", "--out", folder, "--sites", *options)


def deployed(tmp_path, policies, **settings):
    """Run to the end with these lines of policy by site (None: no policy file); return run, sites and a round."""
    with federation(tmp_path, task=TASK) as it:
        coordinator = it.coordinator(**RUN, **EVALUATION, **settings)
        for site, lines in policies.items():
            more = {}
            if lines is not None:
                path = tmp_path / f"{site}.toml"
                path.write_text(POLICY + lines)
                more = {"policy": path}
            it.agent(site, threads=1, **more)
        assert coordinator.wait(timeout=300) == 0, it.log("coordinator")
        sites = it.show("run", "show", "sites-1", "--sites")
        text = said("run", "show", "sites-1", "--sites", "--state", it.state)
        run, round_ = it.show("run", "show", "sites-1"), it.show("round", "show", "2")
    return run, sites, round_, text


@pytest.mark.slow
def test_sites_without_a_policy_are_shown_as_in_a_simulation(tmp_path):
    expected = simulated(tmp_path / "simulated")["sites"]
    run, sites, round_, text = deployed(tmp_path, dict.fromkeys(line_task.SITES))
    for kind in ("evaluation", "training"):
        assert sites[kind]["sites"] == expected[kind]["sites"], kind
        assert sites[kind]["metrics"] == expected[kind]["metrics"], kind
        assert sites[kind]["curves"] == expected[kind]["curves"], kind
        assert not sites[kind]["not_shown"]
    assert sites["evaluation"]["version"] == 3
    assert sites["training"]["version"] == 2  # the last round began from it
    assert [version for version, _ in sites["evaluation"]["curves"]["a"]["accuracy"]] == [1, 2, 3]
    assert set(round_["training"]["sites"]) == set(line_task.SITES)
    worst = sites["evaluation"]["metrics"]["loss"]["worst"]
    assert f"worst {worst['site']}" in text
    assert run["metrics"]["3"].keys() == {"clients"}, "a site's metrics are no metrics of the run"


@pytest.mark.slow
def test_metrics_that_a_killed_coordinator_had_no_time_to_compute_are_computed_by_the_next(tmp_path):
    """Their sums are on disk while the worker that knows the metrics is busy with the server's data."""
    task, environment = f"{TASK.rpartition(':')[0]}:awaits_test_data", {"LINE_TASK_GO": str(tmp_path / "go")}
    run = {**RUN, **EVALUATION, "evaluation__server_every": 1, "stay": True, "environment": environment}
    with federation(tmp_path, task=task) as it:
        it.coordinator(**run)
        for site in line_task.SITES:
            it.agent(site, threads=1)

        def sums(*, with_values):
            rows = it.history().site_evaluations("sites-1")
            return [row for row in rows if row.statistics and bool(row.values) == with_values]

        it.wait_for((it.state / "coordinator.json").exists)
        it.wait_for(lambda: len(sums(with_values=False)) > 2)
        it.kill("coordinator")
        assert not sums(with_values=True)
        before = {(row.version, row.source) for row in sums(with_values=False)}
        (tmp_path / "go").touch()
        it.coordinator(**run)
        it.wait_for(lambda: str(it.history().run("sites-1").state) == "finished" and not sums(with_values=False))
        assert before < {(row.version, row.source) for row in sums(with_values=True)}
        assert {tuple(row.values) for row in sums(with_values=True)} == {("accuracy", "loss")}


@pytest.mark.slow
def test_each_policy_lets_leave_what_it_says_and_the_reasons_are_shown(tmp_path):
    """`d` lets nothing leave and still trains; `b` and `c` only in sums, which at least three sites make."""
    policies = {
        "a": 'metrics = "per_site"\n',
        "b": "",
        "c": "metrics_min_sites = 3\n",
        "d": 'metrics = "none"\n',
    }
    run, sites, round_, text = deployed(tmp_path, policies, evaluation__deadline=120.0)
    assert run["metrics"]["3"]["clients"]["accuracy"] is not None, "three sites have answered"
    assert not sites["evaluation"]["sites"], "of two in sums alone and one shown, the sum would tell two apart"
    assert sites["training"]["sites"].keys() == {"a"}
    allows = "its policy allows only sums over several sites"
    assert sites["training"]["not_shown"] == {"b": allows, "c": allows}
    assert "metrics: no metrics leave this site" in sites["evaluation"]["not_shown"]["d"]
    assert "the rest of the total would be theirs" in sites["evaluation"]["not_shown"]["a"]
    assert round_["training"]["sites"].keys() == {"a"}
    assert all(client["digest"] for client in round_["clients"].values()), "all four have trained"
    assert f"not shown: b, c: {allows}" in text
