"""The client: logistic regression on the images of its partition."""

from flwr.client import ClientApp, NumPyClient
from flwr.common import Context

from numpy_client.task import fit, load_data, measure, model_of


class Client(NumPyClient):
    """A model and the images of a partition."""

    def __init__(self, images, labels, penalty, steps):
        self.images, self.labels, self.penalty, self.steps = images, labels, penalty, steps

    def fit(self, parameters, config):
        """Train on the images from the weights of the server."""
        model = model_of(parameters, self.penalty / len(self.images), self.steps)
        return fit(model, self.images, self.labels), len(self.images), {}

    def evaluate(self, parameters, config):
        """Measure the weights of the server."""
        loss, accuracy = measure(model_of(parameters), self.images, self.labels)
        return loss, len(self.images), {"accuracy": accuracy}


def client_fn(context: Context):
    """Return the client of a node."""
    node, config = context.node_config, context.run_config
    images, labels = load_data(node["partition-id"], node["num-partitions"])
    return Client(images, labels, config["penalty"], config["local-steps"]).to_client()


app = ClientApp(client_fn=client_fn)
