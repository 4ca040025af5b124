"""Sites with a CSV file each, some of whose cells are empty: the file is the site's own setting."""

import csv
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll import Context, Statistic, Task

FEATURES = ("age", "pressure", "income")
EDGES = (-np.inf, 40.0, 60.0, np.inf)


class Patients(TensorDataset):
    feature_names = FEATURES


def load(site: str, split: str, context: Context) -> Patients:
    """Return the rows of a split of the site's file: NaN for an empty cell, the outcome as the label."""
    with Path(context.settings["folder"], f"{site}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    features = [[float(row[name] or "nan") for name in FEATURES] for row in rows]
    inputs = torch.tensor(features, dtype=torch.float64).reshape(-1, len(FEATURES))
    return Patients(inputs, torch.tensor([int(row["outcome"]) for row in rows]))


def statistics(data: Patients, split: str, context: Context) -> dict:
    """Return the scaled sum of the products of two features, ages in groups, and the greatest age."""
    rows = data.tensors[0].numpy()
    known = rows[~np.isnan(rows[:, :2]).any(axis=1)]
    return {
        "products": context.options["scale"] * float(known[:, 0] @ known[:, 1]),
        "age_groups": Statistic(np.histogram(known[:, 0], EDGES)[0], merge="count"),
        "oldest": Statistic(np.nanmax(rows[:, 0]), merge="max"),
    }


task = Task(
    model=lambda: nn.Linear(3, 4).double(),
    data=load,
    loss=nn.functional.cross_entropy,
    sites=("north", "south", "east"),
    statistics=statistics,
    options={"scale": 1.0},
    settings={"folder": ""},
)
