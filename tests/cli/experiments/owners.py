"""A task whose sites have data of their own, of which two have none."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Instructions, Local, Task, Trained

EXAMPLES = {"north": 40, "empty": 0, "south": 24, "absent": None, "east": 32}


def data(site: str, split: str) -> TensorDataset | None:
    """Return the examples of a site, which no other site has."""
    if (size := EXAMPLES[site]) is None:
        return None
    rng = np.random.default_rng([size, split == "test"])
    inputs = torch.from_numpy(rng.standard_normal((size, 4))).float()
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def test_data() -> TensorDataset:
    """Return the examples that the server holds."""
    return data("north", "test")  # type: ignore[return-value]


def _task(sites: list[str]) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        data=data,
        sites=sites,
        loss=nn.functional.cross_entropy,
        local=Local(epochs=1, batch_size=8, lr=0.3),
        test_data=test_data,
    )


task, filled = _task(list(EXAMPLES)), _task(["north", "south", "east"])
empty = _task(["empty", "absent"])


class Arrays:
    """The same sites without PyTorch."""

    sites = ("north", "empty", "south")

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """Return zeros."""
        return {"w": np.zeros(2, np.float32)}

    def num_examples(self, site: str) -> int:
        """Return the number of examples of a site."""
        return EXAMPLES[site] or 0

    def train(self, parameters: dict[str, np.ndarray], instructions: Instructions) -> Trained:
        """Move the parameters by the site's number of examples."""
        size = self.num_examples(instructions.site)
        return Trained({"w": np.full(2, size, np.float32)}, num_examples=size)


arrays = Arrays()
