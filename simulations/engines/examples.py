"""The examples of each client, kept ready between rounds; where they are tensors, a batch is one index operation."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.parallel.local_training.batches import fetcher, to_device
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.task import Task

KEPT_BYTES_MAX = 2**30
"""Of the clients whose examples are kept; those that have not trained for longest are dropped, and read again."""


@dataclass(frozen=True, slots=True)
class Examples:
    """One client's training split."""

    count: int
    """n_k >= 1"""

    tensors: tuple[torch.Tensor, ...] | None
    """What the examples are taken from, on the device; None: they are read one by one."""

    chosen: torch.Tensor | None
    """Which rows of `tensors` are this client's, in its order; None: all."""

    fetch: Callable[[torch.Tensor], Any]
    """Positions (B,) -> the collated batch on the device, as a deployed client makes it."""

    kind: tuple[tuple[torch.Size, torch.dtype], ...] | None = field(init=False, compare=False)
    """Of one example: the shape and the dtype of each tensor."""

    def __post_init__(self) -> None:
        kind = None if self.tensors is None else tuple((tensor.shape[1:], tensor.dtype) for tensor in self.tensors)
        object.__setattr__(self, "kind", kind)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of `tensors`, on their device, for positions in this client's data."""
        if self.tensors and self.tensors[0].device.type != "cpu":
            positions = positions.to(self.tensors[0].device)
        return positions if self.chosen is None else self.chosen[positions]


class ExamplesOf:
    """(client) -> its examples.

    Args:
        task: whose `data` gives them.
        device: where they go.
    """

    def __init__(self, task: Task, device: str) -> None:
        self._task, self._device = task, device
        self._kept: OrderedDict[str, tuple[Examples, int]] = OrderedDict()
        self._moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._bytes = 0

    def __call__(self, client_id: str) -> Examples:
        """Read them, or take what is kept.

        Raises:
            TaskBroken: the client has no training data.
        """
        if client_id in self._kept:
            self._kept.move_to_end(client_id)
            return self._kept[client_id][0]
        dataset = self._task.data(client_id, "train")
        if dataset is None or len(dataset) < 1:
            raise TaskBroken(
                f"task.data({client_id!r}, 'train') gave no examples; a client needs at least one to train"
            )
        examples, size = self._read(dataset)
        self._kept[client_id] = examples, size
        self._bytes += size
        while self._bytes > KEPT_BYTES_MAX and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return examples

    def _read(self, dataset: Any) -> tuple[Examples, int]:
        chosen: torch.Tensor | None = None
        inner = dataset
        while type(inner) is Subset:
            indices = torch.as_tensor(inner.indices)
            chosen, inner = indices if chosen is None else indices[chosen], inner.dataset
        fetch = fetcher(dataset)
        if type(inner) is not TensorDataset:
            return Examples(len(dataset), None, None, lambda indices: to_device(fetch(indices), self._device)), 0
        tensors = tuple(map(self._on_device, inner.tensors))
        if chosen is None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        else:
            chosen = chosen.to(self._device)
            size = chosen.numel() * chosen.element_size()
        return Examples(len(dataset), tensors, chosen, lambda indices: to_device(fetch(indices), self._device)), size

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """What many clients choose from is moved once."""
        if tensor.device.type == torch.device(self._device).type:
            return tensor
        if tensor not in self._moved:
            self._moved[tensor] = tensor.to(self._device)
        moved: torch.Tensor = self._moved[tensor]
        return moved
