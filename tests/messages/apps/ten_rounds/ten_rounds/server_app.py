"""A strategy of its own that draws nodes and noise from the generators, so that nothing native fits."""

import json
import random
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Noisy(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        noise = np.random.default_rng(random.getrandbits(32)).normal(size=8)
        return ArrayRecord({"w": Array(arrays["w"].numpy() + noise * np.random.random())}), metrics


@app.main()
def main(grid, context):
    strategy = Noisy(fraction_train=0.5, min_train_nodes=2, fraction_evaluate=0.34, min_evaluate_nodes=1)
    rounds = context.run_config["num-server-rounds"]
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(8))}), num_rounds=rounds)
    calls = {number: metrics["calls"] for number, metrics in result.train_metrics_clientapp.items()}
    losses = {number: metrics["loss"] for number, metrics in result.evaluate_metrics_clientapp.items()}
    written = {"w": result.arrays["w"].numpy().tolist(), "calls": calls, "losses": losses}
    Path("result.json").write_text(json.dumps(written))
