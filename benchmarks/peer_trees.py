"""The side of Flower in `trees`, run by the Python of .venv-peers: FedXgbBagging in its simulation on Ray.

    .venv-peers/bin/python -m benchmarks.peer_trees FOLDER CPUS_OF_A_CLIENT

The folder has `settings.json` (XGBoost's parameters, rounds) and `clients.npz` (features and labels of each client, by
number); it gets `model.json`, the ensemble in XGBoost's own form, and `rounds.json`. The client is that of Flower's
quick start for XGBoost; replies are aggregated in the order of the clients, so that ensembles can be compared.
"""

import json
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging
from flwr.simulation import run_simulation


class InOrder(FedXgbBagging):  # type: ignore[misc]
    """Flower's strategy, with the replies in the order of the clients; it notes each round's end and bytes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds: list[dict[str, float]] = []
        self._down = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the whole ensemble to each client."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._down = len(messages) * arrays["0"].numpy().nbytes
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Append the trees of the clients, in their order."""
        ordered = sorted(replies, key=lambda reply: reply.content["metrics"]["client"])
        up = sum(reply.content["arrays"]["0"].numpy().nbytes for reply in ordered)
        found = super().aggregate_train(server_round, ordered)
        self.rounds.append({"at": time.monotonic(), "down": self._down, "up": up})
        return found


def client_app(folder: Path) -> ClientApp:
    """Return the client of Flower's quick start for XGBoost, on data from a file."""
    app, settings = ClientApp(), json.loads((folder / "settings.json").read_text())
    parameters = settings["parameters"]

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        with np.load(folder / "clients.npz") as clients:
            data = xgboost.DMatrix(clients[f"features{client}"], clients[f"labels{client}"])
        known = message.content["arrays"]["0"].numpy().tobytes()
        if not known:
            booster = xgboost.train(parameters, data, num_boost_round=1)
        else:
            booster = xgboost.Booster(params=parameters)
            booster.load_model(bytearray(known))
            booster.update(data, booster.num_boosted_rounds())
            booster = booster[booster.num_boosted_rounds() - 1 : booster.num_boosted_rounds()]
        content = {
            "arrays": ArrayRecord([np.frombuffer(booster.save_raw("json"), np.uint8)]),
            "metrics": MetricRecord({"num-examples": data.num_row(), "client": client}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(folder: Path) -> ServerApp:
    """Return FedXgbBagging over all clients, without an evaluation."""
    app, settings = ServerApp(), json.loads((folder / "settings.json").read_text())

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        clients = settings["clients"]
        strategy = InOrder(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        empty = ArrayRecord([np.frombuffer(b"", np.uint8)])
        result = strategy.start(grid, empty, num_rounds=settings["rounds"])
        (folder / "model.json").write_bytes(result.arrays["0"].numpy().tobytes())
        (folder / "rounds.json").write_text(json.dumps(strategy.rounds))

    return app


def main() -> None:
    folder, cpus = Path(sys.argv[1]), float(sys.argv[2])
    logging.getLogger("flwr").setLevel(logging.ERROR)
    settings = json.loads((folder / "settings.json").read_text())
    run_simulation(
        server_app(folder),
        client_app(folder),
        num_supernodes=settings["clients"],
        backend_config={"client_resources": {"num_cpus": cpus, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    main()
