"""The step from the mean to the next version: the server optimizer, and its state between rounds.

A slot is a tensor of that state for each tensor of the model, stored as a safetensors file beside each version: the
optimizer's moments of the trained tensors, and, for a rule that needs it, the last aggregate of all floats.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.noise.private_sum import PrivateSum, PrivateSums
from atoll.aggregation.optimizers import FedAvg, Optimizer
from atoll.aggregation.rules.rule import Rule, takes_centre
from atoll.plugins.place import NOWHERE, Place
from atoll.tensors.layout import CONTROL, FLOATS, Layout, Piece, Tensor
from atoll.tensors.safetensors_file import TensorFileWriter
from atoll.tensors.updates.reader import UpdateReader, stored_shard

AGGREGATE = "aggregate"
"""The name of the slot of the last aggregate."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """An older version towards which the model is pulled (`fedasync.drawn`); integers follow their mean."""

    version: Path
    """x_old: a file with the base's layout, or the same shard of it."""
    share: float
    """a, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Step:
    """The rule, the server optimizer, and the files of the slots.

    Slots are read from `before` (left out: they have their initial values) and appear in `after`, before the new
    version does.
    """

    optimizer: Optimizer = FedAvg()  # noqa: RUF009 - a value
    trained: Container[str] = frozenset()
    """Names of the float tensors that the optimizer moves; the others follow the mean."""
    rule: Rule | None = None
    """The rule in place of the exact weighted mean of floats; integers follow their mean."""
    scale: float = 1.0
    """The factor of the exact mean of the trained floats before the optimizer (`weights.normalized`)."""
    num_clients: int | None = None
    """SCAFFOLD's N: tensors named `control/...` move by the sum of their updates over N. None: no SCAFFOLD."""
    before: Mapping[str, Path] = field(default_factory=dict)
    after: Mapping[str, Path] = field(default_factory=dict)
    anchor: "Anchor | None" = None
    place: Place = NOWHERE
    """The context of the fold, for a custom rule."""
    private: PrivateSum | None = None
    """The noise of the sums of floats, on its own grid; None: the sums are exact."""
    private_sums: PrivateSums | None = None
    """What makes opened secure sums private; None: their mean is over the weights of their members."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots, the tensors of the optimizer's and the rule's state."""
        return slots_of(self.optimizer, self.rule)

    def is_control(self, tensor: Tensor) -> bool:
        """Return whether the tensor is a control variate."""
        return self.num_clients is not None and tensor.name.startswith(CONTROL)

    def is_trained(self, tensor: Tensor) -> bool:
        """Return whether the optimizer moves the tensor."""
        return tensor.dtype in FLOATS and tensor.name in self.trained


def slots_of(optimizer: Optimizer, rule: Rule | None) -> tuple[str, ...]:
    """Return the names of the slots of an optimizer and a rule."""
    return (*optimizer.slots, AGGREGATE) if rule is not None and takes_centre(rule) else optimizer.slots


def kept_pieces(name: str, step: Step, layout: Layout, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of a model for which a slot has values."""
    names = {tensor.name for tensor in layout if _has_slot(name, step, tensor)}
    return tuple(piece for piece in pieces if piece.tensor in names)


def _has_slot(name: str, step: Step, tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS if name == AGGREGATE else step.is_trained(tensor)


class Slot:
    """One slot: its files of the base's version and of the new version.

    Args:
        name: the name of the slot.
        step: the step that has the files of the slots.
        layout: the model's tensors.
        pieces: the pieces of the model that are folded here.
    """

    def __init__(self, name: str, step: Step, layout: Layout, pieces: Iterable[Piece]) -> None:
        self.name = name
        self._init = 0.0 if name == AGGREGATE else step.optimizer.init(name)
        self._pieces = kept_pieces(name, step, layout, pieces)
        self._names = {tensor.name for tensor in layout if _has_slot(name, step, tensor)}
        self.writer = TensorFileWriter(step.after[name], layout, pieces=self._pieces)
        self._reader: UpdateReader | None = None
        if name in step.before:
            self._reader = UpdateReader(stored_shard(step.before[name], self._pieces))

    def carries(self, tensor: str) -> bool:
        """Return whether the slot has values for this tensor."""
        return tensor in self._names

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return elements of the slot in the base's version, float32; see `sources.Source.read`."""
        if self._reader is not None:
            return self._reader.read(tensor, start, stop, out)
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = self._init
        return block

    def __enter__(self) -> Self:
        self.writer.__enter__()
        if self._reader is not None:
            self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.__exit__(kind, error, trace)
        if self._reader is not None:
            self._reader.__exit__(kind, error, trace)
