"""The loss and the metrics of several clients as one group: each client's mean over its own examples.

A function of one batch is mapped over the clients with torch.func, or called for each client if it cannot be mapped
(for example, if it calls `.item()`). Clients with batches of equal length are measured together. The plain cross
entropy needs no mapping: each example has a weight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from atoll.simulations.engines.batched.outputs import by_client, filled
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.task.metrics import Metric, Metrics, Statistics, of_batch
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.data.units import IGNORED, Units, are_numbered, as_units

Sizes = np.ndarray[tuple[int], np.dtype[np.int64]]


class Losses:
    """The function (outputs, targets, sizes) -> each client's mean loss.

    Args:
        loss: the task's loss of one batch.
        own: returns the task's losses and the losses to differentiate, (m,), from outputs (m n, ...); None: they are
            the same.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], torch.Tensor],
        own: Callable[[Any], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        self._loss, self._own = loss, own
        self.is_plain = own is None and (loss is nn.functional.cross_entropy or _is_plain_module(loss))
        """Whether the loss is the plain cross entropy, without options."""
        self._each = Each(lambda outputs, targets: (loss(outputs, targets),))

    def __call__(self, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """Compute the losses (m,) with gradients from outputs, a tree of tensors, and targets (m n, ...).

        Raises:
            CannotBatch: the loss of a batch is not a single number.
        """
        is_matrix = isinstance(outputs, torch.Tensor) and outputs.dim() == 2
        if self.is_plain and is_matrix and targets.dim() == 1 and are_classes(targets):
            each = nn.functional.cross_entropy(outputs, targets, reduction="none").view(len(sizes), -1)
            return (each * weights(sizes, each)).sum(1)
        (found,) = self._each(outputs, targets, sizes)
        if found.numel() != len(sizes):
            raise CannotBatch(f"the loss must be a single number, got {tuple(found.shape[1:])}")
        return found.flatten()

    def both(self, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses to report (m,) and the losses to differentiate; arguments and errors as for a call."""
        if self._own is not None:
            return self._own(outputs)
        losses = self(outputs, targets, sizes)
        return losses, losses


class Each:
    """Function of one batch, applied to each of m clients.

    Args:
        function: (outputs, targets) -> numbers, as tensors or Python numbers.
    """

    def __init__(self, function: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._function, self._is_mapped = function, True

    def __call__(self, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """Compute each of the numbers for all clients, (m,), from outputs, a tree, and targets (m n, ...)."""
        many, goals = by_client(outputs, len(sizes)), by_client(targets, len(sizes))
        if (sizes == goals.shape[1]).all():
            return self._same(many, goals)
        lengths = np.unique(sizes)
        members = [torch.from_numpy(np.flatnonzero(sizes == length)) for length in lengths]

        def of(group: torch.Tensor, length: int) -> list[torch.Tensor]:
            return self._same(map_tensors(lambda tensor: tensor[group, :length], many), goals[group, :length])

        parts = list(map(of, members, lengths.tolist()))
        back = torch.argsort(torch.cat(members))
        return [torch.cat(column)[back] for column in zip(*parts, strict=True)]

    def alone(self, name: str, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """Return the sums of a metric of each client, as in a call, and NaN for a client at which it fails.

        Args:
            name: the name of the metric, for the log.
            outputs: as in a call.
            targets: as in a call.
            sizes: as in a call.
        """
        many, goals = by_client(outputs, len(sizes)), by_client(targets, len(sizes))
        found = []
        for client, size in enumerate(sizes.tolist()):
            own = map_tensors(itemgetter((client, slice(size))), many)
            found.append(of_batch({name: self._function}, own, goals[client, :size])[name])
        width = max(map(len, found)) or 2
        rows = [row if len(row) == width else (math.nan,) * width for row in found]
        return list(torch.tensor(rows, dtype=torch.float64).T)

    def _same(self, many: Any, goals: torch.Tensor) -> list[torch.Tensor]:
        parts = (goals, *tensors(many))

        def alone(targets: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            numbers = self._function(filled(many, outputs), targets)
            return tuple(torch.as_tensor(number, device=targets.device) for number in numbers)

        if self._is_mapped:
            try:
                return list(vmap(alone)(*parts))
            except RuntimeError:  # data-dependent control flow, .item(), an operation without a rule
                self._is_mapped = False
        rows = [alone(*own) for own in zip(*parts, strict=True)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]


class UnitsOfEach:
    """Function of the number of each client's loss units (examples, tokens): `Units.factors` for many clients.

    Args:
        units: the units of the task's loss.
    """

    def __init__(self, units: Units) -> None:
        self._all = units
        function = units.function
        self._each = None if function is None else Each(lambda _outputs, targets: (function(targets),))

    def __call__(self, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each of m clients' weight of its mean loss, and its number of units, both float64 (m,)."""
        rows = torch.from_numpy(sizes).to(torch.float64)
        if self._all.is_sum:
            return torch.ones_like(rows), rows
        if self._each is not None:
            (found,) = self._each(outputs, targets, sizes)
            counts = torch.tensor([as_units(number) for number in found.tolist()], dtype=torch.float64)
            return counts, counts
        if not are_numbered(targets):
            return rows, rows
        if targets.numel() and int(targets.min()) >= 0:  # no unit is ignored
            counts = rows * targets[0].numel()
            return counts, counts
        counted = (targets.view(len(sizes), -1, targets[0].numel()) != IGNORED).sum(2)
        counts = (counted.cpu() * own_rows(sizes, counted.shape[1])).sum(1).to(torch.float64)
        return counts, counts


class Measured:
    """Statistics of the clients of a group, collected step by step.

    Args:
        metrics: the metrics of the task.
        clients: the number of clients.
        units: the units of the task's loss; None: inferred.
    """

    def __init__(self, metrics: Mapping[str, Each], clients: int, units: "UnitsOfEach | None" = None) -> None:
        self._metrics, self._units = metrics, units or UnitsOfEach(Units())
        self._found: dict[str, list[list[torch.Tensor]]] = {name: [] for name in metrics}
        self._losses: list[torch.Tensor] = []
        self._factors: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._units_of_steps: np.ndarray[Any, Any] | None = None
        self._clients = clients

    @torch.no_grad()
    def add(self, losses: torch.Tensor, outputs: Any, targets: torch.Tensor, sizes: Sizes) -> None:
        """Add one step of the first m clients."""
        self._losses.append(losses.detach())
        factors, counts = self._units(outputs, targets, sizes)
        self._factors.append(factors)
        self._counts.append(counts)
        for name, metric in self._metrics.items():
            seen = map_tensors(torch.Tensor.detach, outputs)
            try:
                found = metric(seen, targets, sizes)
            except Exception:  # any error: the task's code may fail for one client and not for another
                found = metric.alone(name, seen, targets, sizes)
            self._found[name].append(found)

    def statistics(self) -> list[Statistics]:
        """Return the statistics of each client, summed in the order of the sequential engine."""
        columns: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name, steps in self._found.items():
            if len(set(map(len, steps))) > 1:  # its steps have different numbers of sums, so it has no metric
                columns[name] = [np.full(self._clients, np.nan)]
                continue
            columns[name] = [self._table(numbers).sum(axis=0) for numbers in zip(*steps, strict=True)]
        if "loss" not in columns:
            counts = self.units()
            factors = counts if self._factors[-1] is self._counts[-1] else self._table(self._factors)
            losses = np.where(counts > 0, self._table(self._losses), 0.0)  # without units a mean is 0 / 0
            columns["loss"] = [(losses * factors).sum(axis=0), counts.sum(axis=0)]
        lists = {name: np.stack(columns[name], axis=1).tolist() for name in sorted(columns)}
        return [{name: tuple(rows[i]) for name, rows in lists.items()} for i in range(self._clients)]

    def units(self) -> np.ndarray[Any, Any]:
        """Return the units of each step and client (S, k), once all steps are added."""
        if self._units_of_steps is None:
            self._units_of_steps = self._table(self._counts)
        return self._units_of_steps

    def _table(self, steps: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        """Return the values of S steps as (S, k) float64; 0 for clients that a step does not have."""
        table = np.zeros((len(steps), self._clients))
        is_mixed = len({step.dtype for step in steps}) > 1
        padded = (
            pad_sequence([step.double() for step in steps] if is_mixed else list(steps), batch_first=True).cpu().numpy()
        )
        table[:, : padded.shape[1]] = padded
        return table


def metrics_of(metrics: Metrics) -> dict[str, Each]:
    """Return each metric's statistics as a function of many clients."""
    return {name: Each(metric.statistics if isinstance(metric, Metric) else metric) for name, metric in metrics.items()}


def weights(sizes: Sizes, like: torch.Tensor) -> torch.Tensor:
    """Return the weights of examples (m, n): 1 / size for a client's own examples, 0 for padding."""
    each = torch.from_numpy(1.0 / sizes).to(like)[:, None]
    if (sizes == like.shape[1]).all():
        return each
    return each * own_rows(sizes, like.shape[1]).to(like)


def own_rows(sizes: Sizes, width: int) -> torch.Tensor:
    """Return (m, n) bool: True for a client's own examples, False for padding."""
    return torch.arange(width)[None, :] < torch.from_numpy(sizes)[:, None]


def are_classes(targets: torch.Tensor) -> bool:
    """Return whether targets are class numbers: not class probabilities, and not ignored (negative)."""
    return not targets.is_floating_point() and int(targets.min()) >= 0


def _is_plain_module(loss: Any) -> bool:
    """Return whether a loss is nn.CrossEntropyLoss without options."""
    settings = ("weight", "ignore_index", "reduction", "label_smoothing")
    return type(loss) is nn.CrossEntropyLoss and [getattr(loss, name) for name in settings] == [None, -100, "mean", 0.0]
