"""An app whose nodes give the same replies in each round: arrays and a number of examples each, whatever they get."""

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server, client = ServerApp(), ClientApp()
given, results = {}, []
"""What is played: the `strategy`, the `initial` arrays, the `replies` by node; and the results."""


def record_of(arrays):
    return ArrayRecord({name: Array(values) for name, values in arrays.items()})


@server.main()
def main(grid, context):
    first = record_of(given["initial"])
    results.append(given["strategy"].start(grid, first, context.run_config["rounds"]))


@client.train()
def train(message, context):
    arrays, count = given["replies"][context.node_config["partition-id"]]
    reply = {"arrays": record_of(arrays), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(reply), reply_to=message)
