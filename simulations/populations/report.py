"""The report on a population: sizes, labels and their distance from the pooled data."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from atoll.simulations.populations.facts import LabelCounts
from atoll.simulations.populations.partitions import Floats, Ints
from atoll.simulations.populations.population import Population


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """Data of one client."""

    client: str
    examples: int
    test_examples: int
    labels: dict[str, int] | None
    """The number of examples of each label that the client has; None: the targets are not labels."""
    features: str = ""
    """The change of the client's inputs, in words; empty: none."""


@dataclass(frozen=True, slots=True)
class LabelSummary:
    """Distance of the clients' labels from the pooled ones."""

    labels: tuple[int, ...]
    """All labels of the training data."""
    counts: tuple[int, ...]
    """The number of examples of each label."""
    per_client_min: int
    """The number of different labels of the client with the fewest."""
    per_client_median: float
    per_client_max: int
    entropy_mean: float
    """Entropy of a client's labels, -sum p log2 p [bit], mean over the clients; 0 if each client has one label."""
    entropy_pooled: float
    """Entropy of the pooled labels [bit]."""
    total_variation_mean: float
    """Distance of a client's labels from the pooled ones, 1/2 sum |p_k - p|, mean over the clients; 0 if all agree."""


@dataclass(frozen=True, slots=True)
class Report:
    """Population in numbers: sizes, labels, and each client's data."""

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
    """Statistics of the labels; None: the targets are not labels."""
    no_labels: str
    """The reason why the targets are not labels; empty if they are."""
    clients: tuple[ClientSummary, ...]
    dropped: tuple[str, ...] = ()
    """The clients that were omitted, because they have no training examples."""
    notes: tuple[str, ...] = ()
    """The differences between the clients and the task's sites, a sentence each."""

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        shallow = {each.name: getattr(self, each.name) for each in fields(self)}
        clients = [{name: getattr(client, name) for name in ClientSummary.__slots__} for client in self.clients]
        return shallow | {"clients": clients, "labels": None if self.labels is None else asdict(self.labels)}


def report(population: Population) -> Report:
    """Return the sizes and labels of all clients, and their distance from the pooled ones; each target is read once."""
    train, test = population.train, population.test
    labels, counts, no_labels = train.label_counts()
    test_sizes = test.sizes if test is not None else np.zeros(train.num_clients, np.int64)
    sizes = zip(train.sizes.tolist(), test_sizes.tolist(), strict=True)
    clients = tuple(
        ClientSummary(
            client=name,
            examples=examples,
            test_examples=test_examples,
            labels=None if counts is None else {str(y): n for y, n in zip(*map(_listed, counts[k]), strict=True)},
            features="" if population.skew is None else population.skew.description(k),
        )
        for k, (name, (examples, test_examples)) in enumerate(zip(population.task.sites, sizes, strict=True))
    )
    return Report(
        kind=population.config.kind,
        seed=population.seed,
        num_clients=train.num_clients,
        examples=int(train.sizes.sum()),
        test_examples=int(test_sizes.sum()),
        examples_min=int(train.sizes.min()),
        examples_median=float(np.median(train.sizes)),
        examples_mean=float(train.sizes.mean()),
        examples_max=int(train.sizes.max()),
        labels=None if counts is None else _summary(labels, _table(labels, counts)),
        no_labels=no_labels,
        clients=clients,
        dropped=population.dropped,
        notes=population.notes,
    )


def _listed(numbers: Ints) -> list[int]:
    return numbers.tolist()  # type: ignore[no-any-return]


def _table(labels: list[int], counts: LabelCounts) -> Ints:
    """Return the number of examples of each label for each client (L, K)."""
    table = np.zeros((len(labels), len(counts)), np.int64)
    lengths = [len(own) for own, _ in counts]
    clients = np.repeat(np.arange(len(counts)), lengths)
    table[np.searchsorted(labels, np.concatenate([own for own, _ in counts])), clients] = np.concatenate(
        [numbers for _, numbers in counts]
    )
    return table


def _summary(labels: list[int], counts: Ints) -> LabelSummary:
    different = (counts > 0).sum(axis=0)
    pooled = counts.sum(axis=1, keepdims=True)
    shares, pooled_shares = counts / counts.sum(axis=0), pooled / pooled.sum()
    return LabelSummary(
        labels=tuple(labels),
        counts=tuple(pooled[:, 0].tolist()),
        per_client_min=int(different.min()),
        per_client_median=float(np.median(different)),
        per_client_max=int(different.max()),
        entropy_mean=float(_entropy(shares).mean()),
        entropy_pooled=float(_entropy(pooled_shares)[0]),
        total_variation_mean=float(np.abs(shares - pooled_shares).sum(axis=0).mean() / 2),
    )


def _entropy(shares: Floats) -> Floats:
    """Compute the entropy of each column [bit]."""
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies: Floats = -(shares * logarithms).sum(axis=0)
    return entropies
