"""The codec topk, which transmits the largest elements exactly and drops the others."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.codecs.codec import FLOAT32_MAX, Values, check_finite, check_size, check_values, output_array
from atoll.tensors.codecs.kernels import loops_for

MILLION = 1_000_000

SAMPLE_STEP = 16
"""Stride of the sample from which the threshold of the largest elements is guessed."""


@dataclass(frozen=True, slots=True)
class TopK:
    """The k = ceil(F n) largest |v_i| of a chunk, unchanged, others 0. Of equal values the lower index goes first.

    A contraction: ||C(v) - v||^2 <= (1 - k/n) ||v||^2 <= (1 - F) ||v||^2. Biased.

    Source:
        Stich et al., "Sparsified SGD with Memory", NeurIPS 2018, Definition 2.2; choosing within chunks is ours.
    """

    millionths: int
    """F as an exact number of millionths, so that no rounding decides k."""
    is_biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.millionths <= MILLION:
            raise ValueError(f"fraction of {self.millionths} millionths is not in 1..{MILLION}")

    @property
    def name(self) -> str:
        """The name "topk:F", F without trailing zeros."""
        return f"topk:{self.millionths / MILLION:.6f}".rstrip("0").rstrip(".")

    def num_kept(self, num_elements: int) -> int:
        """Return k, at least 1 for a chunk with any elements."""
        return -(-num_elements * self.millionths // MILLION)

    def num_bytes(self, num_elements: int) -> int:
        """Return 6 k [bytes]."""
        return 6 * self.num_kept(num_elements)

    def encode(self, values: Values, rng: np.random.Generator) -> bytes:
        """Encode one chunk; see `Codec.encode`."""
        check_values(self.name, values, FLOAT32_MAX)
        largest = _largest(np.abs(values), self.num_kept(values.size))
        return values[largest].astype("<f4").tobytes() + largest.astype("<u2").tobytes()

    def decode(self, data: bytes | memoryview, num_elements: int, out: Values | None = None) -> Values:
        """Decode one chunk; see `Codec.decode`."""
        check_size(self, data, num_elements)
        num_kept = self.num_kept(num_elements)
        largest = np.frombuffer(data, "<f4", count=num_kept)
        indices = np.frombuffer(data, "<u2", offset=4 * num_kept)
        values = output_array(num_elements, out)
        loops = loops_for(num_elements) if largest.flags.aligned and indices.flags.aligned else None
        if loops is not None and loops.scatter(largest, indices, values) == num_kept:
            return values
        if not (indices[1:] > indices[:-1]).all() or indices[-1] >= num_elements:
            raise ValueError(f"{self.name}: indices are not strictly ascending in 0..{num_elements - 1}")
        check_finite(self.name, largest)
        values.fill(0)
        values[indices] = largest
        return values


def _largest(magnitudes: Values, count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest values, ascending; of equal ones the lowest.

    The result is defined by values alone, whatever the algorithm.
    """
    threshold = _threshold(magnitudes, count)
    found = np.flatnonzero(magnitudes >= threshold)
    surplus = found.size - count
    if surplus == 0:
        return found
    ties = np.flatnonzero(magnitudes[found] == threshold)
    return np.delete(found, ties[-surplus:])


def _threshold(magnitudes: Values, count: int) -> np.float32:
    """Return the `count`-th largest value. A sample gives a first bound, so that usually few values are sorted."""
    sample = magnitudes[::SAMPLE_STEP]
    rank = min(sample.size, 8 + count * 3 // (2 * SAMPLE_STEP))
    candidates = magnitudes[magnitudes >= np.partition(sample, -rank)[-rank]]
    if candidates.size < count:
        candidates = magnitudes
    return np.float32(np.partition(candidates, -count)[-count])
