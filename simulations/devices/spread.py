"""How a property of the devices is spread over the clients: all alike, lognormal, or uniform.

    lognormal   exp(ln(median) + sigma z)       z = Φ⁻¹(u)
    uniform     low + (high - low) u

Legend: u, the client's number in (0, 1); Φ, the standard normal distribution function. Speeds of phones and of their
links are about lognormal: the fastest tenth is many times as fast as the slowest.
"""

import math
from statistics import NormalDist
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Lognormal(BaseModel):
    """Half of the clients have less than the median, half have more."""

    model_config = STRICT

    median: Positive
    """Half of the clients have less."""

    sigma: Annotated[float, Field(ge=0, le=5)]
    """Of the logarithm: two thirds of the clients lie within a factor exp(sigma) of the median."""


class Uniform(BaseModel):
    """Every value between two is equally likely."""

    model_config = STRICT

    low: Positive
    """The least."""

    high: Positive
    """The most."""

    @model_validator(mode="after")
    def _in_order(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is more than high ({self.high:g})")
        return self


Spread = Positive | Lognormal | Uniform


def quantiles(spread: Spread, u: NDArray[np.float64]) -> NDArray[np.float64]:
    """The value of each client (clients,) by its number u in (0, 1): the inverse of the distribution function."""
    match spread:
        case Lognormal(median=median, sigma=sigma):
            z = np.fromiter(map(NormalDist().inv_cdf, u.tolist()), np.float64, len(u))
            return np.exp(math.log(median) + sigma * z)
        case Uniform(low=low, high=high):
            return low + (high - low) * u
        case constant:
            return np.full(len(u), constant, np.float64)
