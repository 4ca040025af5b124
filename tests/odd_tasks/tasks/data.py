"""Odd rows and data sets, and a task in arrays."""

import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from atoll import Instructions, Trained
from tests.odd_tasks.tasks.base import CLASSES, FEATURES, SITES, columns, layers, of_rows, plain

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


def graphs(rows: list[Any]) -> tuple[Any, torch.Tensor]:
    """Return the nodes of all rows, one or two for each, the row of each node, and the number of rows."""
    nodes = [torch.stack([x, 2 * x]) if x[0] > 0 else x[None] for x, _ in rows]
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(list(map(len, nodes))))
    return (torch.cat(nodes), owners, len(rows)), torch.stack([y for _, y in rows])


class Graph(nn.Module):
    """The sum over the nodes of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, graph: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
        nodes, owners, number = graph
        return nodes.new_zeros(number, CLASSES).index_add(0, owners, self.layers(nodes))


def listed(rows: list[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    return [x for x, _ in rows], [{"class": y, "box": x[:4]} for x, y in rows]


class Detecting(nn.Module):
    """A class and a box for each picture of a list, as torchvision's detectors take and give them."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.box = layers(), nn.Linear(FEATURES, 4)

    def forward(self, pictures: list[torch.Tensor]) -> list[Any]:
        return [{"scores": self.classes(picture), "box": self.box(picture)} for picture in pictures]


def of_boxes(outputs: list[Any], targets: list[Any]) -> torch.Tensor:
    """Return the mean over the pictures."""
    pairs_ = zip(outputs, targets, strict=True)
    each = [F.cross_entropy(o["scores"], t["class"]) + F.mse_loss(o["box"], t["box"]) for o, t in pairs_]
    return torch.stack(each).mean()


class Reading(nn.Module):
    """A model of texts, whose words are signs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, texts: list[str]) -> torch.Tensor:
        return self.layers(torch.tensor([[float(word) for word in text.split()] for text in texts]))


def texts(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [(" ".join(str(int(v > 0)) for v in x), "abc"[int(y)]) for x, y in pairs(inputs, targets)]


def of_letters(outputs: torch.Tensor, targets: list[str]) -> torch.Tensor:
    return F.cross_entropy(outputs, torch.tensor(["abc".index(letter) for letter in targets]))


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


class Linear(Means):
    """A linear model of scikit-learn, which each site fits to its own rows."""

    def initial(self, seed: int) -> dict[str, Any]:
        return {"weights": np.zeros(FEATURES, np.float32), "intercept": np.zeros(1, np.float32)}

    def train(self, parameters: dict[str, Any], instructions: Instructions) -> Trained:
        from sklearn.linear_model import Ridge

        inputs, targets = (column.numpy() for column in columns(instructions.site))
        fitted = Ridge().fit(inputs.astype(float), targets)
        found = {"weights": fitted.coef_, "intercept": np.array([fitted.intercept_])}
        update = {name: (value - parameters[name]).astype(np.float32) for name, value in found.items()}
        return Trained(update, len(inputs))


class Database(Dataset[Any]):
    """Rows behind a connection that is opened at the first of them, and serves the thread that has opened it."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._rows = [(number, x.numpy().tobytes(), int(y)) for number, (x, y) in enumerate(pairs(inputs, targets))]
        self._connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._connection is None:
            self._connection = sqlite3.connect(":memory:")
            self._connection.execute("create table r (i integer primary key, x blob, y integer)")
            self._connection.executemany("insert into r values (?, ?, ?)", self._rows)
        x, y = self._connection.execute("select x, y from r where i = ?", (index,)).fetchone()
        return np.frombuffer(x, np.float32).copy(), y


DRAWS: tuple[Callable[[], float], ...] = (random.random, np.random.random, lambda: float(torch.rand(())))


class Mirrored(Dataset[Any]):
    """Rows in which input and target have one drawn sign: a linear chain without bias has the step of those undrawn."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._inputs, self._targets = inputs, F.one_hot(targets, CLASSES).float()

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sign = 1.0 if DRAWS[index % len(DRAWS)]() < 0.5 else -1.0
        return sign * self._inputs[index], sign * self._targets[index]


def unbiased() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.Linear(5, CLASSES, bias=False))


def points(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    """Return rows whose target is some points, of differing number."""
    return [(x, x[:CLASSES] + torch.arange(2.0 + number % 8)[:, None]) for number, x in enumerate(inputs)]


def in_lists(rows: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.stack([x for x, _ in rows]), [found for _, found in rows]


def to_points(outputs: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean over the rows of the distance to the mean of their points."""
    return torch.stack([(o - p.mean(0)).square().mean() for o, p in zip(outputs, targets, strict=True)]).mean()


def letters(inputs: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    return [(x, "abc"[int(y)]) for x, y in pairs(inputs, targets)]


drawn_signs = of_rows(Mirrored, model=unbiased, loss=F.mse_loss)
database = of_rows(Database)
list_targets = of_rows(points, collate=in_lists, loss=to_points)
text_targets = of_rows(letters, loss=of_letters)
said_text_targets = of_rows(letters, loss=of_letters, units=len)
scikit_learn = Linear()
graph_rows = of_rows(pairs, collate=graphs, model=Graph)
detection_rows = of_rows(pairs, collate=listed, model=Detecting, loss=of_boxes)
text_rows = of_rows(texts, model=Reading, loss=of_letters)
loader = of_rows(lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2))
dict_of_columns = of_rows(lambda x, y: {"x": x, "y": y})
one_column = of_rows(lambda x, y: TensorDataset(x))
single_row = replace(plain, data=partial(without, 1))
no_row = replace(plain, data=partial(without, 0))
arrays = Means()
