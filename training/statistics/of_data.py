"""The statistics of a data set of rows (inputs, targets), one block of rows after the other; it is read once.

- Inputs are tensors, or mappings, lists and tuples of them: each column of a tensor (n, d) is a feature, with its name
  in `dataset.feature_names` if there is one of each column, else as `inputs[3]`. Any other tensor is one feature over
  all of its elements, and so is one of more than `FEATURES_MAX` columns.
- Targets of whole numbers are labels; float targets have moments: `target`, or `target[3]`.
- NaN is missing. Infinite values are counted, and are in no moment.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from atoll.ground.printable import count_of
from atoll.task.collated import Collated
from atoll.task.deadline import Deadline
from atoll.task.errors import OutOfTime, TaskBroken
from atoll.task.randomness import DATA_SEED, seeded
from atoll.task.task import Task
from atoll.training.data.batches import fetcher
from atoll.training.statistics.own import EXAMPLES, own_parts
from atoll.training.statistics.parts import (
    FEATURES_MAX,
    LABELS_MAX,
    NAME_LETTERS_MAX,
    Histogram,
    Moments,
    Part,
    Place,
    SiteStatistics,
    count,
)
from atoll.training.statistics.question import Edges, Question, bins_of
from atoll.training.statistics.sums import ColumnSums, Floats

BLOCK_NUMBERS, BLOCK_ROWS = 2**20, 2**13
"""Most numbers and most rows that are read at once."""

INPUTS, TARGET = "inputs", "target"
EXACT_WHOLE = 2**53


class _Columns:
    """The moments of some columns; of one with edges, over the values within them, and the counts of its bins."""

    def __init__(self, names: list[str], edges: Mapping[str, Edges] = MappingProxyType({})) -> None:
        self.names = names
        self._edges = {at: np.array(edges[name]) for at, name in enumerate(names) if name in edges}
        self._bins = {at: np.zeros(len(each) - 1, np.int64) for at, each in self._edges.items()}
        num = len(names)
        self._sums = ColumnSums(num)
        self._count, self._missing, self._infinite = (np.zeros(num, np.int64) for _ in range(3))
        self._least, self._greatest = np.full(num, np.inf), np.full(num, -np.inf)

    def add(self, block: Floats) -> None:
        """Add the rows of a block (n, d)."""
        missing, infinite = np.isnan(block), np.isinf(block)
        for at, edges in self._edges.items():
            column = block[:, at]
            infinite[:, at] = (column < edges[0]) | (column > edges[-1])  # outside, which infinite values are, too
            within = column[~(infinite[:, at] | missing[:, at])]
            self._bins[at] += np.histogram(within, edges)[0]
        finite = ~(missing | infinite)
        self._count += finite.sum(axis=0)
        self._missing += missing.sum(axis=0)
        self._infinite += infinite.sum(axis=0)
        self._least = np.minimum(self._least, np.where(finite, block, np.inf).min(axis=0, initial=np.inf))
        self._greatest = np.maximum(self._greatest, np.where(finite, block, -np.inf).max(axis=0, initial=-np.inf))
        self._sums.add(block[finite], np.nonzero(finite)[1])

    def moments(self) -> Iterator[tuple[str, Moments]]:
        """Yield each column's name and moments."""
        sums = zip(self.names, self._sums.totals(), self._sums.squares(), strict=True)
        for column, (name, total, squares) in enumerate(sums):
            num = int(self._count[column])
            extremes = (float(self._least[column]), float(self._greatest[column])) if num else (None, None)
            missing, infinite = int(self._missing[column]), int(self._infinite[column])
            yield name, Moments(num, missing, infinite, total, squares, *extremes)

    def bins(self) -> Iterator[tuple[str, Histogram]]:
        """Yield the name and the bins of each column with edges."""
        for at, counts in self._bins.items():
            yield self.names[at], Histogram({str(bin_): number for bin_, number in enumerate(counts.tolist())})


class _Split:
    """The parts of one split while its rows are read."""

    def __init__(self, split: str, names: list[str] | None, question: Question | None) -> None:
        self._split, self._names = split, names
        self._edges = {} if question is None else question.edges
        self._columns: dict[tuple[str, str], _Columns] = {}
        self._labels: dict[str, Counter[int]] = {}
        self._withheld: dict[Place, str] = {}

    def add(self, batch: Any) -> None:
        """Add the rows of a batch (inputs, targets)."""
        inputs, targets = (_named(part) for part in batch)
        for name, tensor in inputs.items():
            self._add_columns("features", name or INPUTS, tensor, self._names if not name else None)
        for name, tensor in targets.items():
            if tensor.is_floating_point():
                self._add_columns("targets", name or TARGET, tensor, None)
            elif not tensor.is_complex():
                self._add_labels(name or TARGET, tensor)

    def _add_labels(self, name: str, tensor: torch.Tensor) -> None:
        place, cells = (self._split, "labels", name), self._labels.setdefault(name, Counter())
        if place in self._withheld:
            return
        labels, counts = torch.unique(tensor.long(), return_counts=True)
        cells.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
        if len(cells) > LABELS_MAX:
            self._withheld[place] = f"more than {LABELS_MAX} different labels"

    def _add_columns(self, group: str, name: str, tensor: torch.Tensor, names: list[str] | None) -> None:
        place = (self._split, group, name)
        if place in self._withheld or tensor.is_complex() or not tensor.numel():
            return
        has_columns = tensor.ndim == 2 and tensor.shape[1] <= FEATURES_MAX
        block = tensor.detach().cpu().to(torch.float64).numpy()
        block = block if has_columns else block.reshape(-1, 1)
        columns = self._columns.get((group, name))
        if columns is None:
            edges = {column: each for (of, column), each in self._edges.items() if of == group}
            columns = _Columns(_column_names(name, block.shape[1], names) if has_columns else [name], edges)
            self._columns[group, name] = columns
        if not tensor.is_floating_point() and np.abs(block).max() >= EXACT_WHOLE:
            self._withheld[place] = "whole numbers beyond 2^53"
        elif len(columns.names) != block.shape[1]:
            self._withheld[place] = "rows of different lengths"
        else:
            columns.add(block)

    def parts(self, num_examples: int) -> SiteStatistics:
        """Return the statistics of all rows that were added."""
        parts: dict[Place, Part] = {(self._split, "examples", ""): count(num_examples)}
        for name, cells in self._labels.items():
            parts[self._split, "labels", name] = Histogram({str(label): n for label, n in cells.items()})
        for (group, name), columns in self._columns.items():
            if (self._split, group, name) in self._withheld:
                continue
            for column, moments in columns.moments():
                if (self._split, group, column) in parts:
                    raise TaskBroken(f"two columns of a row are both named {column!r}")
                parts[self._split, group, column] = moments
            for column, bins in columns.bins():
                parts[self._split, bins_of(group), column] = bins
        for group in ("features", "targets"):
            if (num := sum(place[1] == group for place in parts)) > FEATURES_MAX:
                parts = {place: part for place, part in parts.items() if place[1] != group}
                self._withheld[self._split, group, ""] = f"{count_of(num, 'column')}; allowed: at most {FEATURES_MAX}"
        return SiteStatistics({p: part for p, part in parts.items() if p not in self._withheld}, self._withheld)


def of_task(
    task: Task, datasets: Mapping[str, Any], deadline: Deadline, question: Question | None = None
) -> SiteStatistics:
    """Return the statistics of a site, from its rows and from the task's function.

    Args:
        task: its functions are called in the present context.
        datasets: the site's data sets by split; None: the site has no such split.
        deadline: the deadline of the whole job.
        question: the layout of a secure sum, whose ranges and bins are applied; the task's function has no part in it.

    Raises:
        TaskBroken: the rows, or the results of the task's function, cannot be used.
        OutOfTime: the deadline has passed.
    """
    parts: dict[Place, Part] = {}
    withheld: dict[Place, str] = {}
    for split, dataset in datasets.items():
        if dataset is None:
            continue
        found = [of_split(dataset, split, deadline, question)]
        if task.statistics is not None and question is None and len(dataset):
            with seeded(DATA_SEED):
                own = own_parts(task.statistics(dataset, split), split)
            if (split, "examples", "") in own.parts:
                raise TaskBroken(f"statistics: {EXAMPLES!r} is the number of rows already; give the count another name")
            found.append(own)
        for answer in found:
            parts |= answer.parts
            withheld |= answer.withheld
    return SiteStatistics(parts, withheld)


def of_split(dataset: Any, split: str, deadline: Deadline, question: Question | None = None) -> SiteStatistics:
    """Return the statistics of one split; the data set's random numbers have a constant seed.

    Raises:
        TaskBroken: its rows are no pairs (inputs, targets), or of different shapes.
        OutOfTime: the deadline has passed.
    """
    found, num_examples = _Split(split, _feature_names(dataset), question), len(dataset)
    with seeded(DATA_SEED):
        fetch = fetcher(dataset)
        start, size = 0, 1
        while start < num_examples:
            if deadline.passed():
                raise OutOfTime(f"the deadline passed after {start} of {count_of(num_examples, 'row')}")
            batch = fetch(torch.arange(start, min(start + size, num_examples)))
            found.add(batch)
            start += size
            if size == 1:  # now the size of a row is known
                numbers = sum(tensor.numel() for part in batch for _, tensor in _tensors(part, ""))
                size = min(BLOCK_ROWS, max(1, BLOCK_NUMBERS // max(1, numbers)))
    return found.parts(num_examples)


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their paths, such as `age` or `0.pixels`; a single tensor has no name."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        yield name[:NAME_LETTERS_MAX], torch.as_tensor(tree)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _tensors(value, f"{name}.{place}" if name else str(place))


def _named(tree: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a part of a batch by their names.

    Raises:
        TaskBroken: two tensors have one name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(tree, ""):
        if name in found:
            raise TaskBroken(f"two tensors of a row are both named {name!r}")
        found[name] = tensor
    return found


def _column_names(name: str, num: int, names: list[str] | None) -> list[str]:
    if names is not None and len(names) == num:
        return names
    return [f"{name}[{column}]" for column in range(num)]


def _feature_names(dataset: Any) -> list[str] | None:
    """Return the usable `feature_names` of a data set, or of a data set that it wraps, or None."""
    while True:
        names = getattr(dataset, "feature_names", None)
        if names is not None and not callable(names):
            listed = [str(name) for name in names]
            usable = all(1 <= len(name) <= NAME_LETTERS_MAX and name.isprintable() for name in listed)
            return listed if usable and len(set(listed)) == len(listed) else None
        inner = dataset.dataset if isinstance(dataset, Collated) else getattr(dataset, "dataset", None)
        if inner is None:
            return None
        dataset = inner
