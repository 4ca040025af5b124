"""Flower's Krum, MultiKrum, Bulyan and FedTrimmedAvg, as objects of `aggregation.rule`, named with their numbers.

    krum_F_M             f = F malicious nodes, m = M selected: m = 1 is Krum
    bulyan_F             f = F
    trimmed_mean_0_25    b = 0.25: without the int(b K) least and greatest values

They differ from Atoll's multi-Krum: the selected updates are weighed by their examples, which are claims of the
clients, and fewer than 2f + 3 updates are accepted. Atoll's trimmed mean takes a share as the written decimal, and so
trims none of three values where b = 1/3; Flower takes the product of floats, which is 1. Source:
flwr/serverapp/strategy/{multikrum,bulyan,fedtrimmedavg}.py, after Blanchard et al., NIPS 2017, El Mhamdi et al., "The
Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, and Yin et al., ICML 2018.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.ground.printable import count_of

Array = NDArray[np.float64]

_NAME = re.compile(r"(krum_(?P<f>\d+)_(?P<m>\d+)|bulyan_(?P<of_bulyan>\d+)|trimmed_mean_(?P<share>0(_\d+)?))")


def __getattr__(name: str) -> "Krum | Bulyan | TrimmedMean":
    """Make the rule that a name describes, such as `krum_2_5`.

    Raises:
        AttributeError: the name describes no rule.
    """
    if not (match := _NAME.fullmatch(name)):
        raise AttributeError(f"{name} is none of krum_F_M, bulyan_F and trimmed_mean_0_25")
    if match["share"] is not None:
        return TrimmedMean(float(match["share"].replace("_", ".")))
    if match["of_bulyan"] is not None:
        return Bulyan(int(match["of_bulyan"]))
    return Krum(int(match["f"]), int(match["m"]))


def selected(gram: Array, malicious: int, number: int) -> NDArray[np.intp]:
    """Return the updates with the least sums of squared distances to their max(1, K - f - 2) nearest neighbours.

    Args:
        gram: (K, K) inner products of the updates.
        malicious: f.
        number: m; all K if it is more.
    """
    squares = gram.diagonal()
    distances = squares[:, np.newaxis] + squares - 2.0 * gram
    nearest = max(1, len(gram) - malicious - 2)
    scores = np.sort(distances, axis=1)[:, 1 : nearest + 1].sum(axis=1)
    return np.argsort(scores, kind="stable")[:number]


@dataclass(frozen=True, slots=True)
class Krum:
    """The mean, weighted by examples, of the m selected updates."""

    malicious: int
    num_selected: int

    def mixing(self, gram: Array, place: Any) -> Array:
        """Return (1, K), the shares of the selected updates; see `aggregation.rules.rule.GeometricRule`."""
        chosen = selected(gram, self.malicious, self.num_selected)
        shares = np.asarray(place.shares)[chosen]
        mixing = np.zeros((1, len(gram)))
        mixing[0, chosen] = shares / shares.sum()
        return mixing

    def reduce(self, rows: NDArray[np.float32]) -> Array:
        """Return the single row of `mixing` as the result."""
        row: Array = rows[0].astype(np.float64)
        return row


@dataclass(frozen=True, slots=True)
class Bulyan:
    """The mean, for each element, of the b = K - 4f values nearest to the median of the K - 2f selected updates."""

    malicious: int

    def check(self, num_updates: int) -> None:
        """Raise ValueError unless K >= 4f + 3."""
        if num_updates < 4 * self.malicious + 3:
            raise ValueError(
                f"{count_of(num_updates, 'update is', 'updates are')} too few: Bulyan with f={self.malicious} needs "
                f"{4 * self.malicious + 3}"
            )

    def mixing(self, gram: Array) -> Array:
        """Return (K - 2f, K), one selected update in each row."""
        self.check(len(gram))
        return np.eye(len(gram))[selected(gram, self.malicious, len(gram) - 2 * self.malicious)]

    def reduce(self, rows: NDArray[np.float32]) -> Array:
        """Return the mean of the values nearest to the median, for each element."""
        number = len(rows) - 2 * self.malicious
        values = rows.astype(np.float64)
        distances = np.abs(values - np.median(values, axis=0))
        nearest = np.argpartition(distances, number - 1, axis=0)[:number]
        mean: Array = np.take_along_axis(values, nearest, axis=0).mean(axis=0)
        return mean


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean of each element without its int(b K) least and greatest values."""

    share: float

    def reduce(self, rows: NDArray[np.float32]) -> Array:
        """Return the trimmed mean of each element."""
        first = int(self.share * len(rows))
        last = len(rows) - first - 1
        middle: Array = np.partition(rows, (first, last), axis=0)[first : last + 1].mean(axis=0, dtype=np.float64)
        return middle
