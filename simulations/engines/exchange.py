"""The exchange of tensors with the one model that all clients train: load a version first, read the update afterwards.

The numbers equal the results of `load_parameters` and `update_of`; work that is the same for all clients is done once
for each version.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch

from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.rows import Form, Rows
from atoll.task.arrays import Arrays, check_finite, check_like
from atoll.task.errors import TaskMismatch
from atoll.task.task import Task
from atoll.tensors.layout import BESIDE, CONTROL, STATE, Layout, in_order
from atoll.training.local.scaffold import ControlVariates, split
from atoll.training.model.frozen import Unchanged, frozen_tensors
from atoll.training.model.parameters import initial_parameters, integer_difference, state_of, trained_by_name
from atoll.training.model.passing_state import PassingState

Array = np.ndarray[Any, Any]


class Exchange:
    """Loader and reader of one model's tensors.

    Args:
        training: the settings of all clients' training.
        model: the model, on its device.
    """

    def __init__(self, training: Training, model: torch.nn.Module) -> None:
        own = training.task.algorithm if isinstance(training.task, Task) else None
        self.form = Form.of(model, local=training.local, algorithm=training.algorithm, own=own)
        self._training, self._model = training, model
        self.lr = training.local.lr
        """The learning rate of the round, for the control variates."""
        self._own_layout = _of_model(self.form.own)
        self.is_stateless = not self.form.own
        """Whether no tensors stay at a client: none begins with local layers or a control variate."""
        self._variates = in_order(t for t in self.form.update if t.name.startswith(CONTROL))
        self._names = [t.name for t in _of_model(self.form.update)]
        names = {id(parameter): name for name, parameter in trained_by_name(model).items()}
        self._trained = [names.get(id(p)) for p in model.parameters() if p.requires_grad]
        self._first_own: Arrays | None = None
        self._version: Arrays = {}
        self._control: Arrays = {}
        self._start: list[torch.Tensor] = []
        self._in_place: list[tuple[str, Array, Array]] = []
        self._elsewhere: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self._passing, self._unchanged = PassingState(model), Unchanged(partial(frozen_tensors, model))
        self._find_state()

    @property
    def layers(self) -> frozenset[str]:
        """Names of the model's tensors that stay at the clients."""
        return frozenset(tensor.name for tensor in self._own_layout)

    def begin(self, version: Arrays) -> None:
        """Set the version that the next clients train from.

        Raises:
            TaskMismatch: it does not belong to the task's model.
        """
        if travelled := sorted(version.keys() & {tensor.name for tensor in self._own_layout}):
            raise TaskMismatch(f"local.keep keeps {', '.join(travelled)} at clients, and the global model has them")
        check_like(version, self.form.update)
        self._version, self._control = split(version)
        self._start = []  # filled when a client trains alone

    def load(self, job: Job) -> ControlVariates | None:
        """Load the version, and the client's local layers, into the model; return the client's control variate.

        Raises:
            TaskMismatch: the client's state does not belong to the model.
        """
        layers, control = self.own_of(job)
        self._passing.restore()
        self._find_new_buffers()
        if not self._start:
            self._make_start()
        with torch.no_grad():
            torch._foreach_copy_(self._state, self._start)
            for tensor, place in zip(self._own_layout, self._own_state, strict=True):
                place.copy_(torch.tensor(layers[tensor.name]))
        return control

    def _make_start(self) -> None:
        self._start = [
            torch.tensor(self._version[name]).to(tensor) for name, tensor in zip(self._names, self._state, strict=True)
        ]
        self._pair()

    def own_of(self, job: Job) -> tuple[Arrays, ControlVariates | None]:
        """Return the local layers that a client begins with, and its control variate.

        Raises:
            TaskMismatch: the client's state does not belong to the model.
        """
        layers, variate = split(job.own) if job.own else ({}, {})
        if self._own_layout:
            layers = layers or self._initial_layers()
            check_like(layers, self._own_layout)
        if self._training.algorithm != "scaffold":
            return layers, None
        if variate:
            check_like({CONTROL + name: array for name, array in variate.items()}, self._variates)
        return layers, ControlVariates(self._control, variate or None)

    def corrections(self, control: ControlVariates | None) -> list[torch.Tensor | None]:
        """Return c - c_i of each trained parameter, in the model's order; empty without SCAFFOLD."""
        if control is None:
            return []
        by_name = control.corrections
        return [
            torch.tensor(by_name[name]).to(self._training.device) if name in by_name else None for name in self._trained
        ]

    def write(self, rows: Rows, index: int, control: ControlVariates | None, num_steps: int) -> tuple[Arrays, Arrays]:
        """Write the update and the client's new state into its row; return both as views. numpy may warn.

        Raises:
            NotFinite: a tensor has NaN or infinite values.
            TaskBroken: the training has changed a tensor that is never sent.
        """
        self.check_frozen()
        self._find_new_buffers()
        update, own = rows.update_of(index), rows.own_of(index)
        for name, trained, start in self._in_place:
            np.subtract(trained, start, out=update[name])
        for name, tensor, begun in self._elsewhere:
            if tensor.is_floating_point():
                torch.from_numpy(update[name]).copy_(_difference(tensor.detach(), begun))
            else:
                update[name][...] = integer_difference(name, tensor.cpu().numpy(), self._version[name])
        for stays, place in zip(self._own_layout, self._own_state, strict=True):
            torch.from_numpy(own[stays.name]).copy_(place.detach())
        self.finish(rows, index, update, control, num_steps)
        return update, own

    def check_frozen(self) -> None:
        """Check that nothing has changed the tensors that are never sent; raise TaskBroken with their names."""
        self._unchanged.check()

    def finish(self, rows: Rows, index: int, update: Arrays, control: ControlVariates | None, num_steps: int) -> None:
        """Check the update, which is in its row, and write SCAFFOLD's new control variate beside it.

        Raises:
            NotFinite: a tensor has NaN or infinite values.
        """
        if control is not None:
            model_update = {name: update[name] for name in self._names}
            check_finite(model_update, "update")
            sent, state = control.after(model_update, num_steps=num_steps, lr=self.lr)
            rows.write(index, sent, state)
            return
        if not math.isfinite(np.dot(rows.update[index], rows.update[index])):  # finite only if every number is
            check_finite(update, "update")

    def _find_new_buffers(self) -> None:
        """Find the model's tensors again if a module has replaced a buffer, which may happen in each step."""
        if any(module._buffers[name] is not tensor for module, name, tensor in self._buffers):
            self._find_state()
            if self._start:
                self._pair()

    def _pair(self) -> None:
        """Pair the model's tensors with their start: float32 ones on the CPU as arrays, the others as tensors."""
        every = list(zip(self._names, self._state, self._start, strict=True))
        plain = {name for name, tensor, _ in every if (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")}
        self._in_place = [(name, tensor.numpy(), start.numpy()) for name, tensor, start in every if name in plain]
        self._elsewhere = [(name, tensor, start) for name, tensor, start in every if name not in plain]

    def _find_state(self) -> None:
        state = state_of(self._model)
        self._state = [state[name] for name in self._names]
        self._own_state = [state[tensor.name] for tensor in self._own_layout]
        self._buffers = [
            (module, name, tensor) for module in self._model.modules() for name, tensor in module._buffers.items()
        ]

    def _initial_layers(self) -> Arrays:
        if self._first_own is None:
            every = initial_parameters(self._training.task, self._training.model_seed)  # type: ignore[arg-type]
            self._first_own = {tensor.name: every[tensor.name] for tensor in self._own_layout}
        return self._first_own


def _difference(tensor: torch.Tensor, begun: torch.Tensor) -> torch.Tensor:
    exact = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(exact) - begun.to(exact)


def _of_model(layout: Layout) -> Layout:
    return tuple(tensor for tensor in layout if not tensor.name.startswith((*BESIDE, STATE)))
