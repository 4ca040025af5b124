"""An app of the form before Flower 1.21: a `server_fn` with one of the old strategies, and a NumPyClient."""

import json
from pathlib import Path

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


class Client(NumPyClient):
    def __init__(self, shift):
        self.shift = shift

    def get_parameters(self, config):
        return [np.zeros(3), np.ones((2, 2), np.float32)]

    def fit(self, parameters, config):
        return [values + values.dtype.type(self.shift) for values in parameters], 1 + self.shift, {}

    def evaluate(self, parameters, config):
        return float(parameters[0].sum()), 2, {"first": float(parameters[0][0])}


class Noted(FedAvg):
    """Notes the sum that the clients measure after each round."""

    def aggregate_evaluate(self, server_round, results, failures):
        found = super().aggregate_evaluate(server_round, results, failures)
        file = Path("losses.json")
        before = json.loads(file.read_text()) if server_round > 1 else []
        file.write_text(json.dumps([*before, found[0]]))
        return found


def server_fn(context):
    return ServerAppComponents(strategy=Noted(), config=ServerConfig(num_rounds=context.run_config["rounds"]))


def client_fn(context):
    return Client(context.node_config["partition-id"]).to_client()


server, client = ServerApp(server_fn=server_fn), ClientApp(client_fn=client_fn)
