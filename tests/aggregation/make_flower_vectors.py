"""Writes flower_vectors.json: what Flower's own strategies make of three rounds of small updates.

Run once with Flower's environment: `make peers && .venv-peers/bin/python tests/aggregation/make_flower_vectors.py`.
Flower averages models; the JSON has updates, and what its global model becomes after each round.
"""

import json
from pathlib import Path

import flwr
import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy

NUM_CLIENTS, NUM_ROUNDS, SIZE = 9, 3, 6


class Proxy:
    """The part of a client that a strategy needs: a name."""

    def __init__(self, cid):
        self.cid = cid


def strategies(start):
    """Return the strategies by name, with the arguments of ours in the test."""
    first = {"initial_parameters": ndarrays_to_parameters([start])}
    return {
        "fedavg": strategy.FedAvg(**first),
        "fedavgm": strategy.FedAvgM(server_learning_rate=0.5, server_momentum=0.8, **first),
        "median": strategy.FedMedian(**first),
        "trimmed_mean": strategy.FedTrimmedAvg(beta=0.3, **first),
        "krum": strategy.Krum(num_malicious_clients=2, num_clients_to_keep=1, **first),
        "multi_krum": strategy.Krum(num_malicious_clients=2, num_clients_to_keep=5, **first),
    }


def main():
    rng = np.random.default_rng(2026)
    start = rng.standard_normal(SIZE).astype(np.float32)
    updates = rng.standard_normal((NUM_ROUNDS, NUM_CLIENTS, SIZE)).astype(np.float32)
    updates[:, -2:] *= 20  # two that are far from the others
    examples = rng.integers(10, 200, NUM_CLIENTS).tolist()
    models = {}
    for name, plan in strategies(start).items():
        model, models[name] = start, []
        weights = [1] * NUM_CLIENTS if "krum" in name else examples  # ours averages those that it selects alike
        for number in range(NUM_ROUNDS):
            replies = [
                (Proxy(str(k)), FitRes(Status(Code.OK, ""), ndarrays_to_parameters([model + u]), weights[k], {}))
                for k, u in enumerate(updates[number])
            ]
            parameters, _ = plan.aggregate_fit(number + 1, replies, [])
            model = parameters_to_ndarrays(parameters)[0].astype(np.float32)
            models[name].append(model.tolist())
    document = {
        "flwr": flwr.__version__,
        "start": start.tolist(),
        "updates": updates.tolist(),
        "num_examples": examples,
        "models": models,
    }
    Path(__file__).with_name("flower_vectors.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
