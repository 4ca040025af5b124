"""Where the values of one update come from, block by block: a file, or what is made of files while they are read."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.tensors.layout import Tensor


class Source(Protocol):
    """The values of one update; `blocks.UpdateReader` is one. Threads may share it."""

    def carries(self, tensor: str) -> bool:
        """Whether the update has this tensor."""

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The elements [start, stop) of a tensor in flat C order, float32 for floats; the caller may overwrite them.

        They go to `out` (stop - start), contiguous and of their dtype, when it is given.
        """


@dataclass(frozen=True, slots=True)
class Scaled:
    """An update's float tensors times a factor: a_k u_k, in float32. Integers stay."""

    source: Source
    factor: float

    def carries(self, tensor: str) -> bool:
        """Whether the update has this tensor."""
        return self.source.carries(tensor)

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """See `Source.read`."""
        block = self.source.read(tensor, start, stop, out)
        if block.dtype == np.float32 and self.factor != 1.0:
            np.multiply(block, np.float32(self.factor), out=block)
        return block


class Zeros:
    """An update that changes nothing: the centre of a first round."""

    def carries(self, tensor: str) -> bool:
        """Every tensor."""
        return True

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """See `Source.read`."""
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = 0.0
        return block
