"""The eleven strategies with a native counterpart give what Flower's own give, and all others are told by name."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean

from atoll.flower.app import read_app
from atoll.flower.bench import numbers_of
from atoll.flower.native import rules
from atoll.flower.native.strategies import WAITS_S, native
from atoll.flower.server_host import ServerHost, Started
from atoll.flower.task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.task.apps import with_app
from tests.flower.flowers_own import result_of

APPS = Path(__file__).parents[1] / "apps"
NATIVE = (
    *("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedProx"),
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan"),
)
NODES = 7
TOLERANCE = 1e-6


@pytest.fixture
def app():
    sys.modules.pop("every_strategy_app", None)  # it holds the results of another test
    app = read_app(with_app(str(APPS / "every_strategy")))
    yield app
    sys.path.remove(str(app.folder))
    del sys.modules["every_strategy_app"]


def run_natively(app, folder, **given):
    """Let main() go on with the result of a simulated run of the native settings."""
    reference = f"{app.folder}/pyproject.toml:app"
    plan = native(app, ServerHost(app, app.run_config(given)).started(), NODES)
    assert plan.reasons == ()
    settings = {"task": {"reference": reference, **given}, **plan.settings, "simulation": {"engine": "sequential"}}
    task = {"task": reference, "options": given}
    file = SimulationFile.model_validate({**settings, **task})
    with opened(file, FlowerTask(app, NODES), folder, on_round=print, is_fresh=True) as federation:
        assert federation.run()["state"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_a_native_run_gives_what_flowers_own_strategy_gives(app, tmp_path, name):
    results = app.load("every_strategy_app:results")
    result_of(app, NODES, strategy=name)
    run_natively(app, tmp_path / "run", strategy=name)
    theirs, ours = results
    assert list(ours.arrays) == list(theirs.arrays)
    for key, array in theirs.arrays.items():
        expected, found = array.numpy(), ours.arrays[key].numpy()
        distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert distance <= TOLERANCE, (key, distance)
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        expected, found = getattr(theirs, kind), getattr(ours, kind)
        assert list(found) == list(expected), kind
        if kind != "train_metrics_clientapp" or ("Krum" not in name and name != "Bulyan"):
            for number, metrics in expected.items():
                assert numbers_of(found[number]) == pytest.approx(numbers_of(metrics), rel=1e-5), (kind, number)


def test_wide_floats_keep_their_dtype(app, tmp_path):
    results = app.load("every_strategy_app:results")
    result_of(app, NODES, wide=True)
    run_natively(app, tmp_path / "run", wide=True)
    theirs, ours = results
    assert {array.dtype for array in ours.arrays.values()} == {"float64"}
    for key, array in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[key].numpy(), array.numpy(), rtol=1e-5, atol=1e-6)


def plan_of(app, kind, nodes=NODES, *, begun=None, rounds=3, timeout=60.0, train=None, **options):
    strategy = getattr(flower, kind)(**options)
    vars(strategy).update(begun or {})
    first = app.load("every_strategy_app:first_arrays")(wide=False)
    return native(app, Started(strategy, first, rounds, timeout, train or {}, {}, None), nodes)


@pytest.mark.parametrize(
    ("kind", "options", "nodes", "reason"),
    [
        ("MultiKrum", {"num_nodes_to_select": 0}, 7, "num_nodes_to_select is 0: there would be no model"),
        ("MultiKrum", {"num_malicious_nodes": -1}, 7, "num_malicious_nodes is -1, a number below 0"),
        ("Bulyan", {"num_malicious_nodes": -1}, 7, "num_malicious_nodes is -1, a number below 0"),
        ("Krum", {}, 3, "num_malicious_nodes = 0 of 3 nodes: each is compared with only its nearest"),
        ("FedAvg", {"min_train_nodes": 0, "fraction_train": 0.1}, 3, "fraction_train = 0.1 of 3 nodes: a round would"),
        ("FedAvgM", {"begun": {"momentum_vector": [1.0]}}, 3, "momentum_vector of FedAvgM is set by the app"),
        ("FedAdam", {"begun": {"m_t": {}, "v_t": {}}}, 3, "m_t of FedAdam is set by the app"),
    ],
)
def test_options_without_a_counterpart_are_reasons(app, kind, options, nodes, reason):
    assert plan_of(app, kind, nodes, **options).reasons[0].startswith(reason)


def test_numbers_of_numpys_become_settings_and_no_evaluation_is_none(app):
    plan = plan_of(
        app,
        "FedAvg",
        5,
        rounds=np.int64(2),
        timeout=np.float32(60),
        min_train_nodes=np.int64(3),
        fraction_train=np.float32(0.5),
        fraction_evaluate=0.1,
        min_evaluate_nodes=0,
    )
    assert json.loads(json.dumps(plan.settings))["round"] == {
        "cohort_size": 3,
        "quorum": 1,
        "deadline": 60.0,
        "failure_rest": 0.0,
        "min_available": 3,
        "selection_timeout": WAITS_S,
    }
    assert plan.settings["rounds"] == 2
    assert plan.settings["evaluation"] == {"server_every": 0, "clients_every": 0}


def test_a_config_that_flower_refuses_is_refused(app):
    for options in ({"kind": "FedProx", "proximal_mu": np.float32(0.5)}, {"kind": "FedAvg", "train": {"lr": None}}):
        with pytest.raises(TypeError, match="Not all values are of valid type"):
            plan_of(app, **options)
    assert plan_of(app, "FedAvg", train=ConfigRecord({"lr": 0.1})).settings["local"]["train.lr"] == 0.1


@pytest.mark.parametrize(("beta", "number"), [(1 / 3, 3), (1 / 7, 7), (0.29, 100), (0.2, 7), (0, 3), (1e-5, 4)])
def test_a_trimmed_mean_leaves_out_as_many_values_as_flowers(app, beta, number):
    module, _, name = plan_of(app, "FedTrimmedAvg", beta=beta).settings["aggregation"]["rule"].partition(":")
    assert module == rules.__name__
    rows = np.random.default_rng(1).normal(size=(number, 5)).astype(np.float32)
    np.testing.assert_allclose(getattr(rules, name).reduce(rows), trim_mean(rows, beta), atol=1e-6)
