"""The tumours of four clinics of unequal sizes, and a mergeable AUC: for the tasks of scikit-learn and of XGBoost.

The 569 records of Wisconsin's breast cancer data: every fifth is the server's, and the clinics share the others in the
order in which they were taken. The tumours of the first clinic are malignant twice as often as those of the last one.

Source:
    Street, Wolberg, Mangasarian, "Nuclear feature extraction for breast tumor diagnosis", 1993; with scikit-learn.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss

from atoll import Metric

Records = tuple[NDArray[np.float64], NDArray[np.int64]]

CLINICS = {"university": 200, "county": 130, "coast": 90, "island": 36}
"""The number of each clinic's records; the remaining 113 are the server's. Each clinic tests on every fifth."""

FEATURES = 30

BINS = 1000
"""Number of bins of the probabilities in the AUC, whose value is exact but for pairs within one bin."""


@cache
def parts() -> dict[str, Records]:
    """Return features (n, 30) and labels (n,), 1 for a malignant tumour, of each clinic and of the server."""
    features, benign = load_breast_cancer(return_X_y=True)
    is_server, labels = np.arange(len(benign)) % 5 == 4, 1 - benign
    cuts = np.cumsum(list(CLINICS.values()))[:-1]
    split = (np.split(array[~is_server], cuts) for array in (features, labels))
    clinics = dict(zip(CLINICS, zip(*split, strict=True), strict=True))
    return {**clinics, "server": (features[is_server], labels[is_server])}


def records(split: str, site: str | None) -> Records:
    """Return the records of a split: "train" or "test" of a clinic, or "server"."""
    features, labels = parts()[site or "server"]
    is_test = np.arange(len(labels)) % 5 == 4
    chosen = {"train": ~is_test, "test": is_test}.get(split, np.full(len(labels), True))
    return features[chosen], labels[chosen]


def measured(probabilities: NDArray[Any], labels: NDArray[np.int64]) -> dict[str, tuple[float, ...]]:
    """Return the sums of log loss, accuracy and AUC of probabilities (n,) of a malignant tumour."""
    loss = log_loss(labels, probabilities, labels=[0, 1], normalize=False)
    right = np.sum((probabilities > 0.5) == labels)
    return {
        "loss": (float(loss), len(labels)),
        "accuracy": (float(right), len(labels)),
        "auc": counts(probabilities, labels),
    }


def counts(probabilities: Any, labels: Any) -> tuple[float, ...]:
    """Return the number of benign tumours in each bin of the probability, then that of malignant ones."""
    bins = np.minimum((np.asarray(probabilities) * BINS).astype(int), BINS - 1)
    return tuple(float(n) for label in (0, 1) for n in np.bincount(bins[labels == label], minlength=BINS))


def auc(sums: tuple[float, ...]) -> float:
    """Return the share of pairs of a benign and a malignant tumour that are ordered rightly; ties count half."""
    benign, malignant = np.array(sums[:BINS]), np.array(sums[BINS:])
    below = np.cumsum(benign) - benign / 2
    return float(malignant @ below) / float(benign.sum() * malignant.sum())


METRICS = {"auc": Metric(counts, auc)}
