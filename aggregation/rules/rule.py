"""The contract of a rule that reduces the updates of a round to one: the median, multi-Krum, or a custom rule.

    sources --gram--> (K, K) --mixing--> (R, K) --combine--> rows (R, n) --reduce--> (n)

Every rule reduces: it makes one value of an element's R. A rule on the geometry of the updates mixes before: from their
inner products it determines R combinations of them, which are reduced. Both stages run tile by tile over the stored
updates; a rule never sees a file, a tensor's name or a whole update.

Legend: K updates u_k, of which up to f may be anything; g_kl = <u_k, u_l> over all float tensors; n elements of a tile.

For all rules:

- Updates come in the order of their client ids, so that the result depends on the set of updates alone.
- Updates count equally. `num_examples` is the client's claim: a liar would weigh most. A late update's discount
  does not count either.
- Integer tensors do not take part.
"""

import math
from fractions import Fraction
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of
from atoll.plugins.place import NOWHERE, Place


class Rule(Protocol):
    """A reduction of several updates to one, element by element. It is a value: stateless, and shared by threads."""

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> NDArray[np.float64]:
        """Reduce each element's R values to one.

        Args:
            rows: (R, n) finite, one contiguous row for each update. May be overwritten.
            place: the place of the elements in the model and the run.

        Returns:
            (n). Value i depends on column i alone: the result must not depend on where a tile begins.

        Raises:
            ValueError: R is too small.
        """


@runtime_checkable
class GeometricRule(Rule, Protocol):
    """A rule that mixes whole updates by their angles and distances before it reduces."""

    def mixing(self, gram: NDArray[np.float64], place: Place = NOWHERE) -> NDArray[np.float64]:
        """Return the combinations of the updates to reduce: row r is sum_k A_rk u_k.

        Args:
            gram: (K, K) the g_kl; with the centre as the last row and column, for rules that take one.
            place: the place of the call in the run.

        Returns:
            A: (R, K), R >= 1.

        Raises:
            ValueError: K is too small.
        """


@runtime_checkable
class Checked(Protocol):
    """A rule that needs a minimum number of updates."""

    def check(self, num_updates: int) -> None:
        """Raise ValueError, with the number and the allowed ones, if the rule guarantees nothing for so few updates."""


def check_count(rule: Rule, num_updates: int) -> None:
    """Check that the rule can take this number of updates: for a quorum before a run, and for a round before its fold.

    Raises:
        ValueError: there are no updates, or too few for the rule.
    """
    if num_updates < 1:
        raise ValueError(f"{count_of(num_updates, 'update is', 'updates are')} too few for a rule: it needs at least 1")
    if isinstance(rule, Checked):
        rule.check(num_updates)


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
