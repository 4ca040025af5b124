"""The contract of a rule that reduces the updates of a round to one: the median, multi-Krum, or a user's own.

    sources --gram--> (K, K) --mixing--> (R, K) --combine--> rows (R, n) --reduce--> (n)

Every rule reduces: it makes one value of an element's R. A rule on the geometry of the updates mixes before: from their
inner products it determines R combinations of them, which are reduced. Both stages run tile by tile over the stored
updates; a rule never sees a file, a tensor's name or a whole update.

Legend: K updates u_k, of which up to f may be anything; g_kl = <u_k, u_l> over all float tensors; n elements of a tile.

For all rules:

- Updates come in the order of their client ids, so that the result depends on the set of updates alone.
- Updates count equally. `num_examples` is the client's own claim: a liar would weigh most. A late update's discount
  does not count either.
- Integer tensors do not take part.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.place import NOWHERE, Place, takes_place
from atoll.aggregation.printable import count_of


class Rule(Protocol):
    """A reduction of several updates to one, element by element. It is a value: stateless, and shared by threads.

    `reduce` and `mixing` may have a second parameter `place`, a `Place`.
    """

    def reduce(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Reduce each element's R values to one.

        Args:
            rows: (R, n) finite, one contiguous row for each update. May be overwritten.

        Returns:
            (n). Value i depends on column i alone: the result must not depend on where a tile begins.

        Raises:
            ValueError: R is too small.
        """


@runtime_checkable
class GeometricRule(Rule, Protocol):
    """A rule that mixes whole updates by their angles and distances before it reduces."""

    def mixing(self, gram: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the combinations of the updates to reduce: row r is sum_k A_rk u_k.

        Args:
            gram: (K, K) the g_kl; with the centre as the last row and column, for rules that take one.

        Returns:
            A: (R, K), R >= 1.

        Raises:
            ValueError: K is too small.
        """


@runtime_checkable
class Checked(Protocol):
    """A rule that needs a minimum number of updates."""

    def check(self, num_updates: int) -> None:
        """Raise ValueError, with the number and what is allowed, if the rule guarantees nothing for so few updates."""


def check_count(rule: Rule, num_updates: int) -> None:
    """Check that the rule can take this number of updates: for a quorum before a run, and for a round before its fold.

    Raises:
        ValueError: there are none, or too few for the rule.
    """
    if num_updates < 1:
        raise ValueError(f"{count_of(num_updates, 'update is', 'updates are')} too few for a rule: it needs at least 1")
    if isinstance(rule, Checked):
        rule.check(num_updates)


class RuleFailed(ValueError):
    """A rule, most likely the user's own, raised an unexpected error: it costs the round, and not the process."""


CHECKED_VALUES = 64
"""Largest number of elements of a piece that are reduced a second time, to find a rule that is no function of them."""

CHECKED_TOLERANCE = 1e-5
"""Largest difference of the two results, relative to the largest value of the element: libraries round by length."""


def call_rule(rule: Rule, method: Callable[..., Any], argument: NDArray[Any], place: Place = NOWHERE) -> Any:
    """Return the result of a rule's method, which is called with the place if it has a parameter `place`.

    Raises:
        ValueError, OSError: as the rule does.
        RuleFailed: the rule raised anything else.
    """
    try:
        return method(argument, place=place) if takes_place(method) else method(argument)
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise RuleFailed(f"{type(rule).__name__} raised {type(error).__name__}: {error}") from error


def reduced(rule: Rule, rows: NDArray[np.float32], place: Place) -> NDArray[Any]:
    """Return the result of a rule's `reduce` for the elements of a piece.

    A user's rule reduces the first elements twice, in the piece and alone. A rule that keeps state between its calls,
    that draws from a generator of its own, or whose values depend on other columns has two results.

    Raises:
        ValueError, OSError, RuleFailed: as `call_rule`; the two results differ.
    """
    if type(rule).__module__.startswith("atoll."):
        return np.asarray(call_rule(rule, rule.reduce, rows, place))
    number = min(CHECKED_VALUES, (rows.shape[1] + 1) // 2)  # never all of several columns
    again = rows[:, :number].copy()  # `reduce` may overwrite the rows
    largest = np.abs(again).max(axis=0, initial=0.0)
    values = np.asarray(call_rule(rule, rule.reduce, rows, place))
    first = replace(place, stop=place.start + number)
    alone = np.asarray(call_rule(rule, rule.reduce, again, first))
    if values.shape == rows.shape[1:] and not _agree(values[:number], alone, largest):
        raise RuleFailed(
            f"{type(rule).__name__} reduces the same {count_of(number, 'element')} of tensor "
            f"{place.tensor!r} to other values when "
            "it is called again. A rule keeps no state between calls, and value i depends on column i alone; what it "
            "draws comes from the argument `place` of `reduce(rows, place)`, which also has round, version and tensor"
        )
    return values


def _agree(one: NDArray[Any], other: NDArray[Any], largest: NDArray[Any]) -> bool:
    if one.shape != other.shape:
        return False
    close = np.abs(one - other) <= CHECKED_TOLERANCE * np.maximum(largest, np.abs(one))
    return bool(np.all(close | (one == other) | (np.isnan(one) & np.isnan(other))))


def takes_centre(rule: Rule) -> bool:
    """Return whether the rule takes one more source, last: the previous round's aggregate (`takes_centre = True`)."""
    return bool(getattr(rule, "takes_centre", False))


def num_malicious(malicious: int | float, num_updates: int) -> int:
    """Return f: an int is the number itself; a float is a fraction of the updates, rounded down.

    Raises:
        ValueError: a number below 0, or a fraction outside [0, 1/2).
    """
    if isinstance(malicious, int):
        if malicious < 0:
            raise ValueError(f"malicious {malicious} is not at least 0")
        return malicious
    if not 0.0 <= malicious < 0.5:
        raise ValueError(f"malicious {malicious} is a share, and not in [0, 0.5)")
    return math.floor(Fraction(str(malicious)) * num_updates)  # the decimal as written: 0.29 of 100 is 29
