"""A client that counts its trainings in its state, and draws noise."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    calls = context.state["calls"]["n"] + 1 if "calls" in context.state else 1
    context.state["calls"] = MetricRecord({"n": calls})
    shift = (1 + context.node_config["partition-id"]) * calls + np.random.random()
    arrays = ArrayRecord({"w": Array(0.5 * message.content["arrays"]["w"].numpy() + shift)})
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1, "calls": calls})}), reply_to=message
    )


@app.evaluate()
def evaluate(message, context):
    loss = float(np.abs(message.content["arrays"]["w"].numpy()).sum())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": loss})}), reply_to=message)
