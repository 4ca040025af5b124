"""The server: a loop of its own that asks each client first, then weighs the weights by the number of images."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the federation."""
    while len(nodes := sorted(grid.get_node_ids())) < context.run_config["min-nodes"]:
        time.sleep(0.1)
    asked = [_message({"question": ConfigRecord({"text": f"node {i}"})}, node, "query.labels", 0)
             for i, node in enumerate(nodes)]  # fmt: skip
    counts = {reply.metadata.src_node_id: reply.content["counts"]["of_digit"] for reply in grid.send_and_receive(asked)}
    arrays, history = ArrayRecord({"coef": Array(np.zeros((10, 64))), "intercept": Array(np.zeros(10))}), []
    for number in range(1, context.run_config["num-server-rounds"] + 1):
        content = {"arrays": arrays}
        replies = grid.send_and_receive([_message(content, node, MessageType.TRAIN, number) for node in nodes])
        sound = [reply for reply in replies if not reply.has_error()]
        calls = [reply.content["metrics"]["calls"] for reply in sound]
        shares = np.array([sum(counts[reply.metadata.src_node_id]) for reply in sound], float)
        arrays = _mean([reply.content["arrays"] for reply in sound], shares / shares.sum())
        replies = grid.send_and_receive(
            [_message({"arrays": arrays}, node, MessageType.EVALUATE, number) for node in nodes]
        )
        measured = [reply.content["metrics"] for reply in replies if not reply.has_error()]
        accuracy = sum(m["hits"] for m in measured) / sum(m["of"] for m in measured)
        history.append({"round": number, "accuracy": accuracy, "calls": calls})
        print(f"round {number}: accuracy {accuracy:.3f}, calls {calls}")
    Path("history.json").write_text(json.dumps(history))


def _mean(records, shares):
    keys = list(records[0])
    return ArrayRecord({
        key: Array(sum(share * record[key].numpy() for share, record in zip(shares, records, strict=True)))
        for key in keys
    })  # fmt: skip


def _message(content, node, kind, number):
    return Message(RecordDict(content), dst_node_id=node, message_type=kind, group_id=str(number))
