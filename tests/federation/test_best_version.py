"""The best version and an early stop of a deployed run, with a coordinator that is killed, beside a simulated one."""

import json

import pytest

from tests.cli.invoking import ran
from tests.federation.processes import federation
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK, model, simulate
from tests.waiting import BOUND_S

CLIENTS = {"evaluation__server_every": 0, "evaluation__clients_every": 1}
RULES = {"model__best": "loss", "stop__metric": "loss", "stop__patience": 2}
RUN = {"name": "best", "rounds": 40, "round__cohort_size": 4, "round__min_available": 4, "local__lr": 0.6, "seed": 4}
SETTINGS = {**RUN, **RULES, **CLIENTS, "model__source": "clients", "stop__source": "clients"}


def overrides_of(settings):
    return tuple(f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items())


@pytest.mark.slow
def test_a_killed_coordinator_ends_early_where_a_simulation_does_and_has_the_best(tmp_path):
    simulated, _ = simulate(tmp_path / "simulated", *overrides_of(SETTINGS))
    best = simulated["best"]["version"]
    assert 2 < best < simulated["version"] - 1
    with federation(tmp_path, task=TASK) as it:
        keep = {"coordinator.keep_versions": 2}
        it.coordinator(**SETTINGS, **keep)
        for site in line_task.SITES:
            it.agent(site, threads=1)
        it.wait_for(lambda: f"committed as version {best + 1}\n" in it.log("coordinator"))
        it.kill("coordinator")
        again = ("--state", it.state, "--set", f"coordinator.listen={it.address}")  # without the file's settings
        it.start("coordinator", "coordinator", *again)
        it.wait_for(lambda: str(it.history().run("best-1").state) == "finished")
        run, versions = it.show("run", "show", "best-1"), it.show("model", "list", "--run", "best-1")
        out = tmp_path / "best.safetensors"
        ran("model", "export", "--best", "--out", out, "--state", it.state)
        running = it.running["coordinator"]
        running.terminate()
        running.wait()
    assert (run["cause"], run["version"], run["best"]) == (
        simulated["cause"],
        simulated["version"],
        simulated["best"],
    )
    assert versions[-1]["digest"] == simulated["model_digest"]
    assert [row["version"] for row in versions if row["best"]] == [best]
    newest = simulated["version"]
    assert [row["version"] for row in versions if row["kept"]] == [0, best, newest - 1, newest]
    exported, wanted = out.read_bytes(), model(tmp_path / "simulated", best)
    assert len(exported) > sum(array.nbytes for array in wanted.values())
    assert f"version {best}: the best so far: loss (clients) is " in it.log("coordinator")


@pytest.mark.slow
def test_what_is_never_measured_is_refused_before_the_run_begins(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        process = it.coordinator(name="refused", model__best="auroc", stop__metric="f1", stop__patience=3)
        assert process.wait(BOUND_S) == 2
        log = it.log("coordinator")
    assert "model.best: got 'auroc'; allowed: accuracy, loss" in log
    assert "stop.metric: got 'f1'; allowed: accuracy, loss" in log
    assert "Traceback" not in log
