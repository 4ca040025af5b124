"""What a fold does with the mean: the server optimizer, and what it and the rule keep from round to round.

A slot is kept as a safetensors file beside each version: the optimizer's moments of the trained tensors, and, for a
rule that looks back at it, the last aggregate of all floats.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.optimizers import FedAvg, Optimizer
from atoll.aggregation.rules.rule import Rule, takes_centre
from atoll.aggregation.tensors.layout import CONTROL, FLOATS, Layout, Piece, Tensor
from atoll.aggregation.tensors.safetensors_file import TensorFileWriter
from atoll.aggregation.updates.reader import UpdateReader, stored_shard

AGGREGATE = "aggregate"
"""The slot of the last aggregate."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """An older version that the model is drawn towards (`anchor.drawn`); integers follow their mean."""

    version: Path
    """x_old: a file with the base's layout, or the same shard of it."""
    share: float
    """a, in (0, 1]."""


@dataclass(frozen=True, slots=True)
class Step:
    """How the updates become one, how that moves the model, and where the slots lie.

    Slots are read from `before` (without them: as they begin) and appear in `after`, before the new version does.
    """

    optimizer: Optimizer = FedAvg()  # noqa: RUF009 - a value
    trained: Container[str] = frozenset()
    """Names of the float tensors that the optimizer moves; the others follow the mean."""
    rule: Rule | None = None
    """In place of the exact weighted mean of floats; integers follow their mean."""
    scale: float = 1.0
    """What the exact mean of the trained floats is multiplied with before the optimizer (`weights.normalized`)."""
    num_clients: int | None = None
    """SCAFFOLD's N: tensors named `control/...` move by the sum of their updates over N. None: there are none."""
    before: Mapping[str, Path] = field(default_factory=dict)
    after: Mapping[str, Path] = field(default_factory=dict)
    anchor: "Anchor | None" = None

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what is kept."""
        return slots_of(self.optimizer, self.rule)

    def is_control(self, tensor: Tensor) -> bool:
        """Whether it is a control variate."""
        return self.num_clients is not None and tensor.name.startswith(CONTROL)

    def is_trained(self, tensor: Tensor) -> bool:
        """Whether the optimizer moves it."""
        return tensor.dtype in FLOATS and tensor.name in self.trained


def slots_of(optimizer: Optimizer, rule: Rule | None) -> tuple[str, ...]:
    """Names of what an optimizer and a rule keep from round to round."""
    return (*optimizer.slots, AGGREGATE) if rule is not None and takes_centre(rule) else optimizer.slots


def kept_pieces(name: str, step: Step, layout: Layout, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The pieces, of those of a model, for which a slot keeps something."""
    names = {tensor.name for tensor in layout if _keeps(name, step, tensor)}
    return tuple(piece for piece in pieces if piece.tensor in names)


def _keeps(name: str, step: Step, tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS if name == AGGREGATE else step.is_trained(tensor)


class Slot:
    """One slot: of the base's version, and of the new one."""

    def __init__(self, name: str, step: Step, layout: Layout, pieces: Iterable[Piece]) -> None:
        """Args: the slot's name; the step; the model's tensors; the pieces of it that are folded here."""
        self.name = name
        self._init = 0.0 if name == AGGREGATE else step.optimizer.init(name)
        self._pieces = kept_pieces(name, step, layout, pieces)
        self._names = {tensor.name for tensor in layout if _keeps(name, step, tensor)}
        self.writer = TensorFileWriter(step.after[name], layout, pieces=self._pieces)
        self._reader: UpdateReader | None = None
        if name in step.before:
            self._reader = UpdateReader(stored_shard(step.before[name], self._pieces))

    def carries(self, tensor: str) -> bool:
        """Whether the slot keeps something for this tensor."""
        return tensor in self._names

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """What the base's version has of it, float32; see `sources.Source.read`."""
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
