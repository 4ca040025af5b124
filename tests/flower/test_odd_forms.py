"""Apps of odd shapes, natively, hosted and by Flower's own loop: the same result, or a refusal that names the shape."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.flower.app import read_app
from atoll.flower.native.strategies import native
from atoll.flower.server_host import ServerHost
from atoll.flower.task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.simulations.messages.run import opened as opened_messages
from atoll.task.apps import with_app
from tests.flower.flowers_own import result_of

APP = Path(__file__).parent / "apps" / "odd_forms"
REFERENCE = f"{APP}/pyproject.toml:app"
NODES = 3

pytestmark = pytest.mark.real


@pytest.fixture
def app():
    app = read_app(with_app(str(APP)))
    yield app
    sys.path.remove(str(app.folder))
    del sys.modules["odd_forms_app"]


def plan_of(app, **options):
    return native(app, ServerHost(app, app.run_config(options)).started(), NODES)


def natively(app, folder, engine="sequential", **options):
    plan = plan_of(app, **options)
    assert plan.reasons == ()
    simulation = {"engine": engine, "workers": 2 if engine == "processes" else 0}
    settings = {**plan.settings, "task": REFERENCE, "options": options, "simulation": simulation}
    file, task = SimulationFile.model_validate(settings), FlowerTask(app, NODES)
    with opened(file, task, folder, on_round=print, is_fresh=True) as federation:
        assert federation.run()["state"] == "finished"
    return json.loads((folder / "app" / "result.json").read_text())


def hosted(app, folder, **options):
    settings = {"program": {"main": REFERENCE}, "task": REFERENCE, "options": options, "name": "odd"}
    waits = {"round": {"cohort_size": NODES, "quorum": 1, "min_available": NODES}}
    file = SimulationFile.model_validate({**settings, **waits})
    with opened_messages(file, FlowerTask(app, NODES), folder) as federation:
        result = federation.run()
    assert result["state"] == "finished", result["cause"]
    return json.loads((folder / "program" / "result.json").read_text())


def own(app, folder, **options):
    out = folder / "own.json"
    result_of(app, NODES, **options, out=str(out))
    return json.loads(out.read_text())


def assert_like(found, expected, *, rtol):
    assert list(found["arrays"]) == list(expected["arrays"])
    for name, (dtype, shape, values) in expected["arrays"].items():
        assert found["arrays"][name][:2] == [dtype, shape], name
        np.testing.assert_allclose(found["arrays"][name][2], values, rtol=rtol)
    for kind in ("train", "evaluate"):
        for number, metrics in expected[kind].items():
            for name, value in metrics.items():
                np.testing.assert_allclose(found[kind][number].get(name, []), value, rtol=1e-12)


@pytest.mark.parametrize(
    ("odd", "rtol"),
    [("dims", 1e-6), ("order", 1e-6), ("state", 1e-6), ("extra_config", 1e-6), ("huge", 1e-6), ("half", 2e-3)],
)
def test_an_app_gives_natively_and_hosted_what_it_gives_by_flowers_own_loop(app, tmp_path, odd, rtol):
    """float16 is averaged in float16 by Flower, in float32 here: two units in its last place differ after rounds."""
    expected = own(app, tmp_path, odd=odd)
    assert_like(natively(app, tmp_path / "native", odd=odd), expected, rtol=rtol)
    assert_like(hosted(app, tmp_path / "hosted", odd=odd), expected, rtol=rtol)


@pytest.mark.parametrize("odd", ["dims", "state"])
def test_nodes_train_and_evaluate_the_same_in_processes(app, tmp_path, odd):
    one, several = (natively(app, tmp_path / name, engine=name, odd=odd) for name in ("sequential", "processes"))
    assert one["evaluate"]
    assert several == one


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("whole", "u is uint8: only float16, float32, float64, int32 and int64 are averaged natively"),
        ("flags", "flag is bool: only"),
        ("unicode", "the array '' has a name that no model's file has"),
        ("config", "train_config: data has bytes"),
    ],
)
def test_an_app_that_cannot_run_natively_says_why_and_runs_hosted(app, tmp_path, odd, reason):
    reasons = plan_of(app, odd=odd).reasons
    assert any(reason in each for each in reasons), reasons
    assert_like(hosted(app, tmp_path / "hosted", odd=odd), own(app, tmp_path, odd=odd), rtol=1e-6)


@pytest.mark.parametrize("odd", ["raises", "nan_array", "no_examples", "other_keys"])
def test_a_client_whose_reply_does_not_fit_is_left_out_of_its_exchange(app, tmp_path, odd):
    found = hosted(app, tmp_path, odd=odd)
    alone = {"1", "2", "3"} - ({"1", "3"} if odd == "raises" else set())
    for number, metrics in found["train"].items():
        assert metrics["loss"] == pytest.approx(2.0 if number in alone else 11 / 6), (number, metrics)


def test_an_own_strategy_asks_and_adds_as_it_says(app, tmp_path):
    (reason,) = plan_of(app, odd="subclass").reasons
    assert reason.startswith("Own is a subclass of FedAvg in odd_forms_app.py:")
    found = hosted(app, tmp_path, odd="subclass")
    assert {number: metrics["heard"] for number, metrics in found["evaluate"].items()} == {"1": 3, "2": 3, "3": 3}
    assert all(metrics["least"] == 0.5 for metrics in found["evaluate"].values())


def test_a_run_config_of_nested_tables_takes_a_value_of_each_type(app, tmp_path):
    given = {"deep.er.flag": True, "deep.er.rate": 2, "deep.er.word": "\u00df", "deep.er.number": -5, "of round": 0}
    for config in (natively(app, tmp_path / "n", **given)["config"], hosted(app, tmp_path / "h", **given)["config"]):
        assert {key: config[key] for key in given} == given
        assert type(config["deep.er.rate"]) is float
    refused = {"deep.er.flag": 1, "deep.er.rate": "2", "deep.er.number": 1.5, "deep.er": 1}
    with pytest.raises(ValueError, match=r"^task\.deep\.er\.flag: expected bool, got 1; ") as told:
        app.run_config(refused)
    found = [fault.partition(":")[0] for fault in str(told.value).split("; ")]
    assert found == [f"task.{key}" for key in refused], "all of them at once"


def test_an_integer_that_moves_further_than_its_dtype_reaches_is_refused_by_name(app):
    from atoll.flower.bench import ClientBench
    from atoll.task.errors import TaskBroken
    from tests.flower.test_records import record

    bench = ClientBench(app, {"site": "node-0"})
    version = {"n": np.array([-(2**31), 5], np.int32)}
    near = bench._update(record(n=np.array([-(2**31) + 7, -5], np.int32)), version)
    assert near["n"].tolist() == [7, -10]
    with pytest.raises(TaskBroken, match="n: an integer has moved further than int32 reaches"):
        bench._update(record(n=np.array([2**31 - 1, 5], np.int32)), version)
