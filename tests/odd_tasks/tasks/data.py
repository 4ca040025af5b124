"""Odd rows and data sets, and a task in arrays."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from atoll import Instructions, Trained
from tests.odd_tasks.tasks.base import FEATURES, SITES, columns, of_rows, plain

F = nn.functional


class Row(NamedTuple):
    inputs: torch.Tensor
    target: torch.Tensor


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(*columns("a")))


def pairs(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return list(zip(inputs, targets, strict=True))


def dicts(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [{"x": x, "y": int(y), "note": "a word"} for x, y in pairs(inputs, targets)]


def triples(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [(x[:2], x[2:], y) for x, y in pairs(inputs, targets)]


def ragged(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [(x[: 3 + number % 4], y) for number, (x, y) in enumerate(pairs(inputs, targets))]


def padded(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    filled = [F.pad(x, (0, FEATURES - len(x))) for x, _ in rows]
    return torch.stack(filled), torch.stack([y for _, y in rows])


def of_dicts(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([row["x"] for row in rows]), torch.tensor([row["y"] for row in rows])


def of_triples(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([torch.cat(row[:2]) for row in rows]), torch.stack([row[2] for row in rows])


def without(number: int, site: str, split: str) -> TensorDataset | None:
    """Return the rows of a site, of the first one only this number."""
    kept = number if site == "a" else None
    return TensorDataset(*(column[:kept] for column in columns(site))) if split == "train" else None


class Means:
    """The mean of each feature and class, without torch's autograd: one step towards it in each round."""

    sites = tuple(SITES)

    def initial(self, seed: int) -> dict[str, Any]:
        return {"means": np.zeros(FEATURES, np.float32)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> Trained:
        inputs = columns(instructions.site)[0].numpy()
        return Trained({"means": (inputs.mean(0) - parameters["means"]).astype(np.float32)}, len(inputs))

    def evaluate(self, parameters: dict[str, Any], *, split: str, site: str | None) -> None:
        return None


list_rows = of_rows(pairs)
numpy_rows = of_rows(lambda x, y: [(a, int(b)) for a, b in zip(x.numpy(), y.numpy(), strict=True)])
named_rows = of_rows(lambda x, y: [Row(*pair) for pair in pairs(x, y)])
dict_rows = of_rows(dicts, collate=of_dicts)
triple_rows = of_rows(triples, collate=of_triples)
ragged_rows = of_rows(ragged, collate=padded)
dict_rows_bare = of_rows(dicts)
triple_rows_bare = of_rows(triples)
ragged_rows_bare = of_rows(ragged)
stream = replace(plain, data=lambda site, split: Stream() if split == "train" else None)
single_row = replace(plain, data=partial(without, 1))
no_row = replace(plain, data=partial(without, 0))
arrays = Means()
