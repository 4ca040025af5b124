"""The evaluation of many clients in one forward pass, because they all measure the same model.

Each window evaluates a few of its clients alone, too. If their sums differ by more than rounding (examples that
influence each other, a model that draws random numbers), the whole window is evaluated one client after another. So the
choice depends only on the window, whichever process measures it.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from atoll.simulations.engines.batched.concatenation import concatenated, of_one_kind
from atoll.simulations.engines.batched.measures import Losses, Measured, UnitsOfEach, metrics_of
from atoll.simulations.engines.batched.outputs import activation_bytes, check_rows
from atoll.simulations.engines.engine import Job, Training, last_line, naming
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.measuring import NO_DATA, Measurer, OneModel, measurer_of
from atoll.task.arrays import Arrays
from atoll.task.context import depends_on_context
from atoll.task.metrics import Statistics, of_parts
from atoll.task.randomness import generators_kept, seed_everything
from atoll.task.task import Task
from atoll.training.data.trees import map_tensors
from atoll.training.data.units import units_of
from atoll.training.local.training import EVALUATED_AT_ONCE
from atoll.training.model.parameters import build_model

TRIED = 4
"""Number of clients of a window that are evaluated both ways."""

RELATIVE, EACH = 1e-5, 1e-6
"""Largest difference of a sum that counts as rounding: relative to the sum, and for each example."""

ACTIVATION_BYTES = 16 << 20
"""Maximum size of all layers' outputs in a forward pass, which should stay in the cache."""

ROWS_MAX = 8192
"""Maximum number of examples in a forward pass."""

logger = logging.getLogger(__name__)

Found = list[Statistics | str]

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


def together_if_possible(training: Training) -> Measurer:
    """Return the measurer of many clients at once, or of one after another if they measure different models."""
    task = training.task
    is_one_model = isinstance(task, Task) and task.algorithm is None and training.local.keep is None
    if not is_one_model or depends_on_context(task):
        return measurer_of(training)
    return Together(training)


class Together:
    """Evaluation of many clients in one forward pass, as the module describes.

    Args:
        training: the settings of all clients' training.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._alone = training, OneModel(training)
        self._task = self._alone.task
        self._losses, self._metrics = Losses(self._task.loss), metrics_of(self._task.metrics)
        self._units = UnitsOfEach(units_of(self._task))
        self._rows_max: dict[torch.Size, int] = {}

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Load the version that is measured next; raise TaskMismatch if it belongs to another model."""
        self._alone.begin(version, number)

    def measure(self, jobs: Sequence[Job]) -> Found:
        """Evaluate the clients of a window; see `Measurer`."""
        examples = []
        for job in jobs:
            with naming(job.client_id, "evaluation"):
                examples.append(self._alone.examples.find(job.client_id))
        with generators_kept():
            found = self._together(jobs, examples)
            for index, (job, own) in enumerate(zip(jobs, examples, strict=True)):
                if index not in found:
                    with naming(job.client_id, "evaluation"):
                        found[index] = NO_DATA if own is None else self._alone.one(job, own)
        return [found[index] for index in range(len(jobs))]

    def _together(self, jobs: Sequence[Job], examples: Sequence[Examples | None]) -> dict[int, Statistics | str]:
        """Return the sums of the clients that can be measured together, by the index of the job."""
        held = [index for index, own in enumerate(examples) if own is not None]
        chosen = [held[place] for place in of_one_kind([examples[index] for index in held])]  # type: ignore[misc]
        if len(chosen) < 2:
            return {}
        mine = [own for index in chosen if (own := examples[index]) is not None]
        try:
            found = self._forward(jobs[0], mine)
            for place in range(0, len(chosen), -(-len(chosen) // TRIED)):
                alone = self._alone.one(jobs[chosen[place]], mine[place])
                if not _agree(found[place], alone, mine[place].count):
                    return {}
        except Exception as error:  # any error: one client after another shows whose data or code fails
            logger.warning("%d clients are evaluated one by one: %s", len(chosen), last_line(error))
            return {}
        return dict(zip(chosen, found, strict=True))

    @torch.no_grad()
    def _forward(self, job: Job, examples: Sequence[Examples]) -> list[Statistics]:
        """Return the sums of each client's examples, from as few forward passes as fit into the cache."""
        placed, tensors, offsets = concatenated(examples)
        table = _table(placed)
        parts = _parts(np.array([own.count for own in placed]), np.array(offsets) if table is None else None)
        found: list[list[Statistics]] = [[] for _ in examples]
        for first, end in self._passes(tensors, parts.lengths):
            self._alone.load(job)
            seed_everything(job.seed)
            rows = torch.from_numpy(_ranges(parts.starts[first:end], parts.lengths[first:end]))
            sums = self._pass(tensors, rows if table is None else table[rows], parts.lengths[first:end])
            self._alone.check_frozen()
            for number, one in zip(parts.clients[first:end].tolist(), sums, strict=True):
                found[number].append(one)
        return [one[0] if len(one) == 1 else of_parts(one) for one in found]

    def _pass(self, tensors: Sequence[torch.Tensor], rows: torch.Tensor, lengths: Ints) -> list[Statistics]:
        """Return the sums of each part of the examples, whose lengths ascend, from one forward pass."""
        inputs, targets = (tensor.index_select(0, rows.to(tensor.device)) for tensor in tensors)
        outputs = self._alone.model(inputs)
        check_rows(outputs, len(rows))
        found, at = list[Statistics](), 0
        for length, count in zip(*map(np.ndarray.tolist, np.unique(lengths, return_counts=True)), strict=True):
            span = slice(at, at + length * count)
            sizes = np.full(count, length, np.int64)
            those = map_tensors(itemgetter(span), outputs)
            measured = Measured(self._metrics, count, self._units)
            measured.add(self._losses(those, targets[span], sizes), those, targets[span], sizes)
            found += measured.statistics()
            at = span.stop
        return found

    def _passes(self, tensors: Sequence[torch.Tensor], lengths: Ints) -> list[tuple[int, int]]:
        """Return the start and end of the parts of each forward pass, with as many examples as fit."""
        shape = tensors[0].shape[1:]
        if shape not in self._rows_max:
            self._rows_max[shape] = self._fitting(tensors[0])
        passes, first, before = list[tuple[int, int]](), 0, 0
        ends = np.cumsum(lengths)
        while first < len(lengths):
            end = max(first + 1, int(np.searchsorted(ends, before + self._rows_max[shape], side="right")))
            passes.append((first, end))
            first, before = end, int(ends[end - 1])
        return passes

    def _fitting(self, inputs: torch.Tensor) -> int:
        """Return the number of examples of a forward pass; at least one client's."""
        of_one = 1
        with suppress(Exception):  # evaluating one client after another reports faults of the model
            model = build_model(self._task, self._training.model_seed).eval()
            of_one = activation_bytes(model, inputs[:1].cpu()) if len(inputs) else 1
        return max(EVALUATED_AT_ONCE, min(ROWS_MAX, ACTIVATION_BYTES // of_one))


class _Parts(NamedTuple):
    """The parts of all clients' examples, each of at most `EVALUATED_AT_ONCE`, in the order of their lengths."""

    clients: Ints
    starts: Ints
    lengths: Ints


def _parts(counts: Ints, offsets: Ints | None) -> _Parts:
    """Return the parts of clients with these numbers of examples, which begin at the offsets; None: one after another.

    They are ordered by length, and equal lengths by client.
    """
    numbers = -(-counts // EVALUATED_AT_ONCE)
    clients = np.repeat(np.arange(len(counts)), numbers)
    within = _ranges(np.zeros(len(counts), np.int64), numbers) * EVALUATED_AT_ONCE
    lengths = np.minimum(counts[clients] - within, EVALUATED_AT_ONCE)
    begins = np.cumsum(counts) - counts if offsets is None else offsets
    order = np.argsort(lengths, kind="stable")
    return _Parts(clients[order], (begins[clients] + within)[order], lengths[order])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return start, start + 1, ... of each range, one range after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(lengths.sum()))


def _table(examples: Sequence[Examples]) -> torch.Tensor | None:
    """Return the rows of all clients' examples, one client after another; None: each has all rows from its offset."""
    if all(own.chosen is None for own in examples):
        return None
    return torch.cat([torch.arange(own.count) if own.chosen is None else own.chosen.cpu() for own in examples])


def _agree(one: Statistics, other: Statistics, count: int) -> bool:
    """Return whether the sums of a client's examples differ only by rounding."""
    if {name: len(sums) for name, sums in one.items()} != {name: len(sums) for name, sums in other.items()}:
        return False
    a, b = (np.array([number for name in sorted(one) for number in sums[name]]) for sums in (one, other))
    return bool(np.allclose(a, b, rtol=RELATIVE, atol=EACH * count, equal_nan=True))
