"""How ill a patient is, from measures of the voice: a table in which a column names the owner of each row.

The 42 patients of UCI's Parkinsons Telemonitoring are 42 sites. Each tests on the last fifth of its recordings.

    export ATOLL_DATA=...         # the folder in which parkinsons_telemonitoring/ lies (docs/data.md)
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
from atoll.parallel.data.public.folder import data_folder
from atoll.parallel.data.public.table import Columns, Table, read_table

SITES = [str(patient) for patient in range(1, 43)]
FEATURES = 19
MEAN_UPDRS = 21.0
"""About the mean of the target, so that the net begins near it."""


@cache
def patients() -> Table:
    """Age, sex, time and 16 measures of the voice (n, 19), which differ by a factor of a million and so are brought to
    one scale; the motor score (n, 1). Sites that keep their data for themselves agree on the constants of the scale."""
    path = data_folder("parkinsons_telemonitoring") / "parkinsons_updrs.data"
    table = read_table(path, Columns(site="subject#", target="motor_UPDRS", drop=["total_UPDRS"]))
    measures, scores = table.dataset.tensors
    train, _ = table.pooled("train")[:]
    return replace(table, dataset=TensorDataset((measures - train.mean(dim=0)) / train.std(dim=0), scores))


def load_patient(site: str, split: str) -> Any:
    """The recordings of one patient."""
    return patients()(site, split)


def load_test() -> Any:
    """What all patients hold back, for the server."""
    return patients().pooled("test")


class Score(nn.Module):
    """A small net (n, 19) -> (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, measures: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = MEAN_UPDRS + self.layers(measures)
        return scores


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The sum of what each score is off, of how many."""
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
