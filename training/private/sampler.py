"""The Poisson sample of each step: every example takes part with the same probability, independently of all others.

The accountant's formula holds for such a sample alone: not for a shuffled or a fixed batch, nor for weights. Each
example gets a word of 64 bits of the AES-256-CTR stream of the step's key (`ground/noise`), and takes part if the word
is below floor(q 2^64): its probability is at most q, and less by no more than 2^-64. No generator of Python, numpy or
torch, whose seeds are public, has a part in it.
"""

from fractions import Fraction
from typing import Any

import numpy as np

from atoll.ground.noise.generator import KeyedBits
from atoll.ground.noise.key import key_of

WORDS_AT_ONCE = 1 << 20

Indices = np.ndarray[Any, np.dtype[np.int64]]


class PoissonSampler:
    """The samples of a training's steps, a function of (key, step) alone.

    Args:
        key: 32 bytes, secret.
        num_examples: the size of the data set.
        rate: q, in (0, 1].
    """

    def __init__(self, key: bytes, num_examples: int, rate: float) -> None:
        self._key, self._count, self._rate = key, num_examples, rate
        self._below = int(Fraction(rate) * 2**64)

    def indices(self, step: int) -> Indices:
        """Return the examples of a step, ascending; perhaps none."""
        if self._rate == 1.0:
            return np.arange(self._count, dtype=np.int64)
        bits, found = KeyedBits(key_of(self._key, "sample", step)), []
        for begin in range(0, self._count, WORDS_AT_ONCE):
            words = bits.words(min(WORDS_AT_ONCE, self._count - begin))
            found.append(np.flatnonzero(words < np.uint64(self._below)) + begin)
        return np.concatenate(found) if found else np.zeros(0, np.int64)
