"""A neural net of scikit-learn on the tumours of four clinics: federated averaging of an `MLPClassifier`.

    atoll simulate examples/tumours_sklearn.toml
    atoll coordinator examples/tumours_sklearn.toml

Each clinic trains on its own records and tests on every fifth; the AUC is that of all of them together.
"""

import warnings
from typing import Any

import numpy as np
from sklearn.neural_network import MLPClassifier
from tumours import CLINICS, FEATURES, METRICS, measured, parts, records

from atoll import Instructions, Trained

Arrays = dict[str, np.ndarray[Any, Any]]

CENTER, SCALE = parts()["server"][0].mean(axis=0), parts()["server"][0].std(axis=0)
"""Constants that standardize the features: those of the server's records, which all clinics know."""


class TumourNet:
    """A net of 16 hidden units, whose weights are averaged."""

    sites = tuple(CLINICS)
    metrics = METRICS

    def initial(self, seed: int) -> Arrays:
        """Return scikit-learn's own initial weights."""
        return weights_of(new_net(seed))

    def train(self, parameters: Arrays, instructions: Instructions) -> Trained:
        """Train for some epochs on one clinic's records, and for fewer when the deadline has passed."""
        features, labels = scaled("train", instructions.site)
        net, epochs, done = with_weights(parameters, instructions.seed), int(instructions.local.get("epochs", 2)), 0
        while done < epochs and not (done and instructions.deadline.passed()):
            net.partial_fit(features, labels)
            done += 1
        update = {name: after - parameters[name] for name, after in weights_of(net).items()}
        statistics = measured(net.predict_proba(features)[:, 1], labels)
        return Trained(update, len(labels), statistics, work=done / epochs)

    def evaluate(self, parameters: Arrays, *, split: str, site: str | None) -> dict[str, tuple[float, ...]]:
        """Return the sums of the metrics on a clinic's records, or on the server's."""
        features, labels = scaled(split, site)
        return measured(with_weights(parameters, 0).predict_proba(features)[:, 1], labels)

    def num_examples(self, site: str) -> int:
        """Return the number of a clinic's training records."""
        return len(records("train", site)[1])


def new_net(seed: int) -> MLPClassifier:
    """Return a net with initial weights, trained on nothing."""
    net = MLPClassifier((16,), solver="sgd", learning_rate_init=0.02, batch_size=16, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch is larger than this one record, which gives the weights their shapes
        return net.partial_fit(np.zeros((1, FEATURES)), [0], classes=[0, 1])


def with_weights(parameters: Arrays, seed: int) -> MLPClassifier:
    """Return a net with the given weights."""
    net = new_net(seed)
    net.coefs_ = [parameters[f"coefs{layer}"].astype(float) for layer in (0, 1)]
    net.intercepts_ = [parameters[f"intercepts{layer}"].astype(float) for layer in (0, 1)]
    return net


def weights_of(net: MLPClassifier) -> Arrays:
    """Return the weights of a net by name."""
    named = {f"coefs{layer}": array for layer, array in enumerate(net.coefs_)}
    named |= {f"intercepts{layer}": array for layer, array in enumerate(net.intercepts_)}
    return {name: array.astype(np.float32) for name, array in named.items()}


def scaled(split: str, site: str | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the standardized features and the labels of a split."""
    features, labels = records(split, site)
    return (features - CENTER) / SCALE, labels


task = TumourNet()
