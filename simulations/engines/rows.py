"""The memory of results: one row of float32 for each client, and the few integer tensors beside them.

    update   (n, F) float32    all float tensors of an update side by side, in canonical order
    own      (n, G) float32    all float tensors of the state that stays at the client
    largest  (n, T) float32    the largest magnitude of each of T float tensors of an update, if measured
    whole    (n, ...) by name  integer tensors of either: an update's in the dtype that holds every difference

A fold reads whole rows; the arrays of a `Trained` are views of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.task.algorithm import Algorithm
from atoll.task.arrays import ALLOWED, Arrays
from atoll.task.local import Local
from atoll.tensors.layout import CONTROL, Layout, Tensor, in_order
from atoll.training.local.client import form_of_shared, form_of_state
from atoll.training.local.kept_optimizer import layout_of_optimizer
from atoll.training.local.local_layers import names_that_stay
from atoll.training.model.parameters import difference_dtype, state_of, trained_by_name, travelling_dtype

DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for dtype, name in ALLOWED.items()}  # type: ignore[call-overload]

ALIGNED = 64
"""Alignment of the parts of a buffer [bytes]."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a client's result: its tensors, of the update and of the state that stays at the client."""

    update: Layout
    own: Layout

    @classmethod
    def of(cls, model: torch.nn.Module, *, local: Local, algorithm: str, own: Algorithm | None = None) -> "Form":
        """Return the form of a model under the local settings, with the tensors that an algorithm adds.

        Args:
            model: the model of the task.
            local: the settings, of which `keep` and `keep_optimizer` matter.
            algorithm: the algorithm, by its name; SCAFFOLD adds the control variates.
            own: the custom algorithm, with shared tensors and a client's state; or None.
        """
        stays = names_that_stay(model, local.keep)
        model_tensors = [
            Tensor(name, ALLOWED[travelling_dtype(tensor)], tuple(tensor.shape))
            for name, tensor in state_of(model).items()
        ]
        update = [tensor for tensor in model_tensors if tensor.name not in stays]
        stay = [tensor for tensor in model_tensors if tensor.name in stays]
        if algorithm == "scaffold":
            trained = trained_by_name(model)
            control = [Tensor(CONTROL + t.name, "F32", t.shape) for t in update if t.name in trained]
            update, stay = update + control, stay + control
        if local.keep_optimizer:
            shapes = ((name, tuple(parameter.shape)) for name, parameter in trained_by_name(model).items())
            stay += layout_of_optimizer(local, shapes)
        if own is not None:
            update, stay = [*update, *form_of_shared(own.shared(model))], [*stay, *form_of_state(own.state(model))]
        return cls(in_order(update), in_order(stay))

    @property
    def row_bytes(self) -> int:
        """The size of one client's result [bytes]."""
        return sum(tensor.num_bytes for tensor in (*self.update, *self.own))


class Columns:
    """Columns of a layout's float tensors in a row."""

    def __init__(self, layout: Layout) -> None:
        self.places: list[tuple[str, slice, tuple[int, ...]]] = []
        self.integers = [tensor for tensor in layout if tensor.dtype != "F32"]
        width = 0
        for tensor in layout:
            if tensor.dtype == "F32":
                self.places.append((tensor.name, slice(width, width + tensor.num_elements), tensor.shape))
                width += tensor.num_elements
        self.width = width

    def views(self, rows: np.ndarray[Any, Any]) -> Arrays:
        """Return the tensors of n rows (n, width), each as (n, ...)."""
        return {name: rows[:, place].reshape(len(rows), *shape) for name, place, shape in self.places}


class Rows:
    """Memory for the results of some clients, a row for each.

    Args:
        form: the form of the results.
        count: the number of clients.
        buffer: the memory, `Rows.num_bytes` long; None: new memory.
    """

    def __init__(self, form: Form, count: int, buffer: Any = None) -> None:
        self.count = count
        both = Columns(form.update), Columns(form.own)
        shapes = list(_parts(form, count, both))
        if buffer is None:
            buffer = np.empty(_end(shapes), np.uint8)
        memory = np.frombuffer(buffer, np.uint8)  # every view below references this one array
        arrays = {name: memory[at : at + size].view(dtype).reshape(shape) for name, at, size, dtype, shape in shapes}
        self.update, self.own = arrays.pop("update"), arrays.pop("own")
        """Float tensors of updates (n, F) and of client states (n, G), float32."""
        self.largest = arrays.pop("largest")
        """Largest magnitudes (n, T), float32."""
        self._views = [
            columns.views(floats) | {t.name: arrays[f"{part} {t.name}"] for t in columns.integers}
            for columns, floats, part in zip(both, (self.update, self.own), ("update", "own"), strict=True)
        ]
        self.memory = memory

    @staticmethod
    def num_bytes(form: Form, count: int) -> int:
        """Return the size of a buffer for a number of clients [bytes]."""
        return _end(list(_parts(form, count, (Columns(form.update), Columns(form.own)))))

    def update_of(self, index: int) -> Arrays:
        """Return the update of one client, as views."""
        return {name: view[index, ...] for name, view in self._views[0].items()}

    def own_of(self, index: int) -> Arrays:
        """Return the state of one client, as views."""
        return {name: view[index, ...] for name, view in self._views[1].items()}

    def updates_of(self, first: int, count: int) -> list[Arrays]:
        """Return the updates of adjacent clients, like `update_of`, in a third of the time."""
        names, views = list(self._views[0]), self._views[0].values()
        if any(view.ndim == 1 for view in views):  # an item of these would be a number instead of a view
            return [self.update_of(index) for index in range(first, first + count)]
        each = zip(*(view[first : first + count] for view in views), strict=True)
        return [dict(zip(names, arrays, strict=True)) for arrays in each]

    def has_places_for(self, own: Arrays) -> bool:
        """Return whether rows have room for a state's tensors; a Flower app's state may take any form at any time."""
        return own.keys() <= self._views[1].keys()

    def write(self, index: int, update: Mapping[str, np.ndarray[Any, Any]], own: Arrays | None) -> None:
        """Copy a client's arrays into its row."""
        for views, arrays in ((self.update_of(index), update), (self.own_of(index), own or {})):
            for name, array in arrays.items():
                views[name][...] = array


def _parts(
    form: Form, count: int, columns: tuple[Columns, Columns]
) -> Iterable[tuple[str, int, int, np.dtype[Any], tuple[int, ...]]]:
    """Yield name, offset, bytes, dtype and shape of each part of a buffer."""
    at = 0
    shapes: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
        (name, np.dtype(np.float32), (count, width))
        for name, width in (
            ("update", columns[0].width),
            ("own", columns[1].width),
            ("largest", len(columns[0].places)),
        )
    ]
    for part, layout in (("update", form.update), ("own", form.own)):
        for tensor in (tensor for tensor in layout if tensor.dtype != "F32"):
            dtype = DTYPES[tensor.dtype]
            stored = difference_dtype(dtype) if part == "update" else dtype
            shapes.append((f"{part} {tensor.name}", stored, (count, *tensor.shape)))
    for name, dtype, shape in shapes:
        size = int(np.prod(shape)) * dtype.itemsize
        yield name, at, size, dtype, shape
        at += -(-size // ALIGNED) * ALIGNED


def _end(parts: list[tuple[str, int, int, np.dtype[Any], tuple[int, ...]]]) -> int:
    _, at, size, _, _ = parts[-1]
    return max(1, at + size)
