"""Sources of an update's values, block by block: a file, or a function of files that is computed when read."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.layout import Tensor


class Source(Protocol):
    """The values of one update; `reader.UpdateReader` is a source. Threads may share it."""

    def carries(self, tensor: str) -> bool:
        """Return whether the update has this tensor."""

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the elements [start, stop) of a tensor in flat C order, floats as float32; the caller may change them.

        If `out` is given, (stop - start) contiguous and of their dtype, they are written to it.
        """


@dataclass(frozen=True, slots=True)
class Scaled:
    """An update's float tensors times a factor: a_k u_k, in float32. Integers stay."""

    source: Source
    factor: float

    def carries(self, tensor: str) -> bool:
        """Return whether the update has this tensor."""
        return self.source.carries(tensor)

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the scaled elements; see `Source.read`."""
        block = self.source.read(tensor, start, stop, out)
        if block.dtype == np.float32 and self.factor != 1.0:
            np.multiply(block, np.float32(self.factor), out=block)
        return block


class Zeros:
    """An update of zeros: the centre of a first round."""

    def carries(self, tensor: str) -> bool:
        """Return True: it has every tensor."""
        return True

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return stop - start zeros; see `Source.read`."""
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = 0.0
        return block
