"""The repetition of a block's forward pass from where the first one began: draws, counters, and all that it changes.

Torch restores its generators. Here are numpy's and Python's, and what the modules hold: buffers, generators,
numbers, tensors, lists. What a block changes is found in its first passes, and now and then later; only that is copied.
A repetition that still gives other outputs, such as one that reads a clock or counts outside of the model, is
refused by the name of its block.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import set_checkpoint_early_stop

from atoll.parallel.data.batch import tensors
from atoll.training.model.as_built import LIBRARIES
from atoll.training.model.places import is_generator
from atoll.training.optimizers.norms import local
from atoll.training.trials.unit_check import is_due

PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_flat_weights_names"}) - {"_buffers"}
"""The attributes that torch gives to each module, and to recurrent ones for their parameters once more."""

ELEMENTS_MAX = 1 << 24
"""Elements of a tensor up to which it is copied; a larger one is no counter."""

DEEP = 6
"""Containers and objects within each other that are looked into."""

TOLERANCE = 1e-4
"""The largest difference of two sums of outputs that counts as rounding, of the sum of their absolute values."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""The contexts of the forward pass and of its repetition."""

Place = tuple[dict[str, Any], str]
"""A dictionary of attributes or buffers, and a name in it."""


class NotRepeatable(ValueError):
    """A block gives other outputs when it is recomputed; the message names it."""


class Repetition:
    """Repetition of one block's passes: the recomputation has the random numbers and state of the first pass.

    Args:
        block: the block whose passes are repeated.
        name: the name of the block, for a refusal.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self._block, self._name = block, name
        self._seen = 0
        self._moving: dict[tuple[int, str], Place] = {}
        self._draws = True
        self._sums: list[torch.Tensor] = []
        self._expected: list[torch.Tensor] | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next pass is examined."""
        return is_due(self._seen + 1)

    def whole(self) -> AbstractContextManager[Any]:
        """Return the context of torch's checkpoint, in which an examined pass is recomputed up to its outputs."""
        return set_checkpoint_early_stop(False) if self.is_due and torch.is_grad_enabled() else nullcontext()

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward pass: record its outputs, and compare those of the recomputation with them."""

        def run(*args: Any, **options: Any) -> Any:
            outputs = forward(*args, **options)
            if self._expected is not None:
                self._compare(_sums(outputs))
            elif is_due(self._seen):
                self._sums = _sums(outputs)
            return outputs

        return run

    def contexts(self, inner: Callable[[], Contexts] | None = None) -> Contexts:
        """Return the contexts of a pass and of its repetition.

        Args:
            inner: returns the contexts of a kind of recomputation. An examined pass has none: saved results would hide
                a difference.
        """
        found: dict[str, Any] = {}
        forward, again = (nullcontext(), nullcontext()) if inner is None or self.is_due else inner()
        return self._first(found, forward), self._again(found, again)

    @contextmanager
    def _first(self, found: dict[str, Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
        self._seen += 1
        looks = is_due(self._seen)
        places = {(id(holder), key): (holder, key) for holder, key in self._places()} if looks else self._moving
        memo: dict[int, Any] = {}
        before = {at: copied(holder.get(key), memo, DEEP) for at, (holder, key) in places.items()}
        states = _states() if looks or self._draws else None
        with inner:
            yield
        if looks:
            moved = {at: place for at, place in places.items() if not is_same(before[at], place[0].get(place[1]), DEEP)}
            self._moving |= moved
            self._draws = self._draws if self._seen > 1 else False
            self._draws |= _states()[1:] != states[1:] if states is not None else False
        found["before"] = [(place, before[at]) for at, place in self._moving.items() if at in before]
        found["states"] = states if self._draws else None
        found["sums"] = self._sums if looks else None

    @contextmanager
    def _again(self, found: dict[str, Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
        held = [(holder, key, holder.get(key)) for (holder, key), _ in found["before"]]
        now = _states() if found["states"] is not None else None
        for (holder, key), value in found["before"]:
            holder[key] = value
        if now is not None:
            _set_states(found["states"])
        self._expected = found["sums"]
        try:
            with inner:
                yield
        finally:
            self._expected = None
            for holder, key, value in held:
                holder[key] = value
            if now is not None:
                _set_states(now)

    def _places(self) -> Iterator[Place]:
        """Yield the places of data in the block's modules."""
        for module in self._block.modules():
            for key, value in module._buffers.items():
                if value is not None:
                    yield module._buffers, key
            for key in vars(module):
                if key not in OF_TORCH and key not in ("_buffers", "training", "forward"):
                    yield vars(module), key

    def _compare(self, sums: list[torch.Tensor]) -> None:
        """Compare the outputs of the recomputation with those of the first pass.

        Raises:
            NotRepeatable: they differ.
        """
        assert self._expected is not None
        for one, other in zip(self._expected, sums, strict=False):
            with _disable_current_modes():
                agrees = bool(((one - other).abs() <= TOLERANCE * one[-1]).all()) or not bool(one.isfinite().all())
            if not agrees:
                raise NotRepeatable(
                    f"plan.recompute: {self._name or type(self._block).__name__} gives other outputs when it is "
                    "computed again, so its gradients would be wrong: it draws, counts or reads something outside of "
                    "its modules; set plan.recompute=none, draw from torch's, numpy's or Python's global generator, "
                    "or keep the state in an attribute of the module"
                )


def _sums(outputs: Any) -> list[torch.Tensor]:
    """Return for each tensor its sum, a weighted sum, and the sum of its absolute values."""
    found = []
    with torch.no_grad(), _disable_current_modes():  # a kind of recomputation counts the operations
        for tensor in map(local, tensors(outputs)):
            if tensor.is_floating_point() and type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                flat = tensor.detach().reshape(-1).double()
                weights = torch.arange(len(flat), device=flat.device, dtype=flat.dtype).cos()
                found.append(torch.stack([flat.sum(), (flat * weights).sum(), flat.abs().sum()]))
    return found


def _states() -> tuple[Any, ...]:
    """Return the states of numpy's and Python's generators, and marks by which they compare."""
    of_numpy: Any = np.random.get_state()
    of_python = random.getstate()
    return (of_numpy, of_python), of_numpy[1].tobytes(), of_numpy[2:], of_python


def _set_states(states: tuple[Any, ...]) -> None:
    np.random.set_state(states[0][0])
    random.setstate(states[0][1])


def copied(value: Any, memo: dict[int, Any], deep: int) -> Any:
    """Return a copy of data, and of objects that hold data; anything else unchanged. Shared objects stay shared."""
    if isinstance(value, PLAIN) or not deep:
        return value
    if id(value) in memo:
        return memo[id(value)][0]
    found = _copy_of(value, memo, deep)
    memo[id(value)] = found, value  # a deleted object's id could be reused
    return found


def _copy_of(value: Any, memo: dict[int, Any], deep: int) -> Any:
    if is_generator(value):
        return copy.deepcopy(value)
    if isinstance(value, torch.Tensor):
        is_small = type(value) is torch.Tensor and value.numel() <= ELEMENTS_MAX
        return value.detach().clone() if is_small and not value.requires_grad else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= ELEMENTS_MAX else value
    if type(value) in (list, tuple, deque):
        return type(value)(copied(entry, memo, deep - 1) for entry in value)
    if type(value) is set:
        return set(value)
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        found = copy.copy(value)
        found.update({key: copied(entry, memo, deep - 1) for key, entry in value.items()})
        return found
    if is_holder(value):
        try:
            held = copy.copy(value)
        except Exception:  # any: of the class's code; what cannot be copied is shared
            return value
        vars(held).update({key: copied(entry, memo, deep - 1) for key, entry in vars(value).items()})
        return held
    return value


def is_holder(value: Any) -> bool:
    """Return whether a value is an object of a task's class, or a namespace, that holds data in attributes."""
    is_own = type(value).__module__.partition(".")[0] not in LIBRARIES or isinstance(value, SimpleNamespace)
    is_code = callable(value) or isinstance(value, nn.Module | type | ModuleType)
    return is_own and hasattr(value, "__dict__") and not is_code


def is_same(one: Any, other: Any, deep: int) -> bool:
    """Return whether a copy of data is still equal to its original."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, PLAIN):
        return bool(one == other) or one != one
    if isinstance(one, torch.Tensor):
        is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_alike and (one.is_meta or bool(torch.equal(one, other.detach())))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if is_generator(one):
        return bool(_state_of(one) == _state_of(other))
    return deep > 0 and _holds_same(one, other, deep - 1)


def _holds_same(one: Any, other: Any, deep: int) -> bool:
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(is_same(a, b, deep) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key], deep) for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return is_holder(one) and is_same(vars(one), vars(other), deep)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())
