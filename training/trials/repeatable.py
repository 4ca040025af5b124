"""A loss that may be called an extra time, because it keeps no state between its calls."""

import copy
import dis
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from atoll.task.context import Contextual

NUMBERS_MAX = 1 << 20
"""The number of elements of an object's tensors up to which it is copied; a larger loss holds a model."""

PLAIN = (int, float, complex, bool, str, bytes, type, type(None), torch.Tensor, torch.dtype, torch.device)
"""Types of values that a function does not change by calling them."""

STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR")
"""Instructions with an effect that outlasts a call."""


def repeatable(loss: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the loss if it is pure, else a deep copy, else None.

    A function is pure if it assigns nothing outside of itself, and encloses plain values and pure functions. An object
    is copied, unless its tensors are large.
    """
    if isinstance(loss, Contextual):
        inner = repeatable(loss.function)
        return None if inner is None else loss.around(inner)
    if isinstance(loss, BuiltinFunctionType | FunctionType):
        return loss if keeps_nothing(loss) else None
    if isinstance(loss, partial):
        kept = (loss.func, *loss.args, *loss.keywords.values())
        return loss if all(map(_is_plain, kept)) else None
    if _num_elements(loss) > NUMBERS_MAX:
        return None
    try:
        return copy.deepcopy(loss)
    except Exception:
        return None


def keeps_nothing(function: BuiltinFunctionType | FunctionType) -> bool:
    """Return whether a function's code assigns only its own variables, and encloses plain values alone."""
    if not isinstance(function, FunctionType):
        return True
    try:
        enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is not filled yet
        return False
    return not _stores(function.__code__) and all(map(_is_plain, enclosed))


def _stores(code: CodeType) -> bool:
    return any(
        step.opname in STORES or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, BuiltinFunctionType | FunctionType):
        return keeps_nothing(value)
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or (isinstance(value, nn.Module) and not any(True for _ in value.buffers()))


def _num_elements(loss: Any) -> int:
    owner = getattr(loss, "__self__", loss)
    held = [owner, *getattr(owner, "__dict__", {}).values()]
    found = [t for m in held if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())]
    found += [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() for tensor in found)
