"""An app without randomness, with any strategy: arrays of several shapes, a counter of its own, metrics in a list."""

import math

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp, strategy

OPTIONS = {
    "FedAvgM": {"server_learning_rate": 0.8, "server_momentum": 0.5},
    "FedAdagrad": {"eta": 0.05, "tau": 0.01},
    "FedAdam": {"eta": 0.02, "beta_1": 0.8, "beta_2": 0.95},
    "FedYogi": {"eta": 0.03},
    "FedProx": {"proximal_mu": 0.25},
    "FedTrimmedAvg": {"beta": 0.2},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 4},
    "Bulyan": {"num_malicious_nodes": 1},
}
server, client = ServerApp(), ClientApp()
results = []


def first_arrays(wide):
    rng = np.random.default_rng(3)
    arrays = {"w": rng.normal(size=(5, 4)), "b": rng.normal(size=4), "a.scale": rng.normal(size=())}
    arrays = {name: np.asarray(array, np.float64 if wide else np.float32) for name, array in arrays.items()}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


@server.main()
def main(grid, context):
    config = context.run_config
    kind = getattr(strategy, config["strategy"])
    made = kind(min_train_nodes=7, min_available_nodes=7, min_evaluate_nodes=7, **OPTIONS.get(config["strategy"], {}))
    result = made.start(
        grid=grid,
        initial_arrays=first_arrays(config["wide"]),
        train_config=ConfigRecord({"lr": 0.1, "powers": [1, 2]}),
        evaluate_config=ConfigRecord({"word": "measure"}),
        num_rounds=config["rounds"],
        evaluate_fn=measure,
    )
    results.append(result)
    if config["out"]:
        np.savez(config["out"], **{name: array.numpy() for name, array in result.arrays.items()})


def measure(server_round, arrays):
    return MetricRecord({"norm": float(sum(np.square(array.numpy()).sum() for array in arrays.values()))})


@client.train()
def train(message, context):
    content, node = message.content, context.node_config["partition-id"]
    config = content["config"]
    context.state["calls"] = MetricRecord({"n": context.state["calls"]["n"] + 1 if "calls" in context.state else 1})
    calls, pull = context.state["calls"]["n"], config.get("proximal-mu", 0.0)
    arrays = {}
    for name, array in content["arrays"].items():
        values = array.numpy()
        grid = np.arange(values.size, dtype=values.dtype).reshape(values.shape)
        step = np.sin(grid + node + calls) * config["lr"] * sum(config["powers"]) * (1 - pull)
        arrays[name] = Array(np.asarray(values + step * (5 if node == 6 else 1), values.dtype))
    loss = math.cos(node) + config["server-round"]
    metrics = {"num-examples": 10 + 3 * node, "loss": loss, "by_class": [float(node), 1.0], "calls": calls}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    assert message.content["config"]["word"] == "measure"
    norm = float(sum(np.abs(array.numpy()).sum() for array in message.content["arrays"].values()))
    metrics = {"num-examples": 1 + context.node_config["partition-id"], "norm": norm}
    metrics |= {"round": message.content["config"]["server-round"]}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


@client.query("stats")
def stats(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"id": context.node_config["partition-id"]})}), reply_to=message)
