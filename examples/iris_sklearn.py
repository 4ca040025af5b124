"""Not PyTorch at all: scikit-learn's SGDClassifier on the iris flowers of three gardens.

A client is any object that turns (global parameters, instructions) into (update, num_examples, statistics).

    atoll coordinator examples/iris.toml
"""

from typing import Any

import numpy as np
from sklearn.datasets import load_iris
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss

from atoll import Instructions, Trained

Arrays = dict[str, np.ndarray[Any, Any]]

SHARES = {"lowland": (25, 8, 7), "valley": (8, 24, 8), "hill": (7, 8, 25)}
"""How many flowers of each kind grow in each garden; the ten of each kind that are left are the server's."""

STARTS = np.cumsum([(0, 0, 0), *SHARES.values()], axis=0)
"""Of each kind, the first flower of each garden, and at last of the server."""

CENTER, SCALE = np.array([5.8, 3.0, 3.8, 1.2]), np.array([0.8, 0.4, 1.8, 0.8])
"""What everybody knows of irises [cm], so that no garden has to tell its own means."""


class IrisTask:
    """Logistic regression, each kind against the others."""

    sites = tuple(SHARES)

    def initial(self, seed: int) -> Arrays:
        """Zeros: the problem is convex."""
        return {"coef": np.zeros((3, 4), np.float32), "intercept": np.zeros(3, np.float32)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """A few passes over one garden's flowers, fewer when the time is over."""
        flowers, kinds = garden(instructions.site)
        epochs = int(instructions.local.get("epochs", 5))
        model = SGDClassifier(
            loss="log_loss", learning_rate="constant", eta0=0.05, random_state=instructions.seed % 2**32
        )
        model.partial_fit(flowers[:1], kinds[:1], classes=[0, 1, 2])  # gives the coefficients their shapes
        model.coef_, model.intercept_ = (parameters[name].astype(float) for name in ("coef", "intercept"))
        done = 0
        while done < epochs and not (done and instructions.deadline.passed()):
            model.partial_fit(flowers, kinds)
            done += 1
        update = {
            "coef": (model.coef_ - parameters["coef"]).astype(np.float32),
            "intercept": (model.intercept_ - parameters["intercept"]).astype(np.float32),
        }
        return Trained(update, len(kinds), measure(model, flowers, kinds), work=done / epochs)

    def evaluate(self, parameters: Arrays, *, split: str, site: str | None) -> dict[str, tuple[float, ...]] | None:
        """Statistics on a garden's own flowers, or on the server's; the gardens hold no test flowers back."""
        if split == "test":
            return None
        flowers, kinds = server() if site is None else garden(site)
        model = SGDClassifier(loss="log_loss")
        model.classes_ = np.arange(3)
        model.coef_, model.intercept_ = parameters["coef"], parameters["intercept"]
        return measure(model, flowers, kinds)

    def num_examples(self, site: str) -> int:
        """Flowers in a garden."""
        return sum(SHARES[site])


def garden(site: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The flowers (n, 4) of one garden and their kinds (n,)."""
    return flowers_from(STARTS[list(SHARES).index(site)], SHARES[site])


def server() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The flowers that no garden has."""
    return flowers_from(STARTS[-1], 50 - STARTS[-1])


def flowers_from(first: Any, count: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each kind k, `count[k]` flowers from number `first[k]` on; the data set has 50 of each in a row."""
    iris = load_iris()
    chosen = np.concatenate([50 * kind + first[kind] + np.arange(count[kind]) for kind in range(3)])
    return (iris.data[chosen] - CENTER) / SCALE, iris.target[chosen]


def measure(model: Any, flowers: Any, kinds: Any) -> dict[str, tuple[float, ...]]:
    """Sufficient statistics: (sum of losses, flowers) and (right ones, flowers)."""
    loss = log_loss(kinds, model.predict_proba(flowers), labels=[0, 1, 2], normalize=False)
    right = np.sum(model.predict(flowers) == kinds)
    return {"loss": (float(loss), len(kinds)), "accuracy": (float(right), len(kinds))}


task = IrisTask()
