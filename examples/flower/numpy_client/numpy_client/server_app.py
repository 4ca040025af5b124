"""The server: FedAvg of before, with an evaluation of each round, and the last weights in a file."""

import numpy as np
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from numpy_client.task import first_parameters, load_data, measure, model_of


def weighted_average(metrics):
    """Return the mean accuracy of the clients, weighted by their images."""
    return {"accuracy": sum(n * m["accuracy"] for n, m in metrics) / sum(n for n, _ in metrics)}


def server_fn(context: Context):
    """Return the parts of the server."""
    rounds = context.run_config["num-server-rounds"]

    def evaluate(server_round, parameters, config):
        loss, accuracy = measure(model_of(parameters), *load_data(0, 1))
        print(f"round {server_round}: loss {loss:.3f}, accuracy {accuracy:.3f}")
        if server_round == rounds:
            np.savez("model.npz", *parameters)
        return loss, {"accuracy": accuracy}

    strategy = FedAvg(
        evaluate_fn=evaluate,
        evaluate_metrics_aggregation_fn=weighted_average,
        initial_parameters=ndarrays_to_parameters(first_parameters()),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))


app = ServerApp(server_fn=server_fn)
