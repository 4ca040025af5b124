"""A server optimizer of a user's own: its contract, and the checks of each call.

    gram (K, K) --prepare--> a number or an array --> place.prepared
    master, mean (n), slots (n) --apply--> new elements, new slots

The contract is that of `optimizers.Optimizer`. Any method may have a further parameter `place`, and two parts are
optional:

- `prepare(gram)` is asked once in each fold, before the first `apply`. g_kl = <u_k, u_l> over all trained floats, so
  that ||sum_k p_k u_k||^2 = p^T G p with the shares p of `place`.
- `whole = True`: each call gets all elements of one tensor, in their flat order; otherwise any part of it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.optimizers import Block, State
from atoll.aggregation.place import NOWHERE, Place, takes_place
from atoll.aggregation.printable import count_of

CHECKED_VALUES = 64
"""Largest number of elements of a call that are computed a second time, to find an `apply` that is no function of
them."""

CHECKED_TOLERANCE = 1e-9
"""Largest relative difference of the two results: libraries round by length."""

_SLOT = re.compile(r"[a-z][a-z_]{0,31}")
_RESERVED = ("aggregate",)


class OptimizerFailed(ValueError):
    """A user's optimizer raised an unexpected error, or broke its contract: it costs the round, and not the process."""


class OwnOptimizer:
    """A user's server optimizer as an `Optimizer`.

    Args:
        own: the user's object.

    Raises:
        ValueError: it is no optimizer; with all faults.
    """

    def __init__(self, own: Any) -> None:
        self._own, self._name = own, type(own).__name__
        self.slots: tuple[str, ...] = ()
        if faults := self._faults():
            raise ValueError("; ".join(faults))
        self.slots = tuple(getattr(own, "slots", ()))
        self.is_whole = bool(getattr(own, "whole", False))
        """The calls get whole tensors."""
        self.has_prepare = hasattr(own, "prepare")
        """The optimizer is asked once in each fold, before its first step."""

    def init(self, slot: str) -> float:
        """Return the value of every element of a slot before the first round."""
        return float(self._own.init(slot))

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Return the new elements of the model, and set those of `state`.

        The first elements are computed a second time, alone: an optimizer that keeps state of its own between calls, or
        whose values depend on other elements, has two results.

        Raises:
            OptimizerFailed: the optimizer raised, returned another number of values, or has two results.
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
                    f"optimizer {self._name} computes other values for the same "
                    f"{count_of(number, 'element')} of tensor {place.tensor!r} when it is called again. It keeps no "
                    "state but its slots, element i depends on element i alone unless it has `whole = True`, and what "
                    "it draws comes from the argument `place`"
                )
        return new

    def _applied(self, master: Block, mean: Block, state: State, place: Place) -> Block:
        given = dict(state)
        new = np.asarray(self._call(self._own.apply, master, mean, given, place=place), np.float64)
        for what, values in (("the model", new), *given.items()):
            if np.shape(values) != master.shape:
                raise OptimizerFailed(
                    f"optimizer {self._name} makes {np.shape(values)} of {master.shape} elements of {what}, tensor "
                    f"{place.tensor!r}"
                )
        if given.keys() != state.keys():
            raise OptimizerFailed(
                f"optimizer {self._name} leaves the slots {', '.join(sorted(given)) or 'none'}; declared in `slots`: "
                f"{', '.join(sorted(state)) or 'none'}"
            )
        state.update({slot: np.asarray(values, np.float64) for slot, values in given.items()})
        return new

    def prepare(self, gram: NDArray[np.float64], place: Place) -> NDArray[np.float64]:
        """Return the result of `prepare`, as an array of its shape.

        Args:
            gram: (K, K).
            place: with the shares (K), without a tensor.

        Raises:
            OptimizerFailed: the optimizer raised, the result is no finite number or array of them, or it is another one
                when it is asked again.
        """
        found, again = (self._call(self._own.prepare, gram.copy(), place=place) for _ in range(2))
        try:
            prepared, other = np.asarray(found, np.float64), np.asarray(again, np.float64)
        except (TypeError, ValueError):
            prepared = other = np.array(np.nan)
        if not np.isfinite(prepared).all():
            raise OptimizerFailed(f"optimizer {self._name} prepares {found!r}; allowed: a finite number, or an array")
        if prepared.shape != other.shape or not _agree(prepared, other):
            raise OptimizerFailed(
                f"optimizer {self._name} prepares another number when it is asked again: it keeps no state but its "
                "slots, and draws from the argument `place`"
            )
        return prepared

    def _call(self, method: Callable[..., Any], *arguments: Any, place: Place) -> Any:
        try:
            return method(*arguments, place=place) if takes_place(method) else method(*arguments)
        except Exception as error:
            raise OptimizerFailed(f"optimizer {self._name} raised {type(error).__name__}: {error}") from error

    def _faults(self) -> list[str]:
        if not callable(getattr(self._own, "apply", None)):
            return [f"{self._name} has no method `apply`"]
        slots = getattr(self._own, "slots", ())
        if isinstance(slots, str) or not all(isinstance(slot, str) for slot in slots):
            return [f"{self._name}.slots is {slots!r}; allowed: a tuple of names"]
        faults = [
            f"{self._name}.slots: {slot!r} is no name of a slot: 1 to 32 of a-z and _, none of {', '.join(_RESERVED)}"
            for slot in slots
            if not _SLOT.fullmatch(slot) or slot in _RESERVED
        ]
        if slots and not callable(getattr(self._own, "init", None)):
            return [*faults, f"{self._name} has slots, and no method `init`"]
        return faults + [fault for slot in slots if (fault := self._fault_of_init(slot))]

    def _fault_of_init(self, slot: str) -> str:
        try:
            first = float(self._own.init(slot))
        except Exception as error:
            return f"{self._name}.init({slot!r}) raised {type(error).__name__}: {error}"
        return "" if abs(first) <= float(np.finfo(np.float32).max) else f"{self._name}.init({slot!r}) is {first}"


def _agree(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    return bool(np.allclose(one, other, rtol=CHECKED_TOLERANCE, atol=0.0, equal_nan=True))
