"""A task without PyTorch: scikit-learn's SGDClassifier on the iris flowers of three gardens.

An ArrayTask is any object with these methods: arrays of parameters come in, and an update as arrays goes out.

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
"""The numbers of flowers of each kind in each garden; the remaining ten of each kind are the server's."""

STARTS = np.cumsum([(0, 0, 0), *SHARES.values()], axis=0)
"""The number of the first flower, by garden and kind; the last row is the server's."""

CENTER, SCALE = np.array([5.8, 3.0, 3.8, 1.2]), np.array([0.8, 0.4, 1.8, 0.8])
"""Constants that standardize the features [cm], agreed beforehand, so that no garden reveals its own means."""


class IrisTask:
    """Logistic regression, one kind against the others."""

    sites = tuple(SHARES)

    def initial(self, seed: int) -> Arrays:
        """Return zeros, as the problem is convex."""
        return {"coef": np.zeros((3, 4), np.float32), "intercept": np.zeros(3, np.float32)}

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Train for some epochs on one garden's flowers, and for fewer when the deadline has passed."""
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
        """Return statistics on a garden's flowers, or on the server's; None: the gardens have no test split."""
        if split == "test":
            return None
        flowers, kinds = server() if site is None else garden(site)
        model = SGDClassifier(loss="log_loss")
        model.classes_ = np.arange(3)
        model.coef_, model.intercept_ = parameters["coef"], parameters["intercept"]
        return measure(model, flowers, kinds)

    def num_examples(self, site: str) -> int:
        """Return the number of flowers in a garden."""
        return sum(SHARES[site])


def garden(site: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the flowers (n, 4) of one garden and their kinds (n,)."""
    return flowers_from(STARTS[list(SHARES).index(site)], SHARES[site])


def server() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the flowers that no garden has, and their kinds."""
    return flowers_from(STARTS[-1], 50 - STARTS[-1])


def flowers_from(first: Any, count: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return `count[k]` flowers of each kind k from number `first[k]` on; the data set has 50 of each kind in a row."""
    iris = load_iris()
    chosen = np.concatenate([50 * kind + first[kind] + np.arange(count[kind]) for kind in range(3)])
    return (iris.data[chosen] - CENTER) / SCALE, iris.target[chosen]


def measure(model: Any, flowers: Any, kinds: Any) -> dict[str, tuple[float, ...]]:
    """Return sufficient statistics: (sum of losses, flowers) and (correct predictions, flowers)."""
    loss = log_loss(kinds, model.predict_proba(flowers), labels=[0, 1, 2], normalize=False)
    right = np.sum(model.predict(flowers) == kinds)
    return {"loss": (float(loss), len(kinds)), "accuracy": (float(right), len(kinds))}


task = IrisTask()
