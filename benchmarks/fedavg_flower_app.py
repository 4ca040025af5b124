"""The app of `flower_app`, which runs on both sides unmodified: FedAvg of a model without training.

Each node returns the model plus a number of its own, in one pass, as Flower stores equal content once. The end of each
round goes to a file, one line of JSON each: `evaluate_fn`, which notes it, is called after each round on both sides.
"""

import json
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client_app = ClientApp()  # Flower looks for these names in the text
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Return the model plus a number of this node."""
    offset = np.float32(1e-3 * (1 + int(context.node_config["partition-id"])))
    model = message.content.array_records["arrays"]
    arrays = ArrayRecord({name: Array(array.numpy() + offset) for name, array in model.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})})
    return Message(content=content, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the number of rounds in the app's configuration."""
    config = context.run_config
    generator, count, nodes = np.random.default_rng(1), int(config["num-tensors"]), int(config["num-clients"])
    size = int(config["num-elements"]) // count
    model = {f"w{number}": Array(generator.standard_normal(size, np.float32)) for number in range(count)}
    out = str(config["out"])

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"round": server_round, "ended_at": time.time()}) + "\n")
        return MetricRecord({"sum": float(arrays["w0"].numpy()[:10].sum())})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, ArrayRecord(model), num_rounds=int(config["num-rounds"]), evaluate_fn=note)
