"""MOON: the features of the local model are pulled to those of the global one, away from those of the last local one.

Legend: z the features of the model that is trained, z_glob of the global model, z_prev of the client's last model,
τ the temperature, μ the weight.

    loss = cross entropy - μ mean log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )

Source: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, equation 3 and Algorithm 1.
"""

import torch
from digit_sites import SITES, load_site
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from atoll import Algorithm, Local, Task


class Features(nn.Module):
    """A perceptron that returns its features (n, 32) beside the scores (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        features = self.body(images)
        return self.head(features), features


class Contrast(Algorithm):
    """The client; the server's part is FedAvg."""

    def state(self, model):
        return model.state_dict()

    def loss(self, client, loss, outputs):
        temperature, weight = client.context.options["temperature"], client.context.options["weight"]
        features, towards, away = outputs[1], client.outputs(client.start)[1], client.outputs(client.state)[1]
        pairs = torch.stack([cosine_similarity(features, other) / temperature for other in (towards, away)], dim=1)
        return loss + weight * cross_entropy(pairs, torch.zeros(len(pairs), dtype=torch.long))

    def end(self, client):
        client.state = {name: tensor.clone() for name, tensor in client.parameters.items()}


def accuracy(outputs, targets):
    """Return the numbers of correct outputs and of all."""
    return (outputs[0].argmax(dim=1) == targets).sum(), len(targets)


task = Task(
    model=Features,
    data=load_site,
    loss=lambda outputs, targets: cross_entropy(outputs[0], targets),
    sites=SITES,
    metrics={"accuracy": accuracy},
    local=Local(epochs=2, batch_size=32, lr=0.1),
    algorithm=Contrast(),
    options={"temperature": 0.5, "weight": 1.0},
)
