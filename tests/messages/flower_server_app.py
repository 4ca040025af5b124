"""A ServerApp with one of Flower's own strategies, for tests."""

import hashlib
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = {"fedavg": FedAvg, "fedadam": FedAdam}[context.run_config["strategy"]](
        min_available_nodes=2, min_train_nodes=2, min_evaluate_nodes=2
    )
    arrays = ArrayRecord({"w": Array(np.zeros((3, 2))), "b": Array(np.zeros(2, np.float32))})
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=3, timeout=600)
    digests = {key: hashlib.sha256(array.numpy().tobytes()).hexdigest() for key, array in result.arrays.items()}
    losses = [result.evaluate_metrics_clientapp[number]["loss"] for number in (1, 2, 3)]
    w = result.arrays["w"].numpy().tolist()
    Path("result.json").write_text(json.dumps({"digests": digests, "losses": losses, "w": w}))
