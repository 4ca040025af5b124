"""The side of Flower in `simulation`, run by the Python of .venv-peers: its simulation on Ray with its FedAvg.

.venv-peers/bin/python -m benchmarks.peer_flower SETTING CPUS_OF_A_CLIENT THREADS
"""

import logging
import os
import sys

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.learners import BATCH_SIZE, LR, RoundRequests, accuracy, clients_of, model_of, say
from benchmarks.tight_loops import SETTINGS


def client_app(name: str, threads: int) -> ClientApp:
    """Return a client that trains as in Flower's quick start."""
    app = ClientApp()

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(threads)
        inputs, targets = clients_of(name)[int(context.node_config["partition-id"])]
        model = model_of(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for rows in torch.randperm(len(targets)).split(BATCH_SIZE):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(targets)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(name: str) -> ServerApp:
    """Return FedAvg without an evaluation, which runs rounds on demand."""
    app = ServerApp()
    _, _, num_clients, _, cohort = SETTINGS[name]

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=cohort / num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=cohort,
            min_available_nodes=num_clients,
        )
        arrays, requests = ArrayRecord(model_of(name).state_dict()), RoundRequests()
        while len(list(grid.get_node_ids())) < num_clients:
            pass
        arrays = one_round(strategy, grid, arrays)  # starts Ray's actors
        while requests.another():
            arrays = one_round(strategy, grid, arrays)
        say(accuracy=accuracy(name, list(arrays.to_torch_state_dict().values())))

    return app


def one_round(strategy: FedAvg, grid: Grid, arrays: ArrayRecord) -> ArrayRecord:
    """Run one round as `FedAvg.start` does."""
    return strategy.start(grid, arrays, num_rounds=1).arrays


def main() -> None:
    name, cpus, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app(name),
        client_app(name, threads),
        num_supernodes=SETTINGS[name][2],
        backend_config={
            "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
            "init_args": {"num_cpus": len(os.sched_getaffinity(0))},
        },
    )


if __name__ == "__main__":
    main()
