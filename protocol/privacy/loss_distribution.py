"""The tight account of the Poisson-subsampled Gaussian mechanism, by the library `dp-accounting` (extra `privacy`).

It composes privacy loss distributions (Koskela, Jälkö, Honkela 2020; Doroshenko et al. 2022), with an epsilon that is
rounded up. Only this file imports the library.
"""

from collections.abc import Iterable
from typing import Any


def is_installed() -> bool:
    """Return whether the library is installed; imports nothing of it."""
    from importlib.util import find_spec

    return find_spec("dp_accounting") is not None


def epsilon_of(q: float, z: float, steps: int, delta: float) -> float:
    """Return epsilon at this delta; arguments as of `subsampled.epsilon_bound`.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    return epsilon_of_kinds([(q, z, steps)], delta)


def epsilon_of_kinds(kinds: Iterable[tuple[float, float, int]], delta: float) -> float:
    """Return epsilon at this delta of steps of several kinds: of each q, z and their number.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant: Any = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for q, z, steps in kinds:
        noise = dp_accounting.GaussianDpEvent(z)
        step = dp_accounting.PoissonSampledDpEvent(q, noise) if q < 1.0 else noise
        accountant.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(delta))
