"""The tight account of the Poisson-subsampled Gaussian mechanism, by the library `dp-accounting` (extra `privacy`).

It composes privacy loss distributions (Koskela, Jälkö, Honkela 2020; Doroshenko et al. 2022), with an epsilon that is
rounded up, whatever the step of their grid is: each loss is divided between its two neighbours so that delta at no
epsilon becomes less ("connect the dots", the library's default). So a coarse grid is an upper bound, too. It has about
`POINTS` points:

    step = max(1e-4, reach / POINTS)
    reach = the largest of    1 / (2 z^2) + 9 / z        the losses of a step, but for 1e-18 of them
                              epsilon by the quick bound

Without that an account took up to 98 s where noise is little. Only this file imports the library.
"""

from collections.abc import Sequence
from typing import Any

STEP_MIN = 1e-4
"""Least step of the grid, which is the library's own."""
POINTS = 1 << 17
"""Number of points of the grid, from which the step follows: about a second on one core. The step is the library's own
from noise multipliers of 0.73 and epsilons of 13 on."""
STEPS_MAX = 1_000_000
"""Most steps of an account, which then takes two seconds; more have the quick bound."""
NOISE_MIN = 0.05
"""Least noise multiplier of an account: with less, epsilon of a single step is above 250."""
BOUND_MAX = 1000.0
"""Largest quick bound of epsilon beside which an account is asked."""


def is_installed() -> bool:
    """Return whether the library is installed; imports nothing of it."""
    from importlib.util import find_spec

    return find_spec("dp_accounting") is not None


def is_asked(z: float, steps: int, bound: float) -> bool:
    """Return whether an account of steps takes few seconds at most, and its library is installed.

    Args:
        z: the least noise multiplier.
        steps: of all kinds.
        bound: of epsilon, by the quick account.
    """
    return z >= NOISE_MIN and steps <= STEPS_MAX and bound <= BOUND_MAX and is_installed()


def epsilon_of(q: float, z: float, steps: int, delta: float, about: float = 0.0) -> float:
    """Return epsilon at this delta; arguments as of `subsampled.epsilon_bound`, and `about` as of `epsilon_of_kinds`.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    return epsilon_of_kinds([(q, z, steps)], delta, about)


def step_of(kinds: Sequence[tuple[float, float, int]], about: float) -> float:
    """Return the step of the grid; arguments as of `epsilon_of_kinds`."""
    reach = max(about, *(1.0 / (2.0 * z * z) + 9.0 / z for _, z, _ in kinds))
    return max(STEP_MIN, reach / POINTS)


def epsilon_of_kinds(kinds: Sequence[tuple[float, float, int]], delta: float, about: float = 0.0) -> float:
    """Return epsilon at this delta of steps of several kinds.

    Args:
        kinds: of each q, z and the number of steps; at least one.
        delta: in (0, 1).
        about: a bound of epsilon, for the step of the grid; 0: the losses of one step decide.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant: Any = PLDAccountant(relation, value_discretization_interval=step_of(kinds, about))
    for q, z, steps in kinds:
        noise = dp_accounting.GaussianDpEvent(z)
        step = dp_accounting.PoissonSampledDpEvent(q, noise) if q < 1.0 else noise
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))
