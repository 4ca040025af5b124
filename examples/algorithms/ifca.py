"""IFCA: the clients form clusters, each with a model of its own, and find out by themselves to which they belong.

    client:  j = argmin over the k models of its loss on its own data;   trains model j, and sends nothing of the others
    server:  each model is the mean over the clients that have trained it,  which is `aggregation.partial = true`

Source: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1 (model
averaging).
"""

import torch
from digit_sites import SITES, accuracy, load_site
from torch import nn

from atoll import Algorithm, Local, Task

CLUSTERS = 3


class Clustered(nn.Module):
    """The perceptrons of all clusters, of which `chosen` is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)) for _ in range(CLUSTERS)
        )
        self.chosen = 0

    def forward(self, images):
        return self.models[self.chosen](images)


class ChooseCluster(Algorithm):
    """The client, which trains the model with its smallest loss."""

    def begin(self, client):
        self._choose(client)
        mine = f"models.{client.model.chosen}."
        client.leaves_out = {name for name in client.start if not name.startswith(mine)}

    def evaluated(self, client):
        self._choose(client)
        return {}

    def _choose(self, client):
        losses = []
        for number in range(CLUSTERS):
            client.model.chosen = number
            losses.append(client.full_loss({}))
        client.model.chosen = losses.index(min(losses))


def load_turned(site: str, split: str) -> torch.utils.data.TensorDataset:
    """Return a site's data, of whose images every third site has the negative."""
    data = load_site(site, split)
    images, digits = data.tensors
    return torch.utils.data.TensorDataset(1 - images if SITES.index(site) % 3 == 0 else images, digits)


task = Task(
    model=Clustered,
    data=load_turned,
    loss=nn.functional.cross_entropy,
    sites=SITES,
    metrics={"accuracy": accuracy},
    local=Local(epochs=2, batch_size=32, lr=0.1),
    algorithm=ChooseCluster(),
)
