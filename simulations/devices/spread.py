"""The distribution of a property of the devices over the clients: constant, lognormal or uniform.

    lognormal   exp(ln(median) + sigma z)       z = Φ⁻¹(u)
    uniform     low + (high - low) u

Legend: u, the client's draw in (0, 1); Φ, the standard normal distribution function. The speeds of phones and of their
links are about lognormal: the fastest tenth is many times as fast as the slowest.
"""

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Lognormal(BaseModel, **STRICT):
    """A lognormal distribution, for properties whose extremes differ by large factors."""

    median: Positive
    """Median: half of the clients have less, half have more."""

    sigma: Annotated[float, Field(ge=0, le=5)]
    """Standard deviation of the logarithm: two thirds of the clients lie within a factor exp(sigma) of the median."""


class Uniform(BaseModel, **STRICT):
    """A uniform distribution between two values."""

    low: Positive
    """Lower end of the range."""

    high: Positive
    """Upper end of the range."""

    @model_validator(mode="after")
    def _in_order(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is more than high ({self.high:g})")
        return self


Spread = Positive | Lognormal | Uniform


def quantiles(spread: Spread, u: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Compute the value of each client (clients,) from its draw u in (0, 1): the inverse distribution function."""
    import numpy as np

    match spread:
        case Lognormal(median=median, sigma=sigma):
            z = np.fromiter(map(NormalDist().inv_cdf, u.tolist()), np.float64, len(u))
            return np.exp(math.log(median) + sigma * z)
        case Uniform(low=low, high=high):
            return low + (high - low) * u
        case constant:
            return np.full(len(u), constant, np.float64)
