"""Malignant or benign: a logistic regression on the tumours of three clinics, whose patients it protects one by one.

The 569 records of Wisconsin's breast cancer data: every fifth is public, and the clinics share the others. All are
scaled by the public ones: the means of a clinic's records would leave it in the model without noise.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task

CLINICS = ("university", "county", "coast")


def records(clinic: str | None) -> TensorDataset:
    """Return features (n, 30) and labels (n, 1), 1 if malignant, of a clinic's patients or the public ones."""
    found = load_breast_cancer()
    features = torch.tensor(found.data, dtype=torch.float32)
    malignant = torch.tensor(1.0 - found.target, dtype=torch.float32)[:, None]
    number = torch.arange(len(features))
    is_public = number % 5 == 4
    scale, middle = torch.std_mean(features[is_public], dim=0)
    chosen = is_public if clinic is None else ~is_public & (number % 3 == CLINICS.index(clinic))
    return TensorDataset(((features - middle) / scale)[chosen], malignant[chosen])


def right(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the number of tumours that are recognized, and of all."""
    return ((outputs > 0) == (labels > 0.5)).sum(), len(labels)


task = Task(
    model=lambda: nn.Linear(30, 1),
    data=lambda clinic, split: records(clinic),
    sites=CLINICS,
    loss=nn.BCEWithLogitsLoss(),
    metrics={"accuracy": right},
    local=Local(lr=0.5),
    test_data=lambda: records(None),
)
