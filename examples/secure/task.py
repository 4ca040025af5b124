"""The price of a flat by its size and age, at five banks that show each other nothing: a line, fitted by NumPy.

An ArrayTask is any object with these methods: arrays of parameters come in, and an update as arrays goes out.
"""

import time
from typing import Any

import numpy as np

from atoll import Instructions, Trained

Arrays = dict[str, np.ndarray[Any, Any]]

SITES = ("north", "south", "east", "west", "harbour")
TRUTH = np.array([3.0, -1.2])
"""The price rises with the size and falls with the age, in standardized units."""


def flats(site: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the flats that a bank knows, (n, 2), and their prices, (n,): each bank has others, and fewer or more."""
    number = SITES.index(site)
    draw = np.random.default_rng(number)
    known = draw.normal(loc=0.3 * (number - 2), size=(60 + 40 * number, 2))
    return known, known @ TRUTH + 2.0 + draw.normal(scale=0.3, size=len(known))


class PriceTask:
    """Linear regression by gradient descent on one bank's flats."""

    sites = SITES

    def initial(self, seed: int) -> Arrays:
        """Return zeros, as the problem is convex."""
        return {"weights": np.zeros(2, np.float32), "price": np.zeros((), np.float32)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Make ten steps over the bank's flats."""
        known, prices = flats(instructions.site)
        weights, price = parameters["weights"].astype(float), float(parameters["price"])
        time.sleep(float(instructions.local.get("seconds", 0.0)))  # as a larger model would
        for _ in range(10):
            error = known @ weights + price - prices
            weights -= 0.1 * known.T @ error / len(prices)
            price -= 0.1 * float(error.mean())
        error = known @ weights + price - prices
        update = {
            "weights": (weights - parameters["weights"]).astype(np.float32),
            "price": np.asarray(price - parameters["price"], np.float32),
        }
        return Trained(update, len(prices), {"loss": (float(error @ error), float(len(prices)))})


task = PriceTask()
