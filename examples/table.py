"""Regression on a table with a column for the site of each row: the severity of Parkinson's disease from the voice.

The 42 patients of UCI's Parkinsons Telemonitoring are 42 sites. Each tests on the last fifth of its recordings.

    export ATOLL_DATA=...         # the folder with parkinsons_telemonitoring/ (docs/data.md)
    atoll population examples/table.py:task

Source:
    Tsanas, Little, McSharry, Ramig, "Accurate Telemonitoring of Parkinson's Disease Progression by Noninvasive Speech
    Tests", IEEE Transactions on Biomedical Engineering 57 (2010).
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Local, Task
from examples.datasets.folder import data_folder
from examples.datasets.table import Columns, Table, read_table

SITES = [str(patient) for patient in range(1, 43)]
FEATURES = 19
MEAN_UPDRS = 21.0
"""The approximate mean of the target, added to the net's output so that training begins near it."""


@cache
def patients() -> Table:
    """Return the features (n, 19), age, sex, time and 16 measures of the voice, and the motor scores (n, 1).

    The features differ in size by a factor of a million, so they are standardized by constants of the pooled data.
    Sites that do not share data agree on such constants beforehand.
    """
    path = data_folder("parkinsons_telemonitoring") / "parkinsons_updrs.data"
    table = read_table(path, Columns(site="subject#", target="motor_UPDRS", drop=["total_UPDRS"]))
    measures, scores = table.dataset.tensors
    train, _ = table.pooled("train")[:]
    return replace(table, dataset=TensorDataset((measures - train.mean(dim=0)) / train.std(dim=0), scores))


def load_patient(site: str, split: str) -> Any:
    """Return a split of one patient's recordings."""
    return patients()(site, split)


def load_test() -> Any:
    """Return the test splits of all patients, as the server's test set."""
    return patients().pooled("test")


class Score(nn.Module):
    """A small net (n, 19) -> (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, measures: torch.Tensor) -> torch.Tensor:
        """Return the predicted scores (n, 1)."""
        scores: torch.Tensor = MEAN_UPDRS + self.layers(measures)
        return scores


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the absolute errors, and the number of scores."""
    return (outputs - targets).abs().sum(), len(targets)


task = Task(
    model=Score,
    data=load_patient,
    sites=SITES,
    loss=nn.functional.mse_loss,
    metrics={"absolute_error": absolute_error},
    local=Local(epochs=2, batch_size=16, lr=0.003),
    test_data=load_test,
)
