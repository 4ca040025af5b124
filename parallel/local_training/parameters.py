"""The conversion between a model and named arrays: initial parameters, loading, the update.

The global model is float32 masters and integers, whatever the model computes in: float16 and bfloat16 tensors travel as
float32, both ways. A tensor that a model holds under two names (tied weights) travels once, under the first.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atoll.aggregation.tensors.layout import CONTROL, Layout, Tensor, in_order
from atoll.parallel.task.arrays import ALLOWED, Arrays, check_finite, check_like
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.randomness import seeded

if TYPE_CHECKING:
    from atoll.parallel.task.task import Task

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors that travel: its state_dict, each piece of memory once.

    Raises:
        TaskBroken: a tensor has a dtype that may not travel, or an entry is no tensor; all of them are listed.
    """
    state: dict[str, torch.Tensor] = {}
    seen, faults = set(), []
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            faults.append(f"{name} is a {type(tensor).__name__}, and only tensors can travel")
            continue
        if name.startswith(CONTROL):
            faults.append(f"{name}: names that begin with {CONTROL} are reserved for control variates")
            continue
        if tensor.dtype not in _FLOATS + _INTEGERS:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS + _INTEGERS)
            faults.append(f"{name} is {tensor.dtype} (allowed: {allowed}; model.float() converts floats)")
            continue
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or memory not in seen:
            state[name] = tensor
        seen.add(memory)
    if faults:
        raise TaskBroken("; ".join(faults))
    return state


def parameters_of(model: torch.nn.Module) -> Arrays:
    """Return a copy of the model's tensors as arrays that travel."""
    return {name: _array(tensor) for name, tensor in state_of(model).items()}


def initial_parameters(task: "Task", seed: int) -> Arrays:
    """Return the parameters of a newly built model; the same seed gives the same bits.

    Raises:
        TaskBroken: `task.model()` returns no module, or tensors that may not travel.
        NotFinite: the model starts with NaN or infinite values.
    """
    arrays = parameters_of(build_model(task, seed))
    check_finite(arrays, "initial model")
    return arrays


def buffers_of(model: torch.nn.Module) -> list[str]:
    """Return the sorted names of the travelling float tensors that are not trained, such as a running mean."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(name for name, tensor in state_of(model).items() if tensor.dtype in _FLOATS and name not in trained)


def trained_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the travelling parameters that an optimizer moves."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in state_of(model) if name in parameters and parameters[name].requires_grad}


def build_model(task: "Task", seed: int) -> torch.nn.Module:
    """Return the task's model, on the CPU; the run's seed also decides what does not travel, such as fixed features.

    Raises:
        TaskBroken: it is no module.
    """
    with seeded(seed):
        model = task.model()
    if not isinstance(model, torch.nn.Module):
        raise TaskBroken(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
    return model


def load_parameters(model: torch.nn.Module, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Copy global parameters into the model, on any device and in any precision.

    Raises:
        TaskMismatch: names, shapes or dtypes differ; every difference is listed, and the model is unchanged.
    """
    state = state_of(model)
    check_like(arrays, _expected(state))
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_tensor(arrays[name]))


def update_of(before: Mapping[str, np.ndarray[Any, Any]], model: torch.nn.Module) -> Arrays:
    """Return local - global (Reddi et al. 2021, Algorithm 2), after the model was trained from `before`.

    Floats are subtracted in float32. The rounding of the float32 global parameters to a float16 or bfloat16 model, when
    they were loaded, is no part of its update: an untrained model has an update of zeros.

    Raises:
        TaskMismatch: `before` does not belong to this model.
        NotFinite: a tensor has NaN or infinite values.
        ValueError: the difference of two integers does not fit its dtype.
    """
    state = state_of(model)
    check_like(before, _expected(state))
    update: Arrays = {}
    for name, tensor in state.items():
        start = _tensor(before[name])
        if tensor.dtype in _FLOATS:
            start = start.to(tensor.dtype).to(torch.float32)
            update[name] = (tensor.detach().to("cpu", torch.float32) - start).contiguous().numpy()
        else:
            update[name] = integer_difference(name, _array(tensor), start.numpy())
    check_finite(update, "update")
    return update


def integer_difference(name: str, local: np.ndarray[Any, Any], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return local - global of whole numbers.

    Raises:
        ValueError: a difference does not fit their dtype.
    """
    difference = local.astype(np.int64) - start.astype(np.int64)
    narrow: np.ndarray[Any, Any] = difference.astype(local.dtype)
    if not np.array_equal(narrow, difference):
        raise ValueError(f"{name}: the difference local - global does not fit {local.dtype}")
    return narrow


def _expected(state: Mapping[str, torch.Tensor]) -> Layout:
    return in_order(Tensor(name, ALLOWED[_dtype(tensor)], tuple(tensor.shape)) for name, tensor in state.items())


def _dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    return np.dtype(np.float32 if tensor.dtype in _FLOATS else str(tensor.dtype).removeprefix("torch."))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    dtype = torch.float32 if tensor.dtype in _FLOATS else tensor.dtype
    array: np.ndarray[Any, Any] = tensor.detach().to("cpu", dtype, copy=True).contiguous().numpy()
    return array


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array.copy())  # a copy, because the array may be a read-only view of a file
