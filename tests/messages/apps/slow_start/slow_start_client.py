"""A client whose import takes as long as SLOW_START says, as that of a large library may."""

import os
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

time.sleep(float(os.environ.get("SLOW_START", "0")))
app = ClientApp()


@app.train()
def train(message, context):
    calls = 1 + (context.state["calls"]["n"] if "calls" in context.state else 0)
    context.state["calls"] = MetricRecord({"n": calls})
    time.sleep(1.0)  # so that a kill comes before the reply
    place = 1 + context.node_config["partition-id"]
    moved = message.content["arrays"]["w"].numpy() + np.float32(0.1) * np.arange(3, dtype=np.float32) * place * calls
    told = {"calls": calls, "run_id": context.run_id, "asked": message.metadata.message_id}
    told |= {"created": message.metadata.created_at, "run_of_message": message.metadata.run_id}
    records = {"arrays": ArrayRecord({"w": Array(moved)}), "told": ConfigRecord(told)}
    return Message(RecordDict(records), reply_to=message)
