"""The other side of `startup`: the digits of `atoll new` as a Flower app, run by the Python of .venv-peers.

Three clients hold the same thirds of the images as the sites of Atoll's task, with the same model and local training;
Flower's FedAvg takes the mean. The end of each round goes to a file, one line of JSON each.
"""

import json
import os
import time
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

client_app = ClientApp()  # Flower looks for these names in the text
server_app = ServerApp()


def make_model() -> nn.Module:
    """Return the small network of `atoll new`."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one epoch on every fourth image, from a number on that follows from the node."""
    digits = np.loadtxt(os.environ["ATOLL_BENCH_DIGITS"], delimiter=",")[context.node_id % 3 :: 4]
    images = torch.from_numpy(digits[:, :-1] / 16).float()
    targets = torch.from_numpy(digits[:, -1].astype(int))
    assert message.content is not None
    model = make_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randperm(len(targets)).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), targets[rows]).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(targets)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the number of rounds in the app's configuration."""
    config: Any = context.run_config
    count, arrays = int(config["num-clients"]), ArrayRecord(make_model().state_dict())
    while len(list(grid.get_node_ids())) < count:
        time.sleep(0.05)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    for number in range(int(config["num-rounds"])):
        begun = time.time()
        arrays = strategy.start(grid, arrays, num_rounds=1).arrays
        with open(str(config["out"]), "a", encoding="utf-8") as file:
            row = {"round": number, "seconds": time.time() - begun, "ended_at": time.time()}
            file.write(json.dumps(row) + "\n")
