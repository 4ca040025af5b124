"""The noise of a tensor's elements, in whole steps of a grid: a key for each block of elements, in their flat order.

An element has the same noise however the tensor is cut: into tiles of a whole file, ranges of aggregation ranks, or
boxes of a mesh.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.ground.noise.key import key_of
from atoll.tensors.noise.discrete_gaussian import DiscreteGaussian
from atoll.tensors.secure.keystream import Runs

BLOCK = 1 << 14
"""Elements of a tensor whose samples have one key."""


@dataclass(frozen=True, slots=True)
class GridNoise:
    """Noise of the tensors of one sum, or of one member's part of it.

    Attributes:
        deviation: standard deviation of an element [steps].
        key: 32 bytes, of this use alone.
    """

    deviation: float
    key: bytes = field(repr=False)

    def between(self, tensor: str, num_elements: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the noise of elements start..stop of a tensor.

        Args:
            tensor: its name.
            num_elements: of the whole tensor.
            start: the first element, in flat order.
            stop: the element behind the last one.
        """
        sampler, parts = DiscreteGaussian(self.deviation), [np.zeros(0, np.int64)]
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            begin = block * BLOCK
            samples = self._block(sampler, tensor, num_elements, block)
            parts.append(samples[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts)

    def at(self, tensor: str, num_elements: int, runs: Runs) -> NDArray[np.int64]:
        """Return the noise of runs of elements of a tensor, one after the other.

        Args:
            tensor: its name.
            num_elements: of the whole tensor.
            runs: first element and number of elements of each.
        """
        counts = runs[:, 1]
        elements = np.arange(int(counts.sum())) + np.repeat(runs[:, 0] - (np.cumsum(counts) - counts), counts)
        sampler, noise, of = DiscreteGaussian(self.deviation), np.empty(elements.size, np.int64), elements // BLOCK
        for block in np.unique(of).tolist():
            here = of == block
            noise[here] = self._block(sampler, tensor, num_elements, block)[elements[here] - block * BLOCK]
        return noise

    def _block(self, sampler: DiscreteGaussian, tensor: str, num_elements: int, block: int) -> NDArray[np.int64]:
        return sampler.sample(key_of(self.key, tensor, block), min(BLOCK, num_elements - block * BLOCK))
