"""The compiled draws of the order of many clients' examples; `draws` imports it if numba is installed.

Torch's draws on a CPU, which it repeats:

    default generator <- s,   generator <- its first 64 bits mod 2^62,   z_i <- 32 bits mod (n - i),   swap(i, i + z_i)

Both are Mersenne twisters of 32 bits, which use the last 32 bits of a seed.

Source:
    Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998), with the seeding of 2002; Fisher and Yates.
"""

from typing import Any

import numpy as np
from numba import int64, njit, types, uint32

WORDS, MIDDLE = 624, 397
LANES = 16
"""Number of clients that are seeded side by side, because each word of a seed depends on the previous one."""

Counts = types.Array(int64, 1, "C", readonly=True)


@njit(uint32(uint32[:, ::1], int64, int64), nogil=True, cache=True)
def _output(state: Any, word: Any, lane: Any) -> Any:
    """Return the next 32 bits of a lane; `word` cycles through the state, which is twisted as it is read."""
    joined = (state[word, lane] & np.uint32(0x80000000)) | (state[(word + 1) % WORDS, lane] & np.uint32(0x7FFFFFFF))
    twisted = state[(word + MIDDLE) % WORDS, lane] ^ (joined >> np.uint32(1))
    if joined & np.uint32(1):
        twisted ^= np.uint32(0x9908B0DF)
    state[word, lane] = twisted
    twisted ^= twisted >> np.uint32(11)
    twisted ^= (twisted << np.uint32(7)) & np.uint32(0x9D2C5680)
    twisted ^= (twisted << np.uint32(15)) & np.uint32(0xEFC60000)
    return twisted ^ (twisted >> np.uint32(18))


@njit(types.void(uint32[:, ::1], int64), nogil=True, cache=True)
def _seed(state: Any, words: Any) -> None:
    """Compute the first `words` words of each lane from its first."""
    for word in range(1, words):
        for lane in range(LANES):
            before = state[word - 1, lane]
            state[word, lane] = np.uint32(1812433253) * (before ^ (before >> np.uint32(30))) + np.uint32(word)


@njit(
    types.void(int64[:, ::1], types.Array(uint32, 1, "C", readonly=True), Counts, Counts, Counts),
    nogil=True,
    cache=True,
)
def place(rows: Any, seeds: Any, counts: Any, epochs: Any, strides: Any) -> None:
    """Draw an order of each client's examples for each epoch into `rows` (m, L), like `draws.place`."""
    state = np.zeros((WORDS, LANES), np.uint32)
    order = np.empty(counts.max(), np.int64)
    for first in range(0, len(seeds), LANES):
        lanes = min(LANES, len(seeds) - first)
        state[0, :lanes] = seeds[first : first + lanes]
        _seed(state, MIDDLE + 2)
        longest = 0
        for lane in range(lanes):
            _output(state, 0, lane)
            state[0, lane] = _output(state, 1, lane)
            longest = max(longest, counts[first + lane] * epochs[first + lane])
        _seed(state, min(WORDS, MIDDLE + longest))
        for lane in range(lanes):
            row, count, word = first + lane, counts[first + lane], 0
            for epoch in range(epochs[row]):
                for i in range(count):
                    order[i] = i
                for i in range(count - 1):
                    other = i + int64(_output(state, word, lane)) % (count - i)
                    word = (word + 1) % WORDS
                    order[i], order[other] = order[other], order[i]
                begin = epoch * strides[row]
                for i in range(min(count, rows.shape[1] - begin)):
                    rows[row, begin + i] = order[i]
