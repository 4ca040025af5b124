"""The cached examples of each client; a batch of tensors is one index operation."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.task.errors import TaskBroken
from atoll.task.randomness import data_of
from atoll.task.task import Task
from atoll.training.data.batches import pair_of, to_device
from atoll.training.data.draws import drawing

CACHED_BYTES_MAX = 2**30
"""Maximum size of the cached examples of all clients [bytes]; the least recently used ones are dropped, and read
again."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Split of one client's data."""

    count: int
    """Number of examples, n_k >= 1."""

    tensors: tuple[torch.Tensor, ...] | None
    """Tensors from which the examples are taken, on the device; None: they are read one by one."""

    chosen: torch.Tensor | None
    """Rows of `tensors` that belong to this client, in its order; None: all."""

    fetch: Callable[[int, int, torch.Tensor], Any]
    """Function from the training's seed, the epoch and positions (B,) to the collated batch on the device, as for a
    deployed client."""

    kind: tuple[tuple[torch.Size, torch.dtype], ...] | None = field(init=False, compare=False)
    """Shape and dtype of each tensor of one example."""

    def __post_init__(self) -> None:
        kind = None if self.tensors is None else tuple((tensor.shape[1:], tensor.dtype) for tensor in self.tensors)
        object.__setattr__(self, "kind", kind)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tensors`, on their device, for positions in this client's data."""
        if self.tensors and self.tensors[0].device.type != "cpu":
            positions = positions.to(self.tensors[0].device)
        return positions if self.chosen is None else self.chosen[positions]


class ExamplesOf:
    """The examples by client.

    Args:
        task: the task, whose `data` reads them.
        device: the device that they are moved to.
        split: the split of each client: train, or test.
    """

    def __init__(self, task: Task, device: str, split: str = "train") -> None:
        self._task, self._device, self._split = task, device, split
        self._cached: OrderedDict[str, tuple[Examples | None, int]] = OrderedDict()
        self._moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._bytes = 0

    def __call__(self, client_id: str) -> Examples:
        """Return the examples of a client, from the cache or read again.

        Raises:
            TaskBroken: the client has no training data.
        """
        if (found := self.find(client_id)) is None:
            raise TaskBroken(
                f"task.data({client_id!r}, {self._split!r}) gave no examples; a client needs at least one to train"
            )
        return found

    def find(self, client_id: str) -> Examples | None:
        """Return the examples of a client, from the cache or read again; None: it has none."""
        if client_id in self._cached:
            self._cached.move_to_end(client_id)
            return self._cached[client_id][0]
        dataset = data_of(self._task, client_id, self._split)
        examples, size = (None, 0) if dataset is None or len(dataset) < 1 else self._read(dataset)
        self._cached[client_id] = examples, size
        self._bytes += size
        while self._bytes > CACHED_BYTES_MAX and len(self._cached) > 1:
            self._bytes -= self._cached.popitem(last=False)[1][1]
        return examples

    def _read(self, dataset: Any) -> tuple[Examples, int]:
        chosen: torch.Tensor | None = None
        inner = dataset
        while type(inner) is Subset:
            indices = torch.as_tensor(inner.indices)
            chosen, inner = indices if chosen is None else indices[chosen], inner.dataset
        if type(inner) is not TensorDataset:
            return Examples(len(dataset), None, None, self._fetch(dataset)), 0
        pair_of(inner.tensors)
        tensors = tuple(map(self._on_device, inner.tensors))
        if chosen is None:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        else:
            chosen = chosen.to(self._device)
            size = chosen.numel() * chosen.element_size()
        return Examples(len(dataset), tensors, chosen, self._fetch(dataset)), size

    def _fetch(self, dataset: Any) -> Callable[[int, int, torch.Tensor], Any]:
        device = self._device
        return lambda seed, epoch, indices: to_device(drawing(dataset, seed)(epoch, indices), device)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to the device once, even if many clients take their examples from it."""
        if tensor.device.type == torch.device(self._device).type:
            return tensor
        if tensor not in self._moved:
            self._moved[tensor] = tensor.to(self._device)
        moved: torch.Tensor = self._moved[tensor]
        return moved
