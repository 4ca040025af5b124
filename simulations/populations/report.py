"""Who holds what, in numbers."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from atoll.simulations.populations.partitions import Floats, Ints, count
from atoll.simulations.populations.pool import NoLabels
from atoll.simulations.populations.population import Population


@dataclass(frozen=True, slots=True)
class Held:
    """What one client holds."""

    client: str
    examples: int
    test_examples: int
    labels: dict[str, int] | None
    """How many examples of each label, without those of which it has none; None: the targets are no labels."""
    features: str = ""
    """How its inputs differ from those of the others, in words."""


@dataclass(frozen=True, slots=True)
class LabelSummary:
    """How far the clients' labels are from those of the whole."""

    labels: tuple[int, ...]
    """All that there are."""
    counts: tuple[int, ...]
    """How many examples of each."""
    per_client_min: int
    """Different labels of the client that has fewest."""
    per_client_median: float
    per_client_max: int
    entropy_mean: float
    """Of a client's labels [bit]: -sum p log2 p, mean over the clients; 0 when each has one label."""
    entropy_pooled: float
    """Of all labels [bit]."""
    total_variation_mean: float
    """Between a client's labels and all: 1/2 sum |p_k - p|, mean over the clients; 0 when all are alike."""


@dataclass(frozen=True, slots=True)
class Report:
    """Who holds what."""

    kind: str
    seed: int
    num_clients: int
    examples: int
    test_examples: int
    examples_min: int
    examples_median: float
    examples_mean: float
    examples_max: int
    labels: LabelSummary | None
    """None: the targets are no labels."""
    no_labels: str
    """Why there are none; empty when there are."""
    clients: tuple[Held, ...]

    def plain(self) -> dict[str, Any]:
        """The same in JSON's own types."""
        return asdict(self)


def report(population: Population) -> Report:
    """Return the sizes and labels of all clients, and their distance from the whole; each target is read once."""
    train, test = population.train, population.test
    labels, counts, no_labels = _label_counts(population)
    test_sizes = test.sizes if test is not None else np.zeros(train.num_clients, np.int64)
    clients = tuple(
        Held(
            client=name,
            examples=int(train.sizes[k]),
            test_examples=int(test_sizes[k]),
            labels=None if counts is None else {str(y): int(n) for y, n in zip(labels, counts[:, k], strict=True) if n},
            features="" if population.skew is None else population.skew.told(k),
        )
        for k, name in enumerate(population.task.sites)
    )
    return Report(
        kind=population.config.kind,
        seed=population.seed,
        num_clients=train.num_clients,
        examples=len(train.pool),
        test_examples=int(test_sizes.sum()),
        examples_min=int(train.sizes.min()),
        examples_median=float(np.median(train.sizes)),
        examples_mean=float(train.sizes.mean()),
        examples_max=int(train.sizes.max()),
        labels=None if counts is None else _summary(labels, counts),
        no_labels=no_labels,
        clients=clients,
    )


def _label_counts(population: Population) -> tuple[list[int], Ints | None, str]:
    """All labels, how many of each (L, K) every client has, and why there are none."""
    train = population.train
    try:
        labels, codes = np.unique(train.pool.labels, return_inverse=True)
    except NoLabels as error:
        return [], None, str(error)
    return labels.tolist(), count(codes.astype(np.int64), train.owner, len(labels), train.num_clients), ""


def _summary(labels: list[int], counts: Ints) -> LabelSummary:
    different = (counts > 0).sum(axis=0)
    pooled = counts.sum(axis=1, keepdims=True)
    own, whole = counts / counts.sum(axis=0), pooled / pooled.sum()
    return LabelSummary(
        labels=tuple(labels),
        counts=tuple(pooled[:, 0].tolist()),
        per_client_min=int(different.min()),
        per_client_median=float(np.median(different)),
        per_client_max=int(different.max()),
        entropy_mean=float(_entropy(own).mean()),
        entropy_pooled=float(_entropy(whole)[0]),
        total_variation_mean=float(np.abs(own - whole).sum(axis=0).mean() / 2),
    )


def _entropy(shares: Floats) -> Floats:
    """Of each column [bit]."""
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    found: Floats = -(shares * logarithms).sum(axis=0)
    return found
