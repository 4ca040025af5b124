"""The other side of `round_vs_flower`: a Flower app, run by the Python of .venv-peers. It has no code of Atoll's.

A round sends the model to every node; each node returns the model plus a random number in one pass, different on every
client, as Flower stores equal content once; Flower's weighted mean ends the round. The seconds of each round go to a
file, one line of JSON each.
"""

import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

client_app = ClientApp()  # Flower looks for these names in the text
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model plus a number of this node."""
    assert message.content is not None
    offset = np.float32(1e-3 * (1 + context.node_id % 1009))
    model = message.content.array_records["arrays"]
    arrays = ArrayRecord({name: Array(array.numpy() + offset) for name, array in model.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})})
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the number of rounds in the app's configuration."""
    config: Any = context.run_config
    generator, count = np.random.default_rng(1), int(config["num-tensors"])
    model = ArrayRecord(
        {
            f"w{number}": Array(generator.standard_normal(int(config["num-elements"]) // count, np.float32))
            for number in range(count)
        }
    )
    while len(nodes := _nodes(grid)) < int(config["num-clients"]):
        time.sleep(0.2)
    for number in range(int(config["num-rounds"])):
        begun = time.time()
        content = RecordDict({"arrays": model})
        messages = [Message(content, dst_node_id=node, message_type="train", group_id=str(number)) for node in nodes]
        replies = [reply.content for reply in grid.send_and_receive(messages) if reply.content is not None]
        if len(replies) != len(nodes):
            raise RuntimeError(f"{len(replies)} of {len(nodes)} nodes have answered without an error")
        model = aggregate_arrayrecords(replies, "num-examples")
        with open(str(config["out"]), "a", encoding="utf-8") as file:
            file.write(json.dumps({"round": number, "seconds": time.time() - begun}) + "\n")


def _nodes(grid: Grid) -> list[int]:
    found: Iterable[int] = grid.get_node_ids()
    return sorted(found)
