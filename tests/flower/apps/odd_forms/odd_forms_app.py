"""An app of many odd shapes: `odd` names the one that it has, in its arrays, its replies or its strategy."""

import json
import math
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp, strategy

server, client = ServerApp(), ClientApp()
results = []

FIRST = {
    "dims": {
        "scalar": np.float32(2.0),
        "row": np.zeros((1, 0, 3), np.float32),
        "deep": np.ones((1, 1, 1, 2), np.float32),
    },
    "half": {"h": np.linspace(0, 1, 5).astype(np.float16), "d": np.linspace(0, 1, 3)},
    "whole": {"n": np.array([2**40, -(2**40)]), "u": np.array([1, 254], np.uint8), "w": np.ones(2, np.float32)},
    "flags": {"flag": np.array([True, False]), "w": np.ones(2, np.float32)},
    "unicode": {
        "gewicht.\u00df/\U0001f600": np.ones(2, np.float32),
        "": np.ones(1, np.float32),
        "a b\n": np.zeros(3, np.float32),
    },
    "order": {
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "strided": np.arange(8, dtype=np.float32)[::2],
    },
}
PLAIN = {"w": np.arange(4, dtype=np.float32)}


class Own(strategy.FedAvg):
    """Trains every second node alone, and takes the least of the losses."""

    def configure_train(self, server_round, arrays, config, grid):
        return [*super().configure_train(server_round, arrays, config, grid)][::2]

    def aggregate_evaluate(self, server_round, replies):
        losses = [reply.content["metrics"]["loss"] for reply in replies if reply.has_content()]
        return MetricRecord({"least": min(losses), "heard": len(losses)})


@server.main()
def main(grid, context):
    config = context.run_config
    kind = Own if config["odd"] == "subclass" else strategy.FedAvg
    arrays = FIRST.get(config["odd"], PLAIN)
    train = {"none": [], "listed": ["a", "\U0001f600"], "key \u00df": 1, "flags": [True, False], "rates": [0.5, 1e300]}
    if config["odd"] == "config":
        train |= {"data": b"\x00\xff", "datas": [b"", b"x"], "large": 2**62}
    result = kind(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=3).start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()}),
        train_config=ConfigRecord(train),
        num_rounds=config["rounds"],
    )
    results.append(result)
    of = {
        "train": {number: dict(found) for number, found in result.train_metrics_clientapp.items()},
        "evaluate": {number: dict(found) for number, found in result.evaluate_metrics_clientapp.items()},
        "config": dict(config),
        "arrays": {
            name: [array.dtype, list(array.shape), array.numpy().ravel().tolist()]
            for name, array in result.arrays.items()
        },
    }
    Path(config["out"] or "result.json").write_text(json.dumps(of))


def metrics(odd, node, server_round):
    found = {"num-examples": 1 + node, "loss": 0.5 + node, "listed": [1.0, float(node)], "none": []}
    if odd == "no_examples" and node == 1:
        del found["num-examples"]
    if odd == "nan" and node == 1:
        found["loss"] = math.nan
    if odd == "huge":
        found["huge"] = 2**60 + node
    if odd == "unicode":
        found["größe \U0001f600"] = 1.0
    if odd == "zero":
        found["num-examples"] = 0 if node == 1 else 1
    return found


def count_in_state(state, server_round):
    before = state.get("seen")
    assert (before is None) == (server_round == 1)
    if before is not None:
        assert (before["none"], before["data"], before["deep"]) == ([], [b"\x00"], [1.5, 2.5])
    state["seen"] = ConfigRecord({"none": [], "data": [b"\x00"], "deep": [1.5, 2.5]})
    state["array"] = ArrayRecord({"": Array(np.zeros((0, 2), np.complex64))})
    state["nothing"] = MetricRecord()


def records_of(odd, node, arrays, server_round):
    records = {"arrays": ArrayRecord(arrays)}
    if odd != "no_metrics":
        records["metrics"] = MetricRecord(metrics(odd, node, server_round))
    if odd == "two_records":
        records["more"] = ArrayRecord({"x": Array(np.ones(1))})
    if odd == "extra_config":
        records["said"] = ConfigRecord({"a": b"x"})
    return records


@client.train()
def train(message, context):
    odd, node = context.run_config["odd"], context.node_config["partition-id"]
    config = message.content["config"]
    found = [config[key] for key in ("none", "listed", "rates", "flags")]
    assert found == [[], ["a", "\U0001f600"], [0.5, 1e300], [True, False]]
    assert config["flags"][0] is True
    if odd == "config":
        assert (config["data"], config["datas"], config["large"]) == (b"\x00\xff", [b"", b"x"], 2**62)
    if odd == "state":
        count_in_state(context.state, config["server-round"])
    if odd == "raises" and (node, config["server-round"]) == (1, 2):
        raise KeyError("gone \U0001f600")
    moved = {}
    for name, array in message.content["arrays"].items():
        values = array.numpy()
        step = values.dtype.type(1 + node)
        moved[name] = Array(~values if values.dtype == bool else np.asarray(values + step, values.dtype))
    if odd == "other_keys" and node == 1:
        moved["more"] = Array(np.ones(1, np.float32))
    if odd == "nan_array" and node == 1:
        moved["w"] = Array(np.full(4, np.nan, np.float32))
    return Message(RecordDict(records_of(odd, node, moved, config["server-round"])), reply_to=message)


@client.evaluate()
def evaluate(message, context):
    odd, node = context.run_config["odd"], context.node_config["partition-id"]
    return Message(RecordDict({"metrics": MetricRecord(metrics(odd, node, 0))}), reply_to=message)
