"""An app whose arrays, records, metrics and configs are those of a case: odd, and allowed by Flower."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

server, client = ServerApp(), ClientApp()
results, trained, echoed = [], [], []


@dataclass
class Case:
    """What an app sends under FedAvg."""

    arrays: dict[str, Any] = field(default_factory=lambda: {"w": np.array([1.0, 2.0], np.float32)})
    config: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[dict[str, Any], ...] = ({"loss": 0.5}, {"loss": 2.0})
    """Those of each node's replies, beside the weight."""
    weights: tuple[Any, Any] = (1, 3)
    more: dict[str, Any] = field(default_factory=dict)
    """Further records of a reply to train."""
    of_evaluate: dict[str, Any] = field(default_factory=dict)
    """Further records of a reply to evaluate."""
    names: dict[str, str] = field(default_factory=dict)
    """Arguments of the strategy."""


def arrays(*values, **named):
    return {f"a{place}": value for place, value in enumerate(values)} | named


def f32(*values):
    return np.array(values, np.float32)


def ready(**named):
    return ArrayRecord({key: Array(np.asarray(value)) for key, value in named.items()})


NAN, INF = float("nan"), float("inf")

CASES = {
    "float32": Case(),
    "float64": Case(arrays(np.array([1.0, 1 / 3]))),
    "float16": Case(arrays(np.array([1.0, 0.5], np.float16))),
    "zero-dim": Case(arrays(np.array(2.0, np.float32), np.float64(0.25))),
    "empty": Case(arrays(np.zeros(0, np.float32), f32(1.0))),
    "empty matrix": Case(arrays(np.zeros((3, 0, 2), np.float32), f32(1.0))),
    "only empty": Case(arrays(np.zeros(0, np.float32))),
    "int64": Case(arrays(np.array([4, 8]), np.array(7))),
    "int8 and uint8": Case(arrays(np.array([4, -8], np.int8), np.array([[200]], np.uint8))),
    "uint32": Case(arrays(np.array([4], np.uint32))),
    "bool": Case(arrays(np.array([True, False]))),
    "complex": Case(arrays(np.array([1 + 2j], np.complex64))),
    "big endian": Case(arrays(np.array([1.0, 2.0], ">f4"))),
    "long double": Case(arrays(np.array([1.0, 2.0], np.longdouble))),
    "Fortran order": Case(arrays(np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)))),
    "a view": Case(arrays(np.arange(12.0, dtype=np.float32).reshape(3, 4)[::2, ::-1])),
    "many dimensions": Case(arrays(np.ones((1,) * 12 + (3,), np.float32))),
    "many arrays": Case({str(place): f32(place) for place in range(150)}),
    "odd names": Case({"z": f32(1), "a/b": f32(2), "ä ö": f32(3), "10": f32(4), "9": f32(5), " ": f32(6)}),
    "large values": Case(arrays(f32(1e30, -1e30, 1e-30))),
    "no array": Case({}),
    "no metrics": Case(metrics=({}, {})),
    "NaN metric": Case(metrics=({"loss": NAN, "acc": 1.0}, {"loss": 2.0, "acc": 0.0})),
    "NaN metrics": Case(metrics=({"loss": NAN}, {"loss": NAN})),
    "list of metrics": Case(metrics=({"c": [1.0, 2.0, 3.0]}, {"c": [3.0, 2.0, 1.0]})),
    "NaN in a list": Case(metrics=({"c": [1.0, NAN]}, {"c": [3.0, 2.0]})),
    "empty list": Case(metrics=({"c": [], "loss": 1.0}, {"c": [], "loss": 1.0})),
    "integers": Case(metrics=({"n": 2**40, "k": [1, 2]}, {"n": 3, "k": [3, 4]})),
    "name with a bracket": Case(metrics=({"recall[1]": 0.5, "a[b]": 1.0}, {"recall[1]": 1.0, "a[b]": 0.0})),
    "config": Case(config={"i": 1, "f": 0.5, "s": "text", "b": True, "ints": [1, 2], "strs": ["a", ""], "none": []}),
    "dotted config": Case(config={"opt.lr": 0.5, "a b": [True, False], "": 2.5}),
    "no number": Case(config={"rate": NAN, "rates": [0.5, INF]}),
    "edges of numbers": Case(config={"tiny": 5e-324, "zero": -0.0, "large": -(2**63)}),
    "bytes": Case(config={"key": b"\x00\xff"}),
    "list of bytes": Case(config={"keys": [b"\x00", b""]}),
    "weight of a fraction": Case(weights=(0.5, 1.5)),
    "weight of a whole float": Case(weights=(1.0, 3.0)),
    "NaN weight": Case(weights=(NAN, NAN)),
    "infinite weight": Case(weights=(INF, 1)),
    "list of weights": Case(weights=([1, 2], [1, 2])),
    "no examples at one": Case(weights=(0, 3)),
    "two records of arrays": Case(more={"second": ready(v=f32(1.0))}),
    "two records of metrics": Case(more={"second": MetricRecord({"v": 1.0})}),
    "a config in replies": Case(more={"why": ConfigRecord({"x": [b"1"]})}, of_evaluate={"why": ConfigRecord({"y": 1})}),
    "arrays of evaluate": Case(of_evaluate={"logits": ready(v=f32(1.0, 2.0))}),
    "other names": Case(names={"arrayrecord_key": "model", "configrecord_key": "cfg", "weighted_by_key": "n"}),
}  # fmt: skip

RECORDS = {
    "nothing": {},
    "several records of arrays": {"one": ready(w=f32(1)), "two": ready(w=np.array([1, 2])), "three": ready()},
    "text and time": {"t": ready(w=np.array(["ä", "long"]), d=np.array(["2024-01-01"], "M8[D]"))},
    "fields": {"f": ready(w=np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]))},
    "not finite": {"a": ready(w=f32(NAN, INF)), "m": MetricRecord({"x": NAN, "y": [INF, 1.0]})},
    "an own kind": {"a": ArrayRecord({"w": Array(dtype="own", shape=(2,), stype="own.pickled", data=b"\x80\x05")})},
    "large integers": {"m": MetricRecord({"x": 2**63 - 1, "y": [-(2**63), 0]})},
    "empty lists": {"c": ConfigRecord({"a": [], "b": [b""], "c": b"", "d": [""]}), "m": MetricRecord({"e": []})},
    "booleans": {"a": ready(w=np.array(True), v=np.zeros((0, 2), bool)), "c": ConfigRecord({"b": [True, False]})},
    "empty name": {"": ready(w=f32(1)), "c": ConfigRecord({"": ""})},
}  # fmt: skip


@server.main()
def main(grid, context):
    case = CASES[context.run_config["case"]]
    rounds = context.run_config["rounds"]
    strategy = FedAvg(min_train_nodes=2, min_evaluate_nodes=2, min_available_nodes=2, **case.names)
    first, config = ready(**case.arrays), ConfigRecord(dict(case.config))
    results.append(strategy.start(grid, first, rounds, train_config=config, evaluate_config=ConfigRecord()))


echoing = ServerApp()


@echoing.main()
def echo_all(grid, context):
    for kind in ("query", "train.echo"):
        for records in RECORDS.values():
            sent = [Message(RecordDict(dict(records)), node, kind) for node in grid.get_node_ids()]
            echoed.append(
                [reply.content if reply.has_content() else reply.error for reply in grid.send_and_receive(sent)]
            )


@client.train("echo")
@client.query()
def echo(message, context):
    records = {f"{name}{context.node_config['partition-id']}": record for name, record in message.content.items()}
    return Message(RecordDict(records), reply_to=message)


def reply_to(message, context, config_key):
    case, node = CASES[context.run_config["case"]], context.node_config["partition-id"]
    weight = {case.names.get("weighted_by_key", "num-examples"): case.weights[node]}
    return case, node, {"metrics": MetricRecord({**case.metrics[node], **weight})}


@client.train()
def train(message, context):
    case, node, records = reply_to(message, context, "config")
    config = dict(message.content[case.names.get("configrecord_key", "config")])
    trained.append((node, config))
    given = message.content[case.names.get("arrayrecord_key", "arrays")]
    local = {key: moved(array.numpy(), node, np.asarray(case.arrays[key]).dtype) for key, array in given.items()}
    return Message(RecordDict({"arrays": ready(**local), **records, **case.more}), reply_to=message)


def moved(values, node, dtype):
    """Return the values after a training; those that began as integers stay, also as the floats of a mean."""
    return values if dtype.kind in "biu" else np.asarray(values * (1 + node), values.dtype)


@client.evaluate()
def evaluate(message, context):
    case, _, records = reply_to(message, context, "config")
    return Message(RecordDict({**records, **case.of_evaluate}), reply_to=message)
