"""Rule concatenate by real processes: an ensemble of trees survives kills, and is the simulated one, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xgboost
from sklearn.metrics import roc_auc_score

from examples.tumours import CLINICS, records
from tests.federation.processes import ATOLL, federation
from tests.simulations.federation.simulating import simulate

ROOT = Path(__file__).parents[2]
TOML = ROOT / "examples" / "tumours_xgboost.toml"
TASK = f"{ROOT}/examples/tumours_xgboost.py:task"
SETTINGS = {"objective": "binary:logistic", "base_score": 0.5, "max_depth": 4, "eta": 0.3, "nthread": 1}


def trees_of(booster):
    return json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A run of four clinics whose coordinator dies in the midst of a concatenation, and one of whose agents dies."""
    folder = tmp_path_factory.mktemp("deployed")
    with federation(folder, task=TASK) as it:
        keys = (f"coordinator.listen={it.address}", "coordinator.enrol=127.0.0.1:0")
        given = ("--state", it.state, *(part for key in keys for part in ("--set", key)))
        it.start("coordinator", "coordinator", TOML, *given, ATOLL_CRASH_AT="aggregate.mid_fold:100")
        for site in CLINICS:
            it.agent(site, environment={"ATOLL_CRASH_AT": "agent.spooled:5"} if site == "coast" else {})
        assert it.running.pop("coordinator").wait(60) == -9
        it.start("coordinator", "coordinator", TOML, *given)
        assert it.running.pop("coast").wait(60) == -9
        it.agent("coast")
        assert it.wait_for_end() == 0
        exported = [ATOLL, "model", "export", "--state", it.state, "--out", folder / "model.safetensors"]
        subprocess.run(list(map(str, exported)), check=True, capture_output=True)
        yield it


@pytest.fixture(scope="module")
def booster(deployed):
    """The model in plain XGBoost, by the example's own command."""
    files = [str(deployed.folder / name) for name in ("model.safetensors", "trees.json")]
    subprocess.run([sys.executable, ROOT / "examples" / "tumours_xgboost.py", *files], check=True)
    return xgboost.Booster(model_file=files[1])


def test_a_run_with_two_kills_ends_with_the_bits_of_the_simulated_one(deployed, tmp_path):
    versions = deployed.history().versions("trees-1")
    simulated, _ = simulate(tmp_path, task=str(TOML))
    assert simulated["model_digest"] == str(versions[-1].digest)
    assert len(versions) == 11


def test_every_clinic_has_one_tree_in_each_round(deployed, booster):
    assert booster.num_boosted_rounds() == len(trees_of(booster)) == 10 * len(CLINICS)
    records_of = deployed.history().rounds("trees-1")
    assert [record.num_reported for record in records_of if record.version] == [4] * 10


def test_the_ensemble_is_the_one_that_xgboost_alone_makes_of_the_same_records(deployed, booster):
    """The bagging of FedXgbBagging by XGBoost's own functions: update, slice, append; nothing of Atoll's."""
    document = None
    for _ in range(10):
        added = []
        for site in sorted(CLINICS):
            data = xgboost.DMatrix(*records("train", site))
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
    found = {row.source: row.values for row in deployed.history().evaluations("trees-1") if row.version == 10}
    parts = [records("test", site) for site in CLINICS]
    whole = {"server": records("server", None), "clients": map(np.concatenate, zip(*parts, strict=True))}
    for source, (features, labels) in whole.items():
        scores = booster.predict(xgboost.DMatrix(features))
        assert found[source]["accuracy"] == ((scores > 0.5) == labels).mean()
        assert found[source]["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=2e-3)
        assert roc_auc_score(labels, scores) > 0.95
