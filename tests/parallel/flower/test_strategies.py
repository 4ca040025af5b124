"""The eleven strategies with a native counterpart give what Flower's own give, and all others are told by name."""

import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.parallel.flower.server_host import ServerHost
from atoll.parallel.flower.strategies import native
from atoll.parallel.task.flower_app import read_app, with_app
from atoll.parallel.worker.flower_bench import numbers_of
from atoll.parallel.worker.flower_task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from tests.parallel.flower.flowers_own import result_of

APPS = Path(__file__).parent / "apps"
NATIVE = (
    *("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedProx"),
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan"),
)
NODES = 7
TOLERANCE = 1e-6


@pytest.fixture
def app():
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
