"""Forged updates, which malicious clients send in place of trained ones: one pure function for each attack.

Legend: u the client's own honest update; μ and σ mean and standard deviation (over 1/n) of the updates that the
adversary knows, element by element; n clients report in the round, m of them malicious; g the last global step.

    sign flip      -u                        reverses the training
    scaled         a u                       a = -10: reverses it tenfold; a = n / m: replaces the global model
    gaussian       N(0, s²)
    ALIE           μ - z σ                   hides in the spread of the honest updates
    IPM            -ε μ                      makes the inner product with the true direction negative
    free rider     0, or g, or N(0, rms(g)²) imitates training

Floats are computed in float64 and sent as float32; integers are sent as honestly trained. For a tensor that some
updates leave out, μ and σ are taken over the others.

Source: Baruch et al., "A Little Is Enough", NeurIPS 2019, Algorithm 3 (the sign as in the authors' code: against the
direction of descent, which is ours); Xie et al., "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product
Manipulation", UAI 2019; Bagdasaryan et al., "How To Backdoor Federated Learning", AISTATS 2020, Section 4 (model
replacement); Lin et al., "Free-riders in Federated Learning", 2019 (delta weights); Fraboni et al., "Free-rider Attacks
on Model Aggregation in Federated Learning", AISTATS 2021 (disguised).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.task.arrays import Arrays

Floats = NDArray[np.float64]

LARGEST_Z = 3.0
"""Upper bound of z, for rounds in which malicious clients are the majority and any z would pass."""


@dataclass(frozen=True, slots=True)
class Moments:
    """The adversary's statistics of the updates that it knows, by the name of the float tensor."""

    mean: Mapping[str, Floats]
    std: Mapping[str, Floats]


def moments(updates: Mapping[str, Arrays]) -> Moments:
    """Compute μ and σ of updates by client, in two passes over them in the order of the client ids.

    Raises:
        ValueError: `updates` is empty.
    """
    if not updates:
        raise ValueError("got no updates; allowed: at least one for a mean and a standard deviation")
    means = _means(updates, lambda _, array: array)
    squares = _means(updates, lambda name, array: np.square(array - means[name]))
    return Moments(means, {name: np.sqrt(variance) for name, variance in squares.items()})


def _means(updates: Mapping[str, Arrays], of: Callable[[str, Floats], Floats]) -> dict[str, Floats]:
    sums: dict[str, Floats] = {}
    counts: dict[str, int] = {}
    for client in sorted(updates):
        for name, array in _floats(updates[client]):
            sums[name] = sums.get(name, 0.0) + of(name, array.astype(np.float64))
            counts[name] = counts.get(name, 0) + 1
    return {name: total / counts[name] for name, total in sums.items()}


def scaled(honest: Arrays, factor: float) -> Arrays:
    """Return a u, with a = -1 for the sign flip, -10 for the scaled flip, n / m for a model replacement."""
    return honest | {name: _sent(factor * array.astype(np.float64)) for name, array in _floats(honest)}


def gaussian(honest: Arrays, sigma: float, rng: np.random.Generator) -> Arrays:
    """Draw N(0, s²) in the shapes of u, tensor by tensor in the order of their names."""
    return honest | {name: _sent(rng.normal(0.0, sigma, array.shape)) for name, array in sorted(_floats(honest))}


def little_is_enough(honest: Arrays, known: Moments, z: float) -> Arrays:
    """Return μ - z σ (ALIE) for the float tensors of u."""
    return honest | {name: _sent(known.mean[name] - z * known.std[name]) for name, _ in _floats(honest)}


def little_is_enough_z(num_clients: int, num_malicious: int) -> float:
    """Compute the largest z that a majority still covers: Φ(z) = (n - m - s) / (n - m), s = ⌊n / 2 + 1⌋ - m.

    s honest clients must lie further out than the malicious ones, so that these look like the majority. z is clipped
    to [0, `LARGEST_Z`]: in rounds with one or two honest clients the formula has no finite value.
    """
    honest = num_clients - num_malicious
    supporters = num_clients // 2 + 1 - num_malicious
    if honest < 1 or supporters < 1:
        return LARGEST_Z
    share = (honest - supporters) / honest
    return 0.0 if share <= 0.5 else min(NormalDist().inv_cdf(share), LARGEST_Z)


def inner_product(honest: Arrays, known: Moments, epsilon: float) -> Arrays:
    """Return -ε μ (IPM) for the float tensors of u; under the plain mean the step reverses once ε m > n - m."""
    return honest | {name: _sent(-epsilon * known.mean[name]) for name, _ in _floats(honest)}


def free_ride(honest: Arrays, step: Arrays | None, disguise: str, rng: np.random.Generator) -> Arrays:
    """Return an update that imitates training without any.

    Args:
        honest: an update, for its shapes and its integers.
        step: g, the last version minus the one before; None, in the first round: all zeros.
        disguise: "none": zeros; "step": g again; "noise": N(0, rms(g)²), rms tensor by tensor.
        rng: the generator of this client in this round.
    """

    def made(name: str, shape: tuple[int, ...]) -> Floats:
        if disguise == "none" or step is None or name not in step:
            return np.zeros(shape)
        last = step[name].astype(np.float64)
        return last if disguise == "step" else rng.normal(0.0, math.sqrt(np.mean(np.square(last))), shape)

    return honest | {name: _sent(made(name, array.shape)) for name, array in sorted(_floats(honest))}


def _floats(update: Arrays) -> Iterable[tuple[str, NDArray[Any]]]:
    return [(name, array) for name, array in update.items() if np.issubdtype(array.dtype, np.floating)]


def _sent(exact: Floats) -> NDArray[np.float32]:
    """Convert to float32, clipped to its range, because an update that is not finite is refused."""
    limit = float(np.finfo(np.float32).max)
    return np.clip(exact, -limit, limit).astype(np.float32)
