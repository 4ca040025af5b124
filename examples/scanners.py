"""The digits of `digits.py` from a different scanner at each site: an example of layers that stay at a site (FedBN).

Each site's scanner has its own contrast and brightness. The features of digits are common to all sites, the brightness
of a page is a site's: with `local.keep = "batchnorm"` the batch norms stay at the sites.

    atoll coordinator examples/fedbn.toml
    atoll agent examples/scanners.py:task --site north --join CODE      # and the same at the other four sites
"""

import digits
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

SCANNERS = {"north": (1.0, 0.0), "south": (0.3, 2.0), "east": (0.1, 0.9), "west": (4.0, -2.0), "harbor": (0.5, 3.0)}
"""Contrast and brightness of each site's scanner."""


def load_site(site: str, split: str) -> TensorDataset:
    """Return a split of a site's digits as its scanner sees them: images (n, 1, 8, 8), digits (n,)."""
    images, targets = digits.load_site(site, split)[:]
    contrast, brightness = SCANNERS[site]
    return TensorDataset(contrast * images + brightness, targets)


def make_model() -> nn.Module:
    """Return a small convolutional net with a batch norm after each layer but the last."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


task = Task(
    model=make_model,
    data=load_site,
    sites=digits.SITES,
    loss=nn.functional.cross_entropy,
    metrics={"accuracy": digits.accuracy},
    local=Local(epochs=2, batch_size=16, lr=0.05),
)
