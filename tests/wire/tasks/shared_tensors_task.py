"""A task whose algorithm sends a tensor beside the model."""

import torch
from torch import nn

from atoll import Local, Task
from atoll.task.algorithm import Algorithm


class Drift(Algorithm):
    """Sends the drift of the clients."""

    def shared(self, model):
        """Return the tensor of version 0."""
        return {"drift": torch.zeros(3)}


def data(site, split):
    """Return four examples."""
    return torch.utils.data.TensorDataset(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))


task = Task(
    model=lambda: nn.Linear(3, 2),
    data=data,
    loss=nn.functional.cross_entropy,
    sites=("a", "b", "c"),
    local=Local(batch_size=2, lr=0.1),
    algorithm=Drift(),
)
