"""The loss and the metrics of several clients at once: each client's own mean over its own examples.

What is written for one batch is mapped over the clients with torch.func; where it cannot be (it asks for a number), it
is called for each client. Clients whose batch is shorter are measured by themselves, all of one length together. The
plain cross entropy needs none of that: each example has its weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from atoll.parallel.task.metrics import Metric, Metrics, Statistics
from atoll.simulations.engines.batched.stack import CannotBatch

Sizes = np.ndarray[tuple[int], np.dtype[np.int64]]


class Losses:
    """(outputs, targets, sizes) -> each client's mean loss.

    Args:
        loss: of the task, for one batch.
    """

    def __init__(self, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        self._loss = loss
        self.is_plain = loss is nn.functional.cross_entropy or _is_plain_module(loss)
        """Whether it is the cross entropy as it comes."""
        self._each = Each(lambda outputs, targets: (loss(outputs, targets),))

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        """(m n, ...), (m n, ...) -> (m,) with gradients.

        Raises:
            CannotBatch: a loss that is no single number.
        """
        if self.is_plain and outputs.dim() == 2 and targets.dim() == 1 and are_classes(targets):
            each = nn.functional.cross_entropy(outputs, targets, reduction="none").view(len(sizes), -1)
            return (each * weights(sizes, each)).sum(1)
        (found,) = self._each(outputs, targets, sizes)
        if found.numel() != len(sizes):
            raise CannotBatch(f"the loss must be a single number, got {tuple(found.shape[1:])}")
        return found.flatten()


class Each:
    """A function of one batch, for each of m clients.

    Args:
        function: (outputs, targets) -> numbers, as tensors or plain.
    """

    def __init__(self, function: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._function, self._is_mapped = function, True

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
        """(m n, ...), (m n, ...) -> each of its numbers as (m,)."""
        many, goals = (tensor.unflatten(0, (len(sizes), -1)) for tensor in (outputs, targets))  # type: ignore[no-untyped-call]
        if (sizes == many.shape[1]).all():
            return self._same(many, goals)
        lengths = np.unique(sizes)
        members = [torch.from_numpy(np.flatnonzero(sizes == length)) for length in lengths]
        parts = [
            self._same(many[group, :length], goals[group, :length])
            for length, group in zip(lengths.tolist(), members, strict=True)
        ]
        back = torch.argsort(torch.cat(members))
        return [torch.cat(column)[back] for column in zip(*parts, strict=True)]

    def _same(self, many: torch.Tensor, goals: torch.Tensor) -> list[torch.Tensor]:
        if self._is_mapped:
            try:
                return list(vmap(self._tensors)(many, goals))
            except RuntimeError:  # data-dependent control flow, .item(), an operation without a rule
                self._is_mapped = False
        rows = [self._tensors(outputs, targets) for outputs, targets in zip(many, goals, strict=True)]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _tensors(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.as_tensor(number, device=outputs.device) for number in self._function(outputs, targets))


class Measured:
    """The statistics of one cohort of clients, step after step.

    Args:
        metrics: of the task.
        clients: how many.
    """

    def __init__(self, metrics: Mapping[str, Each], clients: int) -> None:
        self._metrics = metrics
        self._found: dict[str, list[list[torch.Tensor]]] = {name: [] for name in metrics}
        self._losses: list[torch.Tensor] = []
        self._sizes: list[Sizes] = []
        self._clients = clients

    @torch.no_grad()
    def add(self, losses: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor, sizes: Sizes) -> None:
        """One step of the first m clients."""
        self._losses.append(losses.detach())
        self._sizes.append(sizes)
        for name, metric in self._metrics.items():
            self._found[name].append(metric(outputs.detach(), targets, sizes))

    def statistics(self) -> list[Statistics]:
        """Of each client, as the sequential engine adds them up."""
        columns: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name, steps in self._found.items():
            columns[name] = [self._table(numbers).sum(axis=0) for numbers in zip(*steps, strict=True)]
        if "loss" not in columns:
            sizes = self._table([torch.from_numpy(size) for size in self._sizes])
            columns["loss"] = [(self._table(self._losses) * sizes).sum(axis=0), sizes.sum(axis=0)]
        lists = {name: np.stack(columns[name], axis=1).tolist() for name in sorted(columns)}
        return [{name: tuple(rows[i]) for name, rows in lists.items()} for i in range(self._clients)]

    def _table(self, steps: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        """(S, k) float64 of what S steps gave for the first clients each; 0 of the others."""
        table = np.zeros((len(steps), self._clients))
        found = pad_sequence(list(steps), batch_first=True).cpu().numpy()
        table[:, : found.shape[1]] = found
        return table


def metrics_of(metrics: Metrics) -> dict[str, Each]:
    """Each metric's statistics, for many clients."""
    return {name: Each(metric.statistics if isinstance(metric, Metric) else metric) for name, metric in metrics.items()}


def weights(sizes: Sizes, like: torch.Tensor) -> torch.Tensor:
    """(m, n): 1 / size for a client's own examples, 0 for those that fill its row up."""
    each = torch.from_numpy(1.0 / sizes).to(like)[:, None]
    if (sizes == like.shape[1]).all():
        return each
    own = torch.arange(like.shape[1])[None, :] < torch.from_numpy(sizes)[:, None]
    return each * own.to(like)


def are_classes(targets: torch.Tensor) -> bool:
    """Classes by number: not shares of classes, and none to be ignored."""
    return not targets.is_floating_point() and int(targets.min()) >= 0


def _is_plain_module(loss: Any) -> bool:
    """Whether it is nn.CrossEntropyLoss as it comes."""
    settings = ("weight", "ignore_index", "reduction", "label_smoothing")
    return type(loss) is nn.CrossEntropyLoss and [getattr(loss, name) for name in settings] == [None, -100, "mean", 0.0]
