r"""Exact samples of the discrete Gaussian, vectorised: P[x] proportional to exp(-x^2 / (2 s^2)) on the integers.

Algorithm 3 of Canonne, Kamath, Steinke 2020 (arXiv 2004.00010): discrete Laplace noise y of the scale
t = floor(s) + 1 is kept with probability exp(-(|y| - s^2 / t)^2 / (2 s^2)). Discrete Laplace (their algorithm 2):

    |y| = u + t v     u uniform in 0..t - 1, kept with probability exp(-u / t)     P[v >= k] = e^-k
    a fair sign; -0 is dropped

Every decision compares a real number r, uniform in [0, 1), with a probability p. r begins with the 64 bits of a word w:
w 2^-64 <= r < (w + 1) 2^-64. Where w decides, nothing else is read; where it does not, more bits are, and p is computed
in decimal arithmetic of as many digits as it takes. So samples have the exact distribution, if the words are uniform.

Proof that float64 decides right. Let f be float64's value of p = exp(-g), and e = 2^-53.
- g = u / t in [0, 1]: one division of integers below 2^53, so g (1 + e), and p changes by a factor within 1 + 2e.
- g = d^2 / (2 s^2), d = |y| - a, a = s^2 / t. a and s^2 are rounded once, |y| < 2^53 not at all, so |error of d| <=
  e (a + |d|) with a <= s. With x = |d| / s the error of g is at most e (x + x^2) + 4e g <= e (x + 3 x^2), to first
  order; for x <= 16 this is below 2^-43.
- numpy's exp is within 4 units in the last place (its own limit): a factor within 1 + 2^-50.
Together f = p (1 + h), |h| <= 2^-42 for x <= 16. For larger x both are below 2^-180. w 2^-64 is rounded once, and is at
most 2^-64 below r. So |f - w 2^-64| > 2^-40 f + 2^-60 decides r < p; anything closer is left open. That happens to one
decision in 2^38.
"""

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from atoll.ground.noise.key import key_of
from atoll.tensors.secure.keystream import Streams

DEVIATION_MIN, DEVIATION_MAX = 2.0**-10, 2.0**41
"""Allowed standard deviations: |y| then stays below 2^53 but for a chance of e^-2000, which raises an error."""

RELATIVE, ABSOLUTE = 2.0**-40, 2.0**-60
_LARGEST = 1 << 52
_KEPT = 0.44
"""Share of candidates that is expected to be kept, a little less than for any large s."""
_DIGITS = 60
"""Decimal digits of a first look at a probability; each further one has as many more."""

Samples = NDArray[np.int64]
_Words = NDArray[np.uint64]


def _thresholds() -> tuple[int, ...]:
    """Return floor(2^64 e^-k) for k = 1, 2, ... down to 0."""
    context = Context(prec=_DIGITS, rounding=ROUND_FLOOR)
    found: list[int] = []
    while not found or found[-1]:
        found.append(int(context.multiply(Decimal(1 << 64), context.exp(Decimal(-len(found) - 1)))))
    return tuple(found)


_FLOORS = _thresholds()
_ASCENDING = np.array(_FLOORS[::-1], np.uint64)
_FLOOR_AFTER = np.array((*_FLOORS, 0), np.uint64)
"""The threshold after k ones that hold; after the last one 0."""


class DiscreteGaussian:
    """Sampler with one standard deviation.

    Args:
        deviation: s, within `DEVIATION_MIN` and `DEVIATION_MAX`; a float64 is taken as exactly the number that it is.
        decides_in_decimals: whether no decision is left to float64. The samples are the same, some 100 times slower.
    """

    def __init__(self, deviation: float, *, decides_in_decimals: bool = False) -> None:
        if not DEVIATION_MIN <= deviation <= DEVIATION_MAX:
            raise ValueError(f"deviation {deviation} is not in {DEVIATION_MIN:g}..{DEVIATION_MAX:g} steps")
        self.deviation = deviation
        self._square = Fraction(deviation) ** 2
        self._scale = math.floor(deviation) + 1
        self._centre = self._square / self._scale
        self._limit = (1 << 64) - (1 << 64) % self._scale
        self._in_decimals = decides_in_decimals

    def sample(self, key: bytes, count: int) -> Samples:
        """Return samples of a key: the same for the same key and count.

        Args:
            key: 32 bytes, of no other use.
            count: number of samples.

        Raises:
            OverflowError: a sample is beyond 2^52, which has a chance below e^-2000.
        """
        bits = _Bits(key)
        found = [np.zeros(0, np.int64)]
        missing = count
        while missing > 0:
            found.append(self._attempt(bits, int(missing / _KEPT) + 32)[:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

    def _attempt(self, bits: "_Bits", candidates: int) -> Samples:
        """Return the kept ones of a number of candidates, in their order."""
        first, words = bits.take(4 * candidates + -(-candidates // 64))
        of_u, of_keep, of_v, of_last = words[: 4 * candidates].reshape(4, candidates)
        is_negative = np.unpackbits(words[4 * candidates :].view(np.uint8), count=candidates).astype(bool)
        u = (of_u % np.uint64(self._scale)).astype(np.int64)
        of_scale = np.exp(-(u / self._scale))
        is_kept = self._is_below(of_keep, of_scale, lambda i: (bits.at(first + candidates + i), self._of_scale(u[i])))
        if self._limit != 1 << 64:
            is_kept &= of_u < np.uint64(self._limit)
        kept = np.flatnonzero(is_kept)
        v = self._times(of_v[kept], lambda i: bits.at(first + 2 * candidates + kept[i]))
        size, is_negative, of_last = u[kept] + self._scale * v, is_negative[kept], of_last[kept]
        if size.max(initial=0) > _LARGEST:
            raise OverflowError(f"a sample of deviation {self.deviation:g} is beyond 2^52")
        distance = size - float(self._centre)
        of_distance = np.exp(-(distance * distance / (2.0 * float(self._square))))
        is_last = self._is_below(
            of_last, of_distance, lambda i: (bits.at(first + 3 * candidates + kept[i]), self._of_distance(size[i]))
        )
        is_last &= ~(is_negative & (size == 0))
        return np.where(is_negative, -size, size)[is_last]

    def _of_scale(self, u: np.int64) -> Fraction:
        return Fraction(int(u), self._scale)

    def _of_distance(self, size: np.int64) -> Fraction:
        return (int(size) - self._centre) ** 2 / (2 * self._square)

    def _is_below(
        self, words: _Words, probabilities: NDArray[np.float64], exactly: "Callable[[int], tuple[_More, Fraction]]"
    ) -> NDArray[np.bool_]:
        """Return whether each r is below its probability; `exactly`: the further bits of an r, and g of p = e^-g."""
        gaps = probabilities - words * 2.0**-64
        is_below = gaps > 0.0
        is_open = np.abs(gaps) <= probabilities * RELATIVE + ABSOLUTE
        if self._in_decimals:
            is_open[:] = True
        for i in np.flatnonzero(is_open).tolist():
            is_below[i] = _is_below_exp(int(words[i]), *exactly(i))
        return is_below

    def _times(self, words: _Words, more_of: "Callable[[int], _More]") -> Samples:
        """Return for each r the largest k with r < e^-k."""
        times = len(_ASCENDING) - np.searchsorted(_ASCENDING, words, "right")
        if self._in_decimals:
            times[:], is_open = 0, np.ones(len(words), bool)
        else:
            is_open = words == _FLOOR_AFTER[times]
        for i in np.flatnonzero(is_open).tolist():
            while _is_below_exp(int(words[i]), more_of(i), Fraction(int(times[i]) + 1)):
                times[i] += 1
        return times


_More = Callable[[int], int]
"""(n) -> the bits 64 n .. 64 n + 63 of a number r, n >= 1."""


def _is_below_exp(word: int, more: _More, g: Fraction) -> bool:
    """Return whether r < e^-g, with as many bits of r and digits of e^-g as it takes."""
    if g == 0:
        return True
    known, num_words = word, 1
    while True:
        digits = _DIGITS * num_words
        low, high = _bounds_of_exp(g, digits)
        unit = 1 << (64 * num_words)
        if known + 1 <= low * unit:
            return True
        if known >= high * unit:
            return False
        known, num_words = known << 64 | more(num_words), num_words + 1


def _bounds_of_exp(g: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """Return bounds of e^-g; `Context.exp` is rounded correctly."""
    down, up = Context(prec=digits, rounding=ROUND_FLOOR), Context(prec=digits, rounding=ROUND_CEILING)
    numerator, denominator = Decimal(g.numerator), Decimal(g.denominator)
    least, most = down.divide(numerator, denominator), up.divide(numerator, denominator)
    return Fraction(down.next_minus(down.exp(-most))), Fraction(up.next_plus(up.exp(-least)))


class _Bits:
    """The words of a key, and further bits of each."""

    def __init__(self, key: bytes) -> None:
        self._key, self._stream, self._position = key, Streams([(key, 1)]), 0

    def take(self, count: int) -> tuple[int, _Words]:
        """Return the next words of the key stream, and the place of the first."""
        first, words = self._position, np.zeros(count, np.uint64)
        self._stream.add(words, first)
        self._position += count
        return first, words

    def at(self, place: int) -> _More:
        """Return what gives further bits of the number that begins with the word at a place."""
        return lambda n: int.from_bytes(key_of(self._key, "further bits", int(place), n)[:8], "big")
