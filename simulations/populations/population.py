"""The population of a run: a task whose pooled data is dealt to simulated clients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset

from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError
from atoll.simulations.populations import partitions
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.custom_population import Examples, dealt, labels_if_any
from atoll.simulations.populations.empty_clients import dropping, faults_of_sizes
from atoll.simulations.populations.facts import LabelCounts, OwnSites, ReadFacts, checked, facts_of_sites, name_of
from atoll.simulations.populations.features import STRENGTH, FeatureSkew, NotChangeable
from atoll.simulations.populations.kinds import NEED_LABELS, POPULATIONS
from atoll.simulations.populations.partitions import Impossible, Ints, stream
from atoll.simulations.populations.pool import NoLabels, Pool, reading
from atoll.task.randomness import data_of
from atoll.task.task import Task

NO_SITES = "the task has no sites, and so no data to split among clients; name them in Task(sites=[...])"

OWN = "own"
"""Purpose of the draws of a custom kind, whatever its name or path."""


@dataclass(frozen=True)
class Partition:
    """Examples of one split and their owners."""

    pool: Pool
    owner: Ints
    """The number of the client that has each example (N,)."""
    num_clients: int

    @cached_property
    def sizes(self) -> Ints:
        """The number of examples of each client (K,)."""
        return np.bincount(self.owner, minlength=self.num_clients)

    def label_counts(self) -> tuple[list[int], LabelCounts | None, str]:
        """Return all labels, the label counts of each client, and the reason why there are none."""
        try:
            labels, codes = np.unique(self.pool.labels, return_inverse=True)
        except NoLabels as error:
            return [], None, str(error)
        table = partitions.count(codes.astype(np.int64), self.owner, len(labels), self.num_clients)
        return labels.tolist(), [(labels[there := np.flatnonzero(own)], own[there]) for own in table.T], ""

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """The indices of all examples, client by client (N,), and the end of each client's part (K,)."""
        return np.argsort(self.owner, kind="stable"), np.cumsum(self.sizes)

    def part(self, client: int) -> "Subset[Any]":
        """Return one client's examples, in the order of the pool."""
        order, ends = self._order
        return self.pool.part(order[ends[client] - self.sizes[client] : ends[client]])


@dataclass(frozen=True)
class Holdings:
    """The `data` of a task whose examples were dealt: (client, split) -> the client's part, or None if it is empty."""

    splits: Mapping[str, Partition]
    number: Mapping[str, int]
    skew: FeatureSkew | None = None

    def __call__(self, site: str, split: str) -> Subset[Any] | TensorDataset | None:
        """Return the examples of one client, as `Task.data` does."""
        if site not in self.number:
            raise ValueError(
                f"there is no client {site!r}; there are {len(self.number)}, the first is {next(iter(self.number))}"
            )
        partition, client = self.splits.get(split), self.number[site]
        if partition is None or not partition.sizes[client]:
            return None
        part = partition.part(client)
        return part if self.skew is None else self.skew.of(client, split, part)


@dataclass(frozen=True)
class Population:
    """Clients of a simulated run and the data of each."""

    config: PopulationConfig
    seed: int
    task: Task
    """The same task, with the clients as its sites and their data as its data."""
    train: "Partition | OwnSites" = field(repr=False)
    test: "Partition | OwnSites | None" = field(repr=False)
    """The clients' test data; None: the task has no such data."""
    skew: FeatureSkew | None = None
    num_owners: int = 1
    """The number of the task's sites that have training data."""
    dropped: tuple[str, ...] = ()
    """The clients that `drop_empty` omitted, because they have no training examples."""

    @property
    def are_kept(self) -> bool:
        """Whether an earlier process has read the sizes."""
        facts = self.train.facts if isinstance(self.train, OwnSites) else None
        return facts is not None and facts.are_kept

    @property
    def notes(self) -> tuple[str, ...]:
        """The differences between the clients and the task's sites, a sentence each; empty: none."""
        told = []
        if self.config.kind != "natural" and self.num_owners > 1:
            told.append(
                f"the data of {count_of(self.num_owners, 'site')} are pooled and split among "
                f"{count_of(self.train.num_clients, 'client')} "
                f'(population.kind = "{self.config.kind}"): the task\'s own sites are not simulated'
            )
        if self.dropped:
            told.append(dropping(self.dropped, self.train.num_clients + len(self.dropped)))
        return tuple(told)


def populate(config: PopulationConfig, task: Task, seed: int, read: ReadFacts | None = None) -> Population:
    """Deal the task's data to the clients of a population.

    Args:
        config: the kind of the population, and its options.
        task: the task whose sites' data is pooled; the data is loaded here, once.
        seed: the seed of the run; `config.seed`, if set, replaces it.
        read: (task) -> the facts of its sites, if they are the clients; None: `facts_of_sites`.

    Raises:
        ConfigError: the data do not allow this split; the message has the numbers.
    """
    seed = seed if config.seed is None else config.seed
    if config.kind == "natural":
        return _natural(config, task, seed, read or facts_of_sites)
    held = {split: _read(task, split) for split in ("train", "test")}
    sizes = {site: len(held["train"].get(site, ())) for site in task.sites}
    if faults := list(_faults(config, task, sizes)):
        raise ConfigError([f"population: {fault}" for fault in faults])
    num_owners = sum(map(bool, sizes.values()))
    assert config.clients is not None
    try:
        examples = Examples(_pool(held["train"], "train"), tuple(held["train"]))
        splits, clients = _deal(config, examples, _pool(held["test"], "test"), seed)
    except (Impossible, NoLabels) as error:
        raise ConfigError([f"population: {_explained(config, error)}"]) from error
    skew = None
    if config.change is not None:
        skew = FeatureSkew(config.change, config.clients, seed, config.strength or STRENGTH)
    all_names = names(config.clients)
    holdings = Holdings(splits, {all_names[client]: k for k, client in enumerate(clients)}, skew)
    _check_change(holdings)
    dealt = replace(task, data=holdings, sites=tuple(holdings.number))
    dropped = tuple(name for name in all_names if name not in holdings.number)
    return Population(config, seed, dealt, splits["train"], splits.get("test"), skew, num_owners, dropped)


def _natural(config: PopulationConfig, task: Task, seed: int, read: ReadFacts) -> Population:
    """Return the task's sites as clients, each with its data."""
    if not task.sites:
        raise ConfigError([f"population: {NO_SITES}"])
    facts = read(task)
    sizes = dict(zip(task.sites, facts.train.tolist(), strict=True))
    if faults := list(faults_of_sizes(config, sizes)):
        raise ConfigError([f"population: {fault}" for fault in faults])
    dropped = tuple(site for site, size in sizes.items() if not size) if config.drop_empty else ()
    clients = replace(task, sites=tuple(site for site, size in sizes.items() if size)) if dropped else task
    held = facts.of(facts.train > 0) if dropped else facts
    train = OwnSites(held.train, held, clients)
    test = OwnSites(held.test, None, clients) if held.test.any() else None
    return Population(config, seed, clients, train, test, None, int((facts.train > 0).sum()), dropped)


def names(num_clients: int) -> tuple[str, ...]:
    """Return the names c0000, c0001, ..., of one length, so that they sort by their numbers."""
    digits = max(4, len(str(num_clients - 1)))
    return tuple(f"c{client:0{digits}}" for client in range(num_clients))


def _read(task: Task, split: str) -> dict[str, Any]:
    """Return the examples of a split, by the sites that have some of it."""
    datasets = {}
    for site in task.sites:
        with reading(name_of(site, split)):
            dataset = data_of(task, site, split)
        if dataset is not None:
            datasets[site] = checked(dataset, site, split)
    return datasets


def _pool(datasets: Mapping[str, Any], split: str) -> Pool:
    return Pool(list(datasets.values()), [name_of(site, split) for site in datasets])


def _faults(config: PopulationConfig, task: Task, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the faults found without reading any example; `sizes` has the number of examples of each site."""
    if not task.sites:
        yield NO_SITES
        return
    clients, available = config.clients or 0, sum(sizes.values())
    may_be_empty = (
        (config.kind == "dirichlet" or not config.is_ours) and config.drop_empty and available >= config.min_examples
    )
    if (needed := clients * config.min_examples) > available and not may_be_empty:
        each = f" with min_examples {config.min_examples}" if config.min_examples > 1 else ""
        yield f"{count_of(clients, 'client')}{each}: {count_of(needed, 'example')} needed, and the task has {available}"
    elif config.kind == "shards" and (needed := clients * _shards_per_client(config)) > available:
        yield (
            f"{count_of(clients, 'client')} with {count_of(_shards_per_client(config), 'shard')} "
            f"each: {count_of(needed, 'example')} needed, "
            f"and the task has {available}"
        )


def _shards_per_client(config: PopulationConfig) -> int:
    return config.shards_per_client or 2


def _explained(config: PopulationConfig, error: Exception) -> str:
    if not isinstance(error, NoLabels):
        return str(error)
    possible = [kind for kind in POPULATIONS.variants if kind not in NEED_LABELS]
    return f"kind {config.kind} needs class labels: {error}; possible are {', '.join(possible)}"


def _deal(
    config: PopulationConfig, examples: Examples, test: Pool, seed: int
) -> tuple[dict[str, Partition], list[int]]:
    """Deal the training examples by the rule of the kind, and the test examples in the same proportions.

    Returns:
        The splits, and the clients that own their parts: all, or with `drop_empty` only those with training examples.
    """
    train = examples.pool
    if config.is_ours:
        (train_labels, test_labels), num_labels = _codes(config, [train, test])
        owner, counts, clients = _owners(config, train_labels, num_labels, seed)
    else:
        owner, clients = _custom_owners(config, examples, seed)
        (train_labels, test_labels), num_labels = labels_if_any((train, test))
        counts = partitions.count(train_labels, owner, num_labels, len(clients))
    splits = {"train": Partition(train, owner, len(clients))}
    if (smallest := int(splits["train"].sizes.min())) < config.min_examples:
        raise Impossible(
            f"the smallest client would have {count_of(smallest, 'example')}, and min_examples is {config.min_examples}"
        )
    if len(test):
        rng = stream(seed, config.kind if config.is_ours else OWN, "test")
        test_counts = partitions.following(counts, np.bincount(test_labels, minlength=num_labels), rng)
        splits["test"] = Partition(test, partitions.deal(test_labels, test_counts, rng), len(clients))
    return splits, clients


def _owners(config: PopulationConfig, labels: Ints, num_labels: int, seed: int) -> tuple[Ints, Ints, list[int]]:
    """Return the owner of each training example (N,), the counts (L, K) and the clients, by a built-in kind."""
    num_clients = config.clients or 0
    clients = list(range(num_clients))
    counts = _counts(config, np.bincount(labels, minlength=num_labels), stream(seed, config.kind, "counts"))
    rng = stream(seed, config.kind, "train")
    if counts is None:
        owner = partitions.shards(labels, num_clients, _shards_per_client(config), rng)
        return owner, partitions.count(labels, owner, num_labels, num_clients), clients
    if config.drop_empty:
        clients = np.flatnonzero(counts.sum(axis=0)).tolist()
        counts = counts[:, clients]
    return partitions.deal(labels, counts, rng), counts, clients


def _custom_owners(config: PopulationConfig, examples: Examples, seed: int) -> tuple[Ints, list[int]]:
    """Return the owner of each training example (N,), and the clients, by the user's function."""
    owner = dealt(config, examples, stream(seed, OWN, "train"))
    if not config.drop_empty:
        return owner, list(range(config.clients or 0))
    clients, owner = np.unique(owner, return_inverse=True)
    return owner.astype(np.int64), clients.tolist()


def _codes(config: PopulationConfig, pools: Sequence[Pool]) -> tuple[list[Ints], int]:
    """Return the labels of each pool as numbers 0..L-1, and L; zeros and 1 for a kind that ignores labels."""
    if config.kind not in NEED_LABELS:
        return [np.zeros(len(pool), np.int64) for pool in pools], 1
    classes = np.unique(np.concatenate([pool.labels for pool in pools]))
    return [np.searchsorted(classes, pool.labels) for pool in pools], len(classes)


def _counts(config: PopulationConfig, sizes: Ints, rng: np.random.Generator) -> Ints | None:
    """Return the number of examples of each label for each client (L, K); None for shards, which have no counts."""
    num_clients, num_examples = config.clients or 0, int(sizes.sum())
    if config.kind == "shards":
        return None
    if config.kind == "dirichlet":
        assert config.alpha is not None
        if config.balanced:
            counts = partitions.balanced_dirichlet(sizes, num_clients, config.alpha, rng)
            return counts[:, rng.permutation(num_clients)]  # the last one gets the rest: any client may be last
        least = config.min_examples
        return partitions.dirichlet(sizes, num_clients, config.alpha, least, rng, may_be_empty=config.drop_empty)
    if config.kind == "quantity":
        weights = (
            rng.dirichlet(np.full(num_clients, config.alpha))
            if config.alpha is not None
            else _log_normal(config.sigma or 0.0, num_clients, rng)
        )
        return partitions.quantity(num_examples, weights, config.min_examples, rng)
    return partitions.even(num_examples, num_clients)[None, :]


def _log_normal(sigma: float, num_clients: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw exp(sigma z) divided by its largest value: the same proportions without overflow."""
    exponents = sigma * rng.standard_normal(num_clients)
    shares: NDArray[np.float64] = np.exp(exponents - exponents.max())
    return shares


def _check_change(holdings: Holdings) -> None:
    """Change one example, so that inputs that cannot be changed are refused at the start."""
    if holdings.skew is None:
        return
    try:
        holdings.skew.of(0, "train", Subset(holdings.splits["train"].part(0), [0]))
    except NotChangeable as error:
        raise ConfigError([f"population: {error}"]) from error
