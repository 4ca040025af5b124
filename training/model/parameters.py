"""The conversion between a model and named arrays: initial parameters, loading, the update.

The global model is float32 masters and integers, whatever the model's dtypes: float16, bfloat16 and float64 tensors
are sent as float32, both ways, and bool as uint8, 0 or 1. A tensor that a model holds under two names (tied weights)
is sent once, under the first. With `Task(travels="trained")` frozen tensors are not sent (`frozen`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from atoll.task.arrays import ALLOWED, Arrays, check_finite, check_like
from atoll.task.base import TRAINED
from atoll.task.context import Context, context_of, within
from atoll.task.errors import TaskBroken
from atoll.task.randomness import seeded
from atoll.tensors.layout import BESIDE, Layout, Tensor, in_order
from atoll.training.base.peft_models import adapter_faults
from atoll.training.model.as_built import AsBuilt
from atoll.training.model.compiled import in_place
from atoll.training.model.frozen import frozen_of, keep_frozen, load_base

if TYPE_CHECKING:
    from atoll.task.task import Task

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_WIDER: dict[np.dtype[Any], tuple[Any, ...]] = {
    np.dtype(np.uint8): (np.uint8, np.int16),
    np.dtype(np.int8): (np.int8, np.int16),
    np.dtype(np.int16): (np.int16, np.int32),
    np.dtype(np.int32): (np.int32, np.int64),
    np.dtype(np.int64): (np.int64,),
}
"""The dtypes of a difference of two integers, the narrowest first."""


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's exchanged tensors, also on meta: its state_dict without frozen ones, each memory once.

    Raises:
        TaskBroken: a tensor has a dtype that cannot be exchanged, or an entry is no tensor; all of them are listed.
    """
    state: dict[str, torch.Tensor] = {}
    seen, faults, frozen = set(), [], frozen_of(model)
    for name, tensor in model.state_dict().items():
        if name in frozen:
            continue
        if name.startswith(BESIDE):
            faults.append(f"{name}: the prefixes {', '.join(BESIDE)} are reserved for tensors beside the model")
            continue
        if fault := travel_fault(name, tensor):
            faults.append(fault)
            continue
        memory = _memory_of(tensor)
        if tensor.numel() == 0 or memory not in seen:
            state[name] = tensor
        seen.add(memory)
    if faults:
        raise TaskBroken(*faults)
    return state


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    address = (tensor.untyped_storage()._cdata, tensor.storage_offset()) if tensor.is_meta else tensor.data_ptr()
    return address, tensor.shape, tensor.stride(), tensor.dtype


def aliases_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return all names of each tied tensor, by the name under which it is exchanged."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            names.setdefault(_memory_of(tensor), []).append(name)
    return {of_one[0]: of_one for of_one in names.values() if len(of_one) > 1}


def travel_fault(name: str, tensor: Any) -> str | None:
    """Return the reason why an entry of a state_dict cannot be exchanged, with the way out, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is a {type(tensor).__name__}, and only tensors can be exchanged"
    if is_lazy(tensor):
        return f"{name} has no shape yet: call the lazy module with an example in task.model(), before it is returned"
    if tensor.layout != torch.strided:
        return f"{name} is {tensor.layout}, and only dense tensors can be exchanged: use to_dense()"
    if tensor.dtype not in _FLOATS + _INTEGERS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATS + _INTEGERS)
        return (
            f"{name} is {tensor.dtype} (allowed: {allowed}; model.float() converts floats, and a buffer of "
            "register_buffer(..., persistent=False) is not exchanged)"
        )
    return None


def forms_of(model: torch.nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor that is exchanged, by name, tied parameters once; also on meta."""
    travelling, frozen = model.state_dict(), frozen_of(model)
    unique = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {
        name: (tuple(tensor.shape), ALLOWED[travelling_dtype(tensor)])
        for name, tensor in travelling.items()
        if name in unique and name not in frozen
    }


def travel_faults(model: torch.nn.Module) -> list[str]:
    """Return the reasons why tensors of a model, which may be on the meta device, cannot be in a model's file."""
    state = model.state_dict().items()
    return [fault for name, tensor in state if (fault := travel_fault(name, tensor))]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share a place in memory.

    With ascending strides s_i of the dimensions with more than one of n_i elements there is no overlap if each
    s_i > sum over j < i of (n_j - 1) s_j.
    """
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def value_faults(model: torch.nn.Module) -> list[str]:
    """Return the reasons why values of a new model cannot be in a model's file; empty on the meta device."""
    frozen = frozen_of(model)
    return [
        fault
        for name, tensor in model.state_dict().items()
        if name not in frozen
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and travel_fault(name, tensor) is None
        if (fault := value_fault(name, tensor)) is not None
    ]


def value_fault(name: str, tensor: torch.Tensor) -> str | None:
    """Return the reason why the first values of a tensor, or of a part of it, cannot be in a model's file."""
    if torch.isfinite(tensor.detach().float()).all():
        return None
    return (
        f"{name} starts with NaN, infinite values or values beyond float32, and only finite numbers are exchanged (a "
        "constant, such as a mask, is not exchanged with register_buffer(..., persistent=False))"
    )


def parameters_of(model: torch.nn.Module) -> Arrays:
    """Return a copy of the model's tensors as arrays in their form on the wire."""
    return {name: _array(tensor) for name, tensor in state_of(model).items()}


def initial_parameters(task: "Task", seed: int) -> Arrays:
    """Return the parameters of a new model; the same seed gives the same bits.

    Raises:
        TaskBroken: `task.model()` returns no module, or tensors that cannot be exchanged; or the model starts with NaN,
            infinite values or values beyond float32.
    """
    return first_parameters(task, build_model(task, seed))


def first_parameters(task: "Task", model: torch.nn.Module) -> Arrays:
    """Return the parameters of a new model of a task; errors as in `initial_parameters`."""
    arrays = parameters_of(model)
    faults = value_faults(model) + adapter_faults(model)
    if task.fit is None:
        faults += training_faults(model)
    if faults:
        raise TaskBroken(*faults)
    return arrays


def training_faults(model: torch.nn.Module) -> list[str]:
    """Return the reasons why no optimizer can train a model."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained and any(True for _ in model.parameters()):
        return [f"{type(model).__name__} has no parameter to train"]
    return [
        f"{name}: several elements share one place in memory (expand), which no optimizer can step; keep the small "
        "tensor as the parameter and expand it in forward, or clone() it"
        for name, parameter in trained
        if overlaps_itself(parameter)
    ]


def buffers_of(model: torch.nn.Module) -> list[str]:
    """Return the sorted names of the exchanged float tensors that are not trained, such as a running mean."""
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(name for name, tensor in state_of(model).items() if tensor.dtype in _FLOATS and name not in trained)


def trained_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the exchanged parameters that an optimizer trains, by name."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name] for name in state_of(model) if name in parameters and parameters[name].requires_grad}


def build_model(task: "Task", seed: int) -> torch.nn.Module:
    """Build the task's model, on the CPU; tensors that are not exchanged also follow from the run's seed.

    Raises:
        TaskBroken: it is no module, or only trained tensors are exchanged and the model has none.
        BaseRefused: the files of its base do not fit.
    """
    model = bare_model(task, seed)
    if task.base is not None:
        load_base(model, task.base, context_of(task, seed=seed))
    return model


def bare_model(task: "Task", seed: int) -> torch.nn.Module:
    """Return the result of `task.model()`, without the values of its base; errors as in `build_model`."""
    with seeded(seed), within(Context(seed=seed, options=task.options)):
        model = in_place(task.model())
    if not isinstance(model, torch.nn.Module):
        raise TaskBroken(f"task.model() must return a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():  # received values are copied into each element
        for name, buffer in module._buffers.items():
            if buffer is not None and overlaps_itself(buffer):
                module._buffers[name] = buffer.contiguous()
    if task.travels == TRAINED:
        keep_frozen(model)
    return model


def model_on_meta(task: "Task") -> torch.nn.Module:
    """Return the model without memory for its values; with memory, if its code cannot build it otherwise."""
    with built_on_meta(task) as model:
        return model


@contextmanager
def built_on_meta(task: "Task") -> Iterator[torch.nn.Module]:
    """Build the model without memory for its values; with memory, if its code cannot build it otherwise.

    State that its code keeps beside the model, such as a table in a cache, or a parameter in a list, stays for the
    block. Then it is restored: it has no values, and the next model is built by the same code.
    """
    before = AsBuilt({"model": task.model}, with_caches=True)
    try:
        try:
            with torch.device("meta"):
                model = task.model()
        except Exception:  # any error: the code needs values, or fails with them, too
            before.restore()
            model = task.model()
        yield in_place(model)
    finally:
        before.restore()


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

    Floats are subtracted in float32, float64 in float64 and then rounded to float32. The rounding of the float32
    global parameters to the model's dtype, when they were loaded, is no part of its update: an untrained model has an
    update of zeros. A difference of bools is a difference of 0 and 1.

    Raises:
        TaskMismatch: `before` does not belong to this model.
        NotFinite: a tensor has NaN or infinite values.
        ValueError: the difference of two integers does not fit int64.
    """
    state = state_of(model)
    check_like(before, _expected(state))
    update: Arrays = {}
    for name, tensor in state.items():
        start = _tensor(before[name])
        if tensor.dtype in _FLOATS:
            exact = torch.promote_types(tensor.dtype, torch.float32)
            start = start.to(tensor.dtype).to(exact)
            update[name] = (tensor.detach().to("cpu", exact) - start).to(torch.float32).contiguous().numpy()
        else:
            update[name] = integer_difference(name, _array(tensor), start.numpy())
    check_finite(update, "update")
    return update


def integer_difference(name: str, local: np.ndarray[Any, Any], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return local - global of integers of (*S): in their dtype if it fits, else in the next wider signed dtype.

    0 - 1 of uint8 is -1 of int16. The mean of such differences, added to the global tensor, is within its dtype.

    Raises:
        ValueError: a difference does not fit int64.
    """
    start = start.astype(local.dtype, copy=False)
    difference = local.astype(np.int64) - start.astype(np.int64)  # wraps for int64 alone
    if not np.array_equal(difference < 0, local < start):
        raise ValueError(f"{name}: the difference local - global does not fit int64")
    narrow, *wider = _WIDER[np.dtype(np.uint8) if local.dtype == np.bool_ else local.dtype]
    low, high = np.iinfo(narrow).min, np.iinfo(narrow).max
    fits = not wider or bool(((low <= difference) & (difference <= high)).all())
    found: np.ndarray[Any, Any] = difference.astype(narrow if fits else wider[0])
    return found


def difference_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype for every difference of two integers of this dtype; for int64, int64."""
    widest: np.dtype[Any] = np.dtype(_WIDER[dtype][-1])
    return widest


def travelling_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """Return the numpy dtype in which a model's tensor is exchanged."""
    if tensor.dtype in _FLOATS:
        return np.dtype(np.float32)
    return np.dtype(np.uint8 if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix("torch."))


def _expected(state: Mapping[str, torch.Tensor]) -> Layout:
    return in_order(
        Tensor(name, ALLOWED[travelling_dtype(tensor)], tuple(tensor.shape)) for name, tensor in state.items()
    )


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    dtype = torch.float32 if tensor.dtype in _FLOATS else torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
    array: np.ndarray[Any, Any] = tensor.detach().to("cpu", dtype, copy=True).contiguous().numpy()
    return array


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array.copy())  # a copy, because the array may be a read-only view of a file
