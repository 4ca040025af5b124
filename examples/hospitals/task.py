"""Malignant or benign: four hospitals with a CSV file each, of unequal size and with missing values.

A hospital names its file in the table `[task]` of its `agent.toml`, or by `--set task.file=north.csv`.
"""

import csv

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Context, Local, Metric, Task

SITES = ["north", "south", "east", "west"]
COLUMNS = {  # the centre and the scale of each measure, on which the hospitals have agreed
    "radius": (14.1, 3.5),
    "texture": (19.3, 4.3),
    "perimeter": (92.0, 24.3),
    "area": (655.0, 352.0),
    "smoothness": (0.096, 0.014),
    "compactness": (0.104, 0.053),
    "concavity": (0.089, 0.080),
    "symmetry": (0.181, 0.027),
}
BINS = 100


def load(site: str, split: str, context: Context) -> TensorDataset:
    """Return the patients of one hospital; each fourth is held back for its own test."""
    with open(context.settings["file"], newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = [row for number, row in enumerate(rows) if (number % 4 == 0) == (split == "test")]
    measures = [
        [(float(row[name]) - centre) / scale if row[name] else 0.0 for name, (centre, scale) in COLUMNS.items()]
        + [float(not row[name]) for name in COLUMNS]  # what is missing may tell something, too
        for row in chosen
    ]
    return TensorDataset(torch.tensor(measures), torch.tensor([float(row["malignant"]) for row in chosen]))


def model() -> nn.Module:
    """Return a small network: (n, 16) to one logit each (n,)."""
    return nn.Sequential(nn.Linear(2 * len(COLUMNS), 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))


def score_counts(outputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """Return the number of benign, then of malignant tumours in each bin of the score: sums over all hospitals."""
    bins = (torch.sigmoid(outputs) * BINS).long().clamp(max=BINS - 1)
    counts = [torch.bincount(bins[targets == label], minlength=BINS) for label in (0, 1)]
    return [float(count) for count in torch.cat(counts)]


def auc(sums: tuple[float, ...]) -> float:
    """Return the share of pairs of a malignant and a benign tumour that the scores order rightly; ties count half."""
    ordered = below = 0.0
    for benign, malignant in zip(sums[:BINS], sums[BINS:], strict=True):
        ordered += malignant * (below + benign / 2)
        below += benign
    return ordered / (below * sum(sums[BINS:]))


task = Task(
    model=model,
    data=load,
    loss=nn.functional.binary_cross_entropy_with_logits,
    sites=SITES,
    metrics={"auc": Metric(score_counts, auc)},
    local=Local(epochs=1, batch_size=16, lr=0.1),
    settings={"file": ""},
)
