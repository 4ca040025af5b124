"""A task as a Flower app trains as it does in a run of Atoll: with Flower's own loop, strategies and aggregation."""

import json
import sys

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.serverapp.strategy import Strategy, fedavg
from safetensors.numpy import load_file

import atoll
from atoll.flower.app import flattened, read_app
from atoll.flower.exported import client
from atoll.flower.exported.client import Client
from atoll.flower.exported.run_values import RunValues
from atoll.task.apps import with_app
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.randomness import training_seed
from tests.cli.invoking import invoke
from tests.flower.exported.tasks import TASKS
from tests.flower.flowers_own import result_of
from tests.turns import in_turn

ROUNDS, TOLERANCE = 6, 1e-6
FLOWERS = "atoll.flower.native"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a simulation has it
    yield
    torch.set_num_threads(before)


def settings_of(given):
    return {"rounds": ROUNDS, "round.cohort_size": 3, "seed": 5} | given


def exported(tmp_path, name, given):
    """Return the last model of the app, run by Flower's own loop, and its module."""
    overrides = [part for key, value in settings_of(given).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    folder = tmp_path / "app"
    done = invoke("flower", "export", f"{TASKS}:{name}", folder, *overrides)
    assert done.exit_code == 0, done.output
    app = read_app(with_app(str(folder)))
    try:
        result_of(app, 3)
    finally:
        sys.path.remove(str(folder))
        for module in [module for module in sys.modules if module.partition(".")[0] == "run_app"]:
            del sys.modules[module]
    return load_file(tmp_path / "final_model.safetensors")


def simulated(name, given):
    settings = {"simulation.engine": "sequential"} if name != "arrays" else {}
    return atoll.simulate(f"{TASKS}:{name}", set=settings | settings_of(given), progress=False).model()


# A small tau, or a small variance of Adam, would turn the last bits of float32 into large steps.
ADAM = {f"optimizer.options.{name}": value for name, value in {"beta1": 0.9, "beta2": 0.99, "tau": 0.1}.items()}
CASES = {
    "plain": ("plain", {}),
    "options": ("plain", {"task.shift": 0.5, "local.lr": 0.05}),
    "schedule": ("plain", {"schedule.local.lr.kind": "cosine"}),
    "uniform": ("plain", {"aggregation.weighting": "uniform"}),
    "layers at home": ("with_layers_at_home", {}),
    "kept optimizer": ("with_a_kept_optimizer", {}),
    "own algorithm": ("with_an_algorithm", {}),
    "arrays": ("arrays", {"local.rate": 0.25}),
    "a list": ("arrays", {"schedule.local.rate.kind": "list", "schedule.local.rate.values": [0.5, 0.125]}),
    "momentum": ("without_buffers", {"optimizer.name": "fedavgm", "optimizer.lr": 0.5}),
    "adam": ("without_buffers", {"optimizer.name": f"{FLOWERS}.optimizers:FedAdam", **ADAM}),
    "adagrad": (
        "without_buffers",
        {"optimizer.name": f"{FLOWERS}.optimizers:FedAdagrad", "optimizer.options.tau": 0.1},
    ),
    "median": ("plain", {"aggregation.rule": "median"}),
    "trimmed mean": ("plain", {"aggregation.rule": "trimmed_mean", "aggregation.malicious": 0.34}),
    "flower's trimmed mean": ("plain", {"aggregation.rule": f"{FLOWERS}.rules:trimmed_mean_0_4"}),
    "krum": ("plain", {"aggregation.rule": f"{FLOWERS}.rules:krum_1_3"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"), [in_turn(*values, number=n, days=2, id=id) for n, (id, values) in enumerate(CASES.items())]
)
def test_flowers_own_loop_gives_the_model_of_a_run_here(tmp_path, monkeypatch, name, given):
    monkeypatch.chdir(tmp_path)
    theirs, ours = exported(tmp_path, name, given), simulated(name, given)
    assert ours.keys() == theirs.keys()
    for key, expected in ours.items():
        assert theirs[key].dtype == expected.dtype
        if expected.dtype.kind == "i" and "aggregation.rule" in given:
            continue  # a rule leaves the mean of integers here, and Flower's strategy has none: the export says so
        distance = np.linalg.norm(theirs[key].astype(float) - expected) / max(np.linalg.norm(expected), 1e-12)
        assert distance <= TOLERANCE, (key, distance)


@pytest.mark.slow
def test_an_exact_mean_gives_the_same_bits(tmp_path, monkeypatch):
    """Flower adds in float32, in the order of the replies: the trainings themselves are those of agents to the bit."""

    def exact(records, key):
        weights = [next(iter(record.metric_records.values()))[key] for record in records]
        rows = [record.array_records["arrays"] for record in records]
        sums = {
            name: sum(row[name].numpy() * np.float64(weight) for row, weight in zip(rows, weights, strict=True))
            for name in rows[0]
        }
        return ArrayRecord({name: Array((total / sum(weights)).astype(np.float32)) for name, total in sums.items()})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fedavg, "aggregate_arrayrecords", exact)
    monkeypatch.setattr(client, "moved", lambda x, u: {name: x[name].astype(np.float64) + u[name] for name in x})
    theirs, ours = exported(tmp_path, "without_buffers", {}), simulated("without_buffers", {})
    assert {name: array.tobytes() for name, array in theirs.items()} == {
        name: array.tobytes() for name, array in ours.items()
    }


@pytest.mark.slow
def test_metrics_are_those_of_the_pooled_data(tmp_path, monkeypatch):
    """As a simulation measures them, from sums: a mean of the sites' F1 scores would be another number."""
    results, start = [], Strategy.start
    monkeypatch.setattr(Strategy, "start", lambda *args, **named: results.append(start(*args, **named)) or results[-1])
    monkeypatch.chdir(tmp_path)
    given = {"evaluation.clients_every": 1, "rounds": 2}
    exported(tmp_path, "without_buffers", given)
    (theirs,) = results
    ours = atoll.simulate(
        f"{TASKS}:without_buffers",
        set={"simulation.engine": "sequential"} | settings_of({}) | given,
        progress=False,
    ).report.rounds
    for row in ours:
        number = row["version"]
        for mine, found in (
            (row["server"], theirs.evaluate_metrics_serverapp[number]),
            (row["clients"], theirs.evaluate_metrics_clientapp[number]),
            (row["train"], theirs.train_metrics_clientapp[number]),
        ):
            assert dict(found) == pytest.approx(mine, rel=1e-5)


def node(config, name="plain", run_config=()):
    values = RunValues("run", 2, 5, dict(run_config))
    return Context(1, 1, config, RecordDict(), dict(flattened(values.config))), f"{TASKS}:{name}"


def train_message(content):
    return Message(metadata=Metadata(1, "1", 1, 2, "", "1", 0.0, 1e12, "train"), content=content)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "partition-id is None (allowed: 0 to 2, for west, mid, east)"),
        ({"partition-id": 3}, "partition-id is 3 (allowed: 0 to 2"),
        ({"partition-id": -1}, "--node-config 'site=\"NAME\"'"),
    ],
)
def test_a_node_without_a_site_is_told_how_to_name_it(config, says):
    context, reference = node(config)
    with pytest.raises(TaskBroken) as refused:
        Client(reference, context)
    assert says in str(refused.value)


def test_a_nodes_settings_are_over_those_of_the_task():
    version = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.zeros((3, 2), np.float32)), "steps": Array(np.zeros(()))})}
    )
    version["config"] = ConfigRecord({"server-round": 1})
    for config, rate in (({"site": "west"}, 0.5), ({"site": "west", "noise": 0.25}, 0.75)):
        context, reference = node(config, "arrays", {"rate": 0.5})
        reply = Client(reference, context).train(train_message(version)).content
        draws = np.random.RandomState(training_seed(5, "run", 1, "west") % 2**32)
        expected = np.float32(rate) * np.float32(len("west") + draws.rand())
        np.testing.assert_array_equal(reply["arrays"]["w"].numpy(), np.full((3, 2), expected, np.float32))
        assert reply["metrics"]["num-examples"] == 9


def test_a_message_of_another_model_is_refused_with_every_difference():
    version = RecordDict({"arrays": ArrayRecord({"w": Array(np.zeros((2, 2), np.float32)), "b": Array(np.zeros(1))})})
    version["config"] = ConfigRecord({"server-round": 1})
    context, reference = node({"site": "west"}, "arrays", {"rate": 0.5})
    with pytest.raises(TaskMismatch) as refused:
        Client(reference, context).train(train_message(version))
    assert all(what in str(refused.value) for what in ("steps is missing", "b is unknown", "w is F32 (2, 2)"))
