"""The contract of a rule by which the updates of a round become one: the median, multi-Krum, or a user's own.

    sources --gram--> (K, K) --mixing--> (R, K) --combine--> rows (R, n) --reduce--> (n)

Every rule reduces: it makes one value of an element's R. A rule that also looks at how the updates lie to each other
mixes before: it sees their inner products, and says which R combinations of them are reduced. Both parts of the pipe
run tile by tile over the stored updates; a rule never sees a file, a tensor's name or a whole update.

Legend: K updates u_k, of which up to f may be anything; g_kl = <u_k, u_l> over all float tensors; n elements of a tile.

What holds of all rules:

- Updates come in the order of their client ids, so that what a rule gives depends on the set of updates alone.
- Updates count alike. `num_examples` is the client's own word: whoever lies would weigh most. A late update's discount
  does not count either.
- Integer tensors do not take part.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Rule(Protocol):
    """Makes one update of several, element by element. A value: it keeps nothing between calls, threads share it."""

    def reduce(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """One value of each element's R.

        Args:
            rows: (R, n) finite, one contiguous row for each update. May be overwritten.

        Returns:
            (n). Value i depends on column i alone: where a tile begins must not show.

        Raises:
            ValueError: R is too small.
        """


@runtime_checkable
class GeometricRule(Rule, Protocol):
    """A rule that looks at angles and distances between whole updates before it reduces."""

    def mixing(self, gram: NDArray[np.float64]) -> NDArray[np.float64]:
        """Which combinations of the updates are reduced: row r is sum_k A_rk u_k.

        Args:
            gram: (K, K) the g_kl; with the centre as the last row and column, for rules that take one.

        Returns:
            A: (R, K), R >= 1.

        Raises:
            ValueError: K is too small.
        """


@runtime_checkable
class Checked(Protocol):
    """A rule that cannot do with any number of updates."""

    def check(self, num_updates: int) -> None:
        """Raise ValueError, with the number and what is allowed, when the rule promises nothing for so many."""


def check_count(rule: Rule, num_updates: int) -> None:
    """Can the rule take so many updates? For a quorum before a run, and for a round before its fold.

    Raises:
        ValueError: there are none, or too few for the rule.
    """
    if num_updates < 1:
        raise ValueError(f"{num_updates} updates are too few for a rule: it needs at least 1")
    if isinstance(rule, Checked):
        rule.check(num_updates)


class RuleFailed(ValueError):
    """A rule, most likely the user's own, raised what no rule may: it costs the round, and not the process."""


def asked(rule: Rule, method: Callable[[Any], Any], argument: NDArray[Any]) -> Any:
    """What a rule's method says.

    Raises:
        ValueError, OSError: as the rule does.
        RuleFailed: it raised anything else.
    """
    try:
        return method(argument)
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise RuleFailed(f"{type(rule).__name__} raised {type(error).__name__}: {error}") from error


def takes_centre(rule: Rule) -> bool:
    """Whether the rule wants one source more, as the last: the previous round's aggregate (`takes_centre = True`)."""
    return bool(getattr(rule, "takes_centre", False))


def num_malicious(malicious: int | float, num_updates: int) -> int:
    """f: an int is the number itself; a float is a share of the updates, rounded down.

    Raises:
        ValueError: a number below 0, or a share outside [0, 1/2).
    """
    if isinstance(malicious, int):
        if malicious < 0:
            raise ValueError(f"malicious {malicious} is not at least 0")
        return malicious
    if not 0.0 <= malicious < 0.5:
        raise ValueError(f"malicious {malicious} is a share, and not in [0, 0.5)")
    return math.floor(Fraction(str(malicious)) * num_updates)  # as it is written: 0.29 of 100 is 29
