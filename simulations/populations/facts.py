"""The facts of a task's sites, known before a round: the sizes of their data, and their labels.

Each site's data is read, counted and dropped. Of many sites, several processes read, forked from this one after the
first sites, so that common data is in memory once; a few sites are then read here again, and must be the same.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll.ground.process.forking import leaving_garbage, reopen_files
from atoll.parallel.engine.orphans import end_with_the_parent
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import ENDING
from atoll.simulations.populations.opened_files import OPENED
from atoll.simulations.populations.partitions import Ints
from atoll.simulations.populations.pool import NoLabels, labels_of, reading
from atoll.task.collated import form_fault
from atoll.task.randomness import generators_kept, seeded_data_of
from atoll.task.task import Task
from atoll.training.data.row_forms import kind_of
from atoll.training.trials.first_batch import SITES_READ

FIRST = 64
"""Number of sites that are read before the duration of all is estimated."""

WORTH_S = 1.0
"""Expected duration of the rest from which several processes read it [s]."""

BLOCK = 256
"""Number of sites that a process reads before it answers."""

READ_TWICE = 16
"""Number of sites that are read here again after other processes have read them."""

LabelCounts = list[tuple[Ints, Ints]]
"""The labels of each client, ascending, and the number of its examples of each."""


class SiteFacts(NamedTuple):
    """Facts of one site."""

    train: int
    test: int
    labels: tuple[list[int], list[int]] | str | None
    """The labels of the training data with their numbers; a string: why there are none; None: not counted yet, because
    each example would have to be read."""
    rows: str = ""
    """Kinds of the rows of both splits (`row_forms.kind_of`), as far as they are known."""


@dataclass(frozen=True)
class Facts:
    """Facts of K sites."""

    train: Ints
    """The number of training examples of each (K,)."""
    test: Ints
    """The number of test examples of each (K,)."""
    labels: tuple[tuple[list[int], list[int]] | str | None, ...]
    """The labels of each, as in `SiteFacts`."""
    rows: tuple[str, ...]
    """The kinds of the rows of each, as in `SiteFacts`."""
    are_kept: bool = False
    """Whether an earlier process has read them."""

    @classmethod
    def of_all(cls, facts: Sequence[SiteFacts]) -> "Facts":
        """Combine the facts of all sites."""
        sizes = np.array([each[:2] for each in facts], np.int64).reshape(-1, 2)
        return cls(sizes[:, 0], sizes[:, 1], tuple(each.labels for each in facts), tuple(each.rows for each in facts))

    def of(self, chosen: np.ndarray[Any, Any]) -> "Facts":
        """Return the facts of some sites, by a mask (K,)."""
        return Facts(
            self.train[chosen],
            self.test[chosen],
            tuple(compress(self.labels, chosen.tolist())),
            tuple(compress(self.rows, chosen.tolist())),
            self.are_kept,
        )


ReadFacts = Callable[[Task], Facts]
"""Function from a task to the facts of its sites, in their order."""


@dataclass(frozen=True)
class OwnSites:
    """One split of the task's sites, each with its data; see `population.Partition`."""

    sizes: Ints
    facts: Facts | None
    """Facts with the labels; None for the test split, which has no labels."""
    task: Task

    @property
    def num_clients(self) -> int:
        """The number of clients, K."""
        return len(self.sizes)

    def label_counts(self) -> tuple[list[int], LabelCounts | None, str]:
        """Return all labels, the label counts of each client, and the reason why there are none."""
        assert self.facts is not None
        found: LabelCounts = []
        with generators_kept():
            for site, known in zip(self.task.sites, self.facts.labels, strict=True):
                labels = _counted(_dataset(self.task, site, "train"), site) if known is None else known
                if isinstance(labels, str):
                    return [], None, labels
                found.append((np.array(labels[0], np.int64), np.array(labels[1], np.int64)))
        every = np.unique(np.concatenate([labels for labels, _ in found])) if found else np.empty(0, np.int64)
        return every.tolist(), found, ""


def name_of(site: str, split: str) -> str:
    """Return the name of a site's split, for notes on errors."""
    return f"{split} data of site {site!r}"


def checked(dataset: Any, site: str, split: str) -> Any:
    """Return a data set with indexed rows, also of a task with a custom `fit`.

    Raises:
        ConfigError: it has no indexed rows.
    """
    if fault := form_fault(dataset):
        raise ConfigError([f"population: task.data({site!r}, {split!r}) gave {fault}"])
    return dataset


def facts_of_sites(task: Task) -> Facts:
    """Read the data of all sites of a task; return their facts, in their order.

    Raises:
        ConfigError: the data of a site has no rows.
        Exception: any error of the task's code, with a note that names the site.
    """
    sites = list(task.sites)
    began = time.monotonic()
    found = read_sites(task, sites[:FIRST])
    rest = sites[FIRST:]
    per_site = (time.monotonic() - began) / max(1, len(found))
    if per_site * len(rest) < WORTH_S or (processes := _processes()) < 2:
        return Facts.of_all(found + read_sites(task, rest))
    there = _read_in_processes(task, rest, processes)
    again = range(0, len(rest), max(1, len(rest) // READ_TWICE))
    if read_sites(task, [rest[place] for place in again]) != [there[place] for place in again]:
        there = read_sites(task, rest)  # its data depends on the process that reads it
    return Facts.of_all(found + there)


def _processes() -> int:
    """Return the number of processes that may read; 1: only this one, which cannot be forked safely."""
    is_safe = sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    may_fork = is_safe and not multiprocessing.current_process().daemon
    return len(os.sched_getaffinity(0)) if may_fork else 1


def read_sites(task: Task, sites: Sequence[str]) -> list[SiteFacts]:
    """Read the data of some sites in this process, and return their facts."""
    reads = len(task.sites) <= SITES_READ
    with generators_kept():
        return [_of_site(task, site, reads=reads) for site in sites]


def _of_site(task: Task, site: str, *, reads: bool) -> SiteFacts:
    train, test = (_dataset(task, site, split) for split in ("train", "test"))
    is_empty = train is None or not len(train)
    labels = ([], []) if is_empty else _counted(train, site) if _shows_labels(train) else None
    kinds = " | ".join(_kind(data, site, split, reads) for data, split in ((train, "train"), (test, "test")))
    return SiteFacts(0 if is_empty else len(train), 0 if test is None else len(test), labels, kinds)


def _kind(dataset: Any, site: str, split: str, reads: bool) -> str:
    with reading(name_of(site, split)):
        return "" if dataset is None or not len(dataset) else kind_of(dataset, reads=reads)


def _dataset(task: Task, site: str, split: str) -> Any:
    with reading(name_of(site, split)):
        dataset = seeded_data_of(task, site, split)
    return None if dataset is None else checked(dataset, site, split)


def _counted(dataset: Any, site: str) -> tuple[list[int], list[int]] | str:
    """Return the labels of a site's training data, ascending, with the number of each; or why there are none."""
    with reading(name_of(site, "train")):
        try:
            labels, counts = np.unique(labels_of(dataset), return_counts=True)
        except NoLabels as error:
            return str(error)
    return labels.tolist(), counts.tolist()


def _shows_labels(dataset: Any) -> bool:
    """Return whether the labels can be read without reading each example."""
    if type(dataset) is Subset:
        return _shows_labels(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_shows_labels, dataset.datasets))
    return type(dataset) is TensorDataset or hasattr(dataset, "targets")


def _read_in_processes(task: Task, sites: Sequence[str], processes: int) -> list[SiteFacts]:
    """Read the sites in several processes, and here those at which one of them has failed."""
    blocks = [sites[first : first + BLOCK] for first in range(0, len(sites), BLOCK)]
    found: dict[int, list[SiteFacts]] = {}
    context = multiprocessing.get_context("fork")
    children, ours = [], dict[Connection, None]()
    try:
        for number in range(min(processes, len(blocks))):
            mine, theirs = context.Pipe(duplex=False)
            numbered = [*enumerate(blocks)][number :: min(processes, len(blocks))]
            child = context.Process(target=_serve, args=(theirs, task, numbered), daemon=True, name="atoll-sites")
            with leaving_garbage():
                child.start()
            theirs.close()
            children.append(child)
            ours[mine] = None
        for number, facts in _answers(ours):
            found[number] = facts
    finally:
        for child in children:
            child.kill()
            child.join()
    return [facts for number, block in enumerate(blocks) for facts in found.get(number) or read_sites(task, block)]


def _answers(connections: dict[Connection, None]) -> Iterator[tuple[int, list[SiteFacts]]]:
    """Yield the blocks that the processes have read, until each has ended; note the files that they have opened."""
    while connections:
        for connection in wait([*connections]):
            assert isinstance(connection, Connection)
            try:
                number, facts, opened = connection.recv()
            except (EOFError, OSError):
                connection.close()
                del connections[connection]
                continue
            OPENED.add(opened)
            yield number, facts


def _serve(connection: Connection, task: Task, blocks: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Read blocks of sites in a child process; end at a failure, because the parent then reads the site."""
    for one in ENDING:  # the parent handles them, and ends this process
        signal.signal(one, signal.SIG_IGN)
    end_with_the_parent()
    reopen_files()
    OPENED.news()  # the parent knows the files that it has opened
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here
    with suppress(Exception):
        for number, sites in blocks:
            connection.send((number, read_sites(task, sites), OPENED.news()))
    connection.close()
