"""The tasks of scikit-learn and XGBoost by real processes: trees survive kills, both runs are the simulated ones."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.federation.processes import ATOLL, federation
from tests.later import later
from tests.simulations.federation.simulating import simulate
from tests.waiting import BOUND_S

tumours = later("examples.tumours")
xgboost, metrics, pipeline = later("xgboost"), later("sklearn.metrics"), later("sklearn.pipeline")
linear_model, preprocessing = later("sklearn.linear_model"), later("sklearn.preprocessing")

pytestmark = pytest.mark.long  # three minutes of processes that import XGBoost and scikit-learn

EXAMPLES = Path(__file__).parents[2] / "examples"
TREES, NET = EXAMPLES / "tumours_xgboost.toml", EXAMPLES / "tumours_sklearn.toml"
TASKS = [f"{EXAMPLES}/tumours_{library}.py:task" for library in ("xgboost", "sklearn")]
SETTINGS = {"objective": "binary:logistic", "base_score": 0.5, "max_depth": 4, "eta": 0.3, "nthread": 1}


def trees_of(booster):
    return json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Four clinics with both runs, one after the other.

    The coordinator dies in the midst of a concatenation, an agent with new trees in its spool.
    """
    folder = tmp_path_factory.mktemp("deployed")
    with federation(folder, task=TASKS[0]) as it:
        keys = (f"coordinator.listen={it.address}", "coordinator.enrol=127.0.0.1:0")
        given = ("--state", it.state, *(part for key in keys for part in ("--set", key)))
        it.start("coordinator", "coordinator", *given, ATOLL_CRASH_AT="aggregate.mid_fold:100")
        it.wait_for(lambda: "no run yet" in it.log("coordinator"))
        for site in tumours.CLINICS:
            dies = {"ATOLL_CRASH_AT": "agent.spooled:5"} if site == "coast" else {}
            it.agent(site, tasks=TASKS, environment=dies, exit_when_done=False, threads=1)
        atoll("run", "start", TREES, "--state", it.state)
        assert it.running.pop("coordinator").wait(BOUND_S) == -9
        it.start("coordinator", "coordinator", *given)
        assert it.running.pop("coast").wait(BOUND_S) == -9
        it.agent("coast", tasks=TASKS, exit_when_done=False, threads=1)
        it.wait_for(lambda: is_finished(it, "trees-1"))
        atoll("run", "start", NET, "--state", it.state)
        it.wait_for(lambda: is_finished(it, "tumours-1"))
        atoll("model", "export", "--run", "trees-1", "--state", it.state, "--out", folder / "model.safetensors")
        yield it


def atoll(*command):
    subprocess.run([ATOLL, *map(str, command)], check=True, capture_output=True)


def is_finished(it, run_id):
    return str(it.history().run(run_id).state) == "finished"


@pytest.fixture(scope="module")
def booster(deployed):
    """The model in plain XGBoost, by the example's own command."""
    files = [str(deployed.folder / name) for name in ("model.safetensors", "trees.json")]
    subprocess.run([sys.executable, EXAMPLES / "tumours_xgboost.py", *files], check=True)
    return xgboost.Booster(model_file=files[1])


@pytest.mark.parametrize(("toml", "run_id"), [(TREES, "trees-1"), (NET, "tumours-1")], ids=["trees", "net"])
def test_a_run_ends_with_the_bits_of_the_simulated_one(deployed, tmp_path, toml, run_id):
    versions = deployed.history().versions(run_id)
    simulated, _ = simulate(tmp_path, task=str(toml))
    assert simulated["model_digest"] == str(versions[-1].digest)
    assert len(versions) == 11


def test_every_clinic_has_one_tree_in_each_round(deployed, booster):
    assert booster.num_boosted_rounds() == len(trees_of(booster)) == 10 * len(tumours.CLINICS)
    records_of = deployed.history().rounds("trees-1")
    assert [record.num_reported for record in records_of if record.version] == [4] * 10


def test_the_ensemble_is_the_one_that_xgboost_alone_makes_of_the_same_records(deployed, booster):
    """The bagging of FedXgbBagging by XGBoost's own functions: update, slice, append; nothing of Atoll's."""
    document = None
    for _ in range(10):
        added = []
        for site in sorted(tumours.CLINICS):
            data = xgboost.DMatrix(*tumours.records("train", site))
            if document is None:
                local = xgboost.train(SETTINGS, data, 1)
            else:
                local = xgboost.Booster(SETTINGS)
                local.load_model(bytearray(json.dumps(document).encode()))
                local.update(data, local.num_boosted_rounds())
            added.append(json.loads(local[local.num_boosted_rounds() - 1 :].save_raw("json")))
        document = document or {**added[0], "learner": without_trees(added[0]["learner"])}
        model = document["learner"]["gradient_booster"]["model"]
        for tree in (each["learner"]["gradient_booster"]["model"]["trees"][0] for each in added):
            model["trees"].append({**tree, "id": len(model["trees"])})
            model["tree_info"].append(0)
            model["iteration_indptr"].append(len(model["trees"]))
        model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
    assert trees_of(booster) == model["trees"]


def without_trees(learner):
    empty = json.loads(json.dumps(learner))
    empty["gradient_booster"]["model"] |= {"trees": [], "tree_info": [], "iteration_indptr": [0]}
    return empty


def test_the_metrics_of_the_run_are_those_of_scikit_learn(deployed, booster):
    """The merged AUC of the clinics is exact but for ties in a bin; accuracies are exact."""
    for source, (features, labels) in whole_records().items():
        scores = booster.predict(xgboost.DMatrix(features))
        found = values_of(deployed, "trees-1")[source]
        assert found["accuracy"] == ((scores > 0.5) == labels).mean()
        assert found["auc"] == pytest.approx(metrics.roc_auc_score(labels, scores), abs=2e-3)
        assert metrics.roc_auc_score(labels, scores) > 0.95


def test_the_net_orders_the_tumours_as_well_as_one_that_has_all_records(deployed):
    """Federated averaging beside scikit-learn's own logistic regression on the pooled records."""
    train = whole_records("train")["clients"]
    central = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()).fit(*train)
    for source, (features, labels) in whole_records().items():
        pooled = metrics.roc_auc_score(labels, central.predict_proba(features)[:, 1])
        assert values_of(deployed, "tumours-1")[source]["auc"] > pooled - 0.02


def whole_records(split="test"):
    parts = [tumours.records(split, site) for site in tumours.CLINICS]
    return {"server": tumours.records("server", None), "clients": tuple(map(np.concatenate, zip(*parts, strict=True)))}


def values_of(it, run_id):
    return {row.source: row.values for row in it.history().evaluations(run_id) if row.version == 10}
