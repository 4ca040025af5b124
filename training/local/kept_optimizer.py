"""The state of the local optimizer that stays at the client from one round to the next (`Local.keep_optimizer`).

    optimizer/adamw/exp_avg/NAME      a tensor of the shape of parameter NAME, as float32
    optimizer/adamw/step/NAME         a number

DiLoCo across clients: AdamW inside with a state at each client, Nesterov momentum outside at the server. Like any
client state it is the state of the last accepted training. A parameter without a state has zeros, the state of an
optimizer before its first step.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, section 2.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from atoll.task.arrays import Arrays, check_finite, check_like
from atoll.task.local import Local
from atoll.tensors.layout import OPTIMIZER, Layout, Tensor, in_order

MOMENTS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""The entries of torch's state with the parameter's shape, by optimizer."""

STEP = "step"
"""The entry that counts the steps."""


def prefix_of(local: Local, entry: str = "") -> str:
    """Return the prefix of the names of the optimizer's tensors, or of one entry's tensors."""
    return f"{OPTIMIZER}{local.optimizer_name}/" + (f"{entry}/" if entry else "")


def has_steps(local: Local) -> bool:
    """Return whether the optimizer's state has a count of steps (`step`)."""
    return local.optimizer != "sgd"


def layout_of_optimizer(local: Local, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return the tensors of the state.

    Args:
        local: the settings, with an optimizer of `MOMENTS`.
        shapes: name and shape of each trained parameter.
    """
    tensors = []
    for name, shape in shapes:
        tensors += [Tensor(prefix_of(local, entry) + name, "F32", shape) for entry in MOMENTS[local.optimizer_name]]
        tensors += [Tensor(prefix_of(local, STEP) + name, "F32", ())] if has_steps(local) else []
    return in_order(tensors)


def counter(steps: float, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """Make the tensor in which torch's optimizer holds the count of a parameter's steps."""
    is_on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(steps, dtype=torch.float32, device=parameter.device if is_on_device else "cpu")


class KeptOptimizer:
    """The optimizer's state of one client in one process.

    Args:
        local: the settings of the round.
        own: the tensors of the client's state, of any kind; None: the client has no state yet.
    """

    def __init__(self, local: Local, own: Mapping[str, np.ndarray[Any, Any]] | None) -> None:
        self._local = local
        self._before = {name: array for name, array in (own or {}).items() if name.startswith(prefix_of(local))}
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameters: dict[str, torch.nn.Parameter] = {}

    def begin(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Load the client's kept state into a newly made optimizer.

        Raises:
            TaskMismatch: it belongs to another model.
        """
        self._optimizer, self._parameters = optimizer, dict(parameters)
        if not self._before:
            return
        check_like(self._before, self._layout())
        for name, parameter in self._parameters.items():
            state: dict[str, torch.Tensor] = optimizer.state[parameter]
            for entry in MOMENTS[self._local.optimizer_name]:
                values = torch.from_numpy(self._before[prefix_of(self._local, entry) + name].copy())
                state[entry] = torch.zeros_like(parameter).detach().copy_(values)
            if has_steps(self._local):
                steps = float(self._before[prefix_of(self._local, STEP) + name])
                state[STEP] = counter(steps, optimizer.param_groups[0], parameter)

    def arrays(self) -> Arrays:
        """Return the state after the training.

        Raises:
            NotFinite: a value is not finite.
        """
        assert self._optimizer is not None, "begin comes first"
        found: Arrays = {}
        for tensor in self._layout():
            entry, _, name = tensor.name.removeprefix(prefix_of(self._local)).partition("/")
            value = self._optimizer.state.get(self._parameters[name], {}).get(entry)
            found[tensor.name] = (
                np.zeros(tensor.shape, np.float32)
                if value is None
                else value.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
            )
        check_finite(found, "optimizer's state")
        return found

    def _layout(self) -> Layout:
        return layout_of_optimizer(self._local, ((name, tuple(p.shape)) for name, p in self._parameters.items()))
