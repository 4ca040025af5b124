r"""The sensitivity of sums with correlated noise: what earlier rounds added is partly taken off again in later ones.

Round t adds sum_{j<p} d_j N_{t-j}, with independent N_t. The mechanism releases C x + N for the lower triangular
Toeplitz matrix C whose first column is c = 1 / d as a power series. A client takes part at most k times, with at least
`separation` rounds from one time to the next. For non-negative, non-increasing c

    sens^2 = || sum_{i<k} c shifted by i separation ||^2

(Kalinin and Lampert 2024, theorem 2). For any other c its non-increasing majorant of |c| is taken, an upper bound. Both
are computed over all rounds: c does not end where d ends. Noise of z sens for each element of the sum, for clipped norm
1, is a Gaussian mechanism of the multiplier z, used once.

BISR, the banded inverse square root (Kalinin, McKenna, Upadhyay, Lampert 2025, arXiv 2505.12128), has d = the first p
coefficients of (1 - x)^(1/2) = 1 - x/2 - x^2/8 - x^3/16 - ...
"""

import math
from collections.abc import Sequence
from operator import add

ROUNDS_MAX = 2_000
"""Most rounds of correlated noise: the search for its bands takes seconds there."""
BANDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 17, 20, 25, 30)
"""Numbers of bands among which `best_bands` chooses; 1 is independent noise."""


def inverse_square_root(bands: int) -> tuple[float, ...]:
    """Return the first coefficients of (1 - x)^(1/2): the noises of this round and of `bands` - 1 earlier ones."""
    found = [1.0]
    for j in range(1, bands):
        found.append(found[-1] * (2 * j - 3) / (2 * j))
    return tuple(found)


def inverse_of(d: Sequence[float], rounds: int) -> tuple[float, ...]:
    """Return the first `rounds` coefficients of 1 / d, for d_0 > 0."""
    found: list[float] = []
    for t in range(rounds):
        rest = math.fsum(d[j] * found[t - j] for j in range(1, min(len(d), t + 1)))
        found.append(((1.0 if t == 0 else 0.0) - rest) / d[0])
    return tuple(found)


def squared_sensitivity(c: Sequence[float], rounds: int, separation: int, uses: int) -> float:
    """Return the squared sensitivity for clipped norm 1.

    Args:
        c: first column of C; with fewer than `rounds` coefficients the rest is 0.
        rounds: in all.
        separation: least distance of two rounds with the same client, at least 1.
        uses: most rounds with the same client, at least 1.
    """
    return squares_by_uses(c, rounds, separation, uses)[-1]


def squares_by_uses(c: Sequence[float], rounds: int, separation: int, most: int) -> tuple[float, ...]:
    """Return the squared sensitivity of 1 to `most` uses; arguments as of `squared_sensitivity`."""
    padded = [abs(value) for value in c[:rounds]] + [0.0] * (rounds - len(c))
    for t in range(rounds - 2, -1, -1):
        padded[t] = max(padded[t], padded[t + 1])
    total, found, square = [0.0] * rounds, list[float](), 0.0
    for start in range(0, most * separation, separation):
        if start < rounds:
            total[start:] = map(add, total[start:], padded)
            square = math.fsum(value * value for value in total)
        found.append(square)
    return tuple(found)


def sensitivity(d: Sequence[float], rounds: int, separation: int, uses: int) -> float:
    """Return the sensitivity of rounds that add noise with these coefficients, for clipped norm 1."""
    return math.sqrt(squared_sensitivity(inverse_of(d, rounds), rounds, separation, uses))


def errors(d: Sequence[float], rounds: int, separation: int, uses: int) -> tuple[float, float]:
    """Return the mean and the largest standard deviation of the noise in the sum of all rounds so far, for z = 1."""
    scale = sensitivity(d, rounds, separation, uses)
    deviations = [scale * deviation for deviation in _prefix_deviations(d, rounds)]
    return math.fsum(deviations) / rounds, max(deviations)


def prefix_deviation(d: Sequence[float], rounds: int) -> float:
    """Return the standard deviation of the noise in the sum of all rounds, for noises N_t of deviation 1."""
    return _prefix_deviations(d, rounds)[-1]


def _prefix_deviations(d: Sequence[float], rounds: int) -> list[float]:
    prefix, square, deviations = 0.0, 0.0, []
    for t in range(rounds):
        prefix += d[t] if t < len(d) else 0.0
        square += prefix * prefix
        deviations.append(math.sqrt(square))
    return deviations


def best_bands(rounds: int, separation: int, uses: int) -> int:
    """Return the number of bands, of `BANDS`, with the least mean error."""
    among = [bands for bands in BANDS if bands <= rounds]
    return min(among, key=lambda bands: errors(inverse_square_root(bands), rounds, separation, uses)[0])
