"""A ClientApp in a task that answers messages, for tests: the clients of `flower_server_app`."""

import time
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, Metadata, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from atoll.flower.app import node_id
from atoll.flower.records import from_content, to_content

app = ClientApp()
SHIFT = {"east": 1.0, "north": 2.0, "odd": 3.0}


@app.train()
def train(message, context):
    site, arrays = context.node_config["site"], message.content["arrays"]
    local = {key: array.numpy() + array.numpy().dtype.type(SHIFT[site]) for key, array in arrays.items()}
    if site == "odd":
        local["w"][0, 0] = np.nan
    metrics = MetricRecord({"num-examples": int(SHIFT[site]), "train_loss": 1.0})
    record = ArrayRecord({key: Array(array) for key, array in local.items()})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    loss = float(np.abs(message.content["arrays"]["w"].numpy()).sum())
    metrics = {"num-examples": 2, "loss": loss} | ({"extra": 1.0} if context.node_config["site"] == "odd" else {})
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


class Hosted:
    sites = ("east", "north", "odd")
    options: ClassVar = {"strategy": "fedavg"}

    def initial(self, seed):
        return {"w": np.zeros(1, np.float32)}

    def train(self, parameters, instructions):
        raise NotImplementedError

    def message(self, kind, content, *, site):
        metadata = Metadata(1, "1", 1, node_id(site), "", "", time.time(), 60.0, kind)
        context = Context(1, node_id(site), {"site": site}, RecordDict(), {})
        reply = app(Message(metadata=metadata, content=from_content(content)), context)
        return to_content(reply.content)


task = Hosted()
