"""A custom server optimizer behind the contract `Optimizer`: a failing or non-deterministic call is named.

    gram (K, K) --prepare--> a number or an array --> place.prepared
    master, mean (n), slots (n) --apply--> new elements, new slots

Any method may have a further parameter `place`, and two parts are optional:

- `prepare(gram)` is called once in each fold, before the first `apply`. g_kl = <u_k, u_l> over all trained floats, so
  that ||sum_k p_k u_k||^2 = p^T G p with the shares p of `place`.
- `whole = True`: each call gets all elements of one tensor, in their flat order; otherwise any part of it.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.optimizers import Block, State
from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.plugins.guard import RAISED, Guarded
from atoll.plugins.place import NOWHERE, Place

CHECKED_VALUES = 64
"""Largest number of elements of a call that are computed twice, to find an `apply` that is no function of them."""

CHECKED_TOLERANCE = 1e-9
"""Largest relative difference of the two results: rounding in libraries depends on the length."""

_SLOT = re.compile(r"[a-z][a-z_]{0,31}")
_RESERVED = ("aggregate",)
_MODEL = "the model"


class OptimizerFailed(ValueError):
    """A custom optimizer that raised, or broke its contract: it costs the round, and not the process."""


class CustomOptimizer(Guarded):
    """A custom server optimizer, guarded. All methods raise OptimizerFailed.

    Args:
        custom: the object.

    Raises:
        ValueError: it is no optimizer; the message lists all faults.
    """

    failed = OptimizerFailed

    def __init__(self, custom: Any) -> None:
        super().__init__(f"optimizer {type(custom).__name__}", custom)
        self._first: dict[str, float] = {}
        if faults := list(self._faults()):
            raise Refused(*faults)
        self.slots = tuple(self._first)
        self.is_whole = bool(getattr(custom, "whole", False))
        """Whether the calls get whole tensors."""
        self.has_prepare = hasattr(custom, "prepare")
        """Whether the optimizer has `prepare`, which is called once in each fold, before its first step."""

    def init(self, slot: str) -> float:
        """Return the value of every element of a slot before the first round."""
        return self._first[slot]

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Return the new elements of the model, and set the elements of `state`.

        The first elements are computed a second time, alone: an optimizer that keeps state between calls, or whose
        values depend on other elements, gives different results, and is refused.
        """
        number = 0 if self.is_whole else min(CHECKED_VALUES, (len(mean) + 1) // 2)
        first, of_mean = master[:number].copy(), mean[:number].copy()
        before = {slot: values[:number].copy() for slot, values in state.items()}
        new = self._applied(master, mean, state, place)
        if number:
            alone = self._applied(first, of_mean, before, replace(place, stop=place.start + number))
            pairs = [(new, alone), *((state[slot], before[slot]) for slot in state)]
            if not all(_agree(whole[:number], again) for whole, again in pairs):
                raise OptimizerFailed(
                    f"{self.name} computes other values for the same {count_of(number, 'element')} of tensor "
                    f"{place.tensor!r} when it is called again. It keeps no state but its slots, element i depends on "
                    "element i alone unless it has `whole = True`, and what it draws comes from the argument `place`"
                )
        return new

    def _applied(self, master: Block, mean: Block, state: State, place: Place) -> Block:
        given: dict[str, Any] = dict(state)
        made: dict[str, Block] = self.call(
            "apply",
            *(master, mean, given),
            place=place,
            into=lambda new: {of: _numbers(values) for of, values in {_MODEL: new, **given}.items()},
        )
        if given.keys() != state.keys():
            raise OptimizerFailed(
                f"{self.name} leaves the slots {', '.join(sorted(given)) or 'none'}; declared in `slots`: "
                f"{', '.join(sorted(state)) or 'none'}"
            )
        for of, values in made.items():
            if values.shape != master.shape:
                raise OptimizerFailed(
                    f"{self.name} returns {values.shape} for {master.shape} elements of {of}, tensor {place.tensor!r}"
                )
        state.update({slot: made[slot] for slot in state})
        return made[_MODEL]

    def prepare(self, gram: NDArray[np.float64], place: Place) -> NDArray[np.float64]:
        """Return the result of `prepare`, a finite number or an array; it is called twice.

        Args:
            gram: (K, K).
            place: the place, with the shares (K), without a tensor.
        """
        prepared: Block = self.call("prepare", gram.copy(), place=place, into=_numbers)
        again: Block = self.call("prepare", gram.copy(), place=place, into=_numbers)
        if not np.isfinite(prepared).all():
            raise OptimizerFailed(f"{self.name} prepares {prepared}; allowed: a finite number, or an array")
        if prepared.shape != again.shape or not _agree(prepared, again):
            raise OptimizerFailed(
                f"{self.name} prepares another number when it is asked again: it keeps no state but its slots, and "
                "draws from the argument `place`"
            )
        return prepared

    def _faults(self) -> Iterator[str]:
        """Yield the faults of the custom object; record the first values of its slots."""
        name = type(self.custom).__name__
        slots = getattr(self.custom, "slots", ())
        if isinstance(slots, str) or not all(isinstance(slot, str) for slot in slots):
            yield f"{name}.slots is {slots!r}; allowed: a tuple of names"
            return
        for slot in slots:
            if not _SLOT.fullmatch(slot) or slot in _RESERVED:
                yield (
                    f"{name}.slots: {slot!r} is not a slot name: 1 to 32 of a-z and _, none of {', '.join(_RESERVED)}"
                )
        if slots and not callable(getattr(self.custom, "init", None)):
            yield f"{name} has slots, and no method `init`"
            return
        for slot in slots:
            try:
                self._first[slot] = first = float(self.custom.init(slot))
            except RAISED as error:
                yield f"{name}.init({slot!r}) raised {type(error).__name__}: {error}"
            else:
                if not abs(first) <= float(np.finfo(np.float32).max):
                    yield f"{name}.init({slot!r}) is {first}"


def _numbers(result: Any) -> Block:
    return np.asarray(result, np.float64)


def _agree(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return bool(np.allclose(one, other, rtol=CHECKED_TOLERANCE, atol=0.0, equal_nan=True))
