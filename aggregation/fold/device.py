"""The fold's exact sum on another device: updates cross in tiles from pinned memory, and torch adds them there.

    read update k --> pinned buffer --copy--> device: total += rint(float64(u_k) scale_k)

The same float64 operations in the same order as in `kernel`, each in a separate kernel launch, so that none is fused
into a multiply-add with another rounding: the bits are the CPU's. float16 and bfloat16 cross in their stored form, and
are widened there. Every tile has a separate stream, and an update is read while the one before it is copied and added;
with a few threads the link is never idle. The mean, the optimizer and the new version stay on the CPU: they process
each element once, the sum processes it K times.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.tensors.layout import ITEM_BYTES, Tensor
from atoll.tensors.safetensors_file import NUMPY_DTYPES
from atoll.tensors.updates.reader import UpdateReader

if TYPE_CHECKING:
    import torch

BUFFERS = 2
"""Number of pinned buffers of each tile: one is filled while the other is copied."""


TILE_ELEMENTS = 1 << 21
"""Number of elements of a tile. The launches of a smaller one's operations take longer than its bytes need to cross: on
an H100 2^18 elements are summed at 6 GB/s, 2^21 at 40."""


class Summand(NamedTuple):
    """One update of a weighted sum."""

    reader: UpdateReader
    scale: float
    magnitude: float


class Device:
    """A device of torch. Threads may share it.

    Args:
        name: "cuda", "cuda:1"; also "cpu", where torch does the same without a copy.

    Raises:
        ValueError: there is no such device.
    """

    def __init__(self, name: str) -> None:
        import torch

        self.torch = torch
        try:
            self.device = torch.device(name)
        except RuntimeError:
            raise ValueError(f"device {name!r} is unknown; allowed: cpu, cuda, cuda:N") from None
        self.is_cuda = self.device.type == "cuda"
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device {name!r} is not supported for float64 sums; allowed: cpu, cuda, cuda:N")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.is_cuda and (self.device.index or 0) >= count:
            raise ValueError(f"device {name!r} is not there: torch {torch.__version__} sees {count} CUDA devices")

    def weighted_sum(
        self, tensor: Tensor, start: int, stop: int, summands: Sequence[Summand]
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return sum_k rint(u_k scale_k) of the elements [start, stop) of one float tensor.

        Returns:
            (stop - start) the sum, and (K) flags of the updates within their magnitudes; NaN is within nothing.

        Raises:
            TensorFileCorrupted: a file ends early.
        """
        with self.stream():
            tile = TileSum(self, stop - start)
            buffers = [_Buffer(self, 4 * (stop - start)) for _ in range(min(BUFFERS, len(summands)))]
            for k, (reader, scale, _) in enumerate(summands):
                buffer = buffers[k % BUFFERS]
                values = buffer.values(reader.stored_dtype(tensor.name), stop - start)
                reader.read(tensor, start, stop, buffer.array)
                tile.add(values, scale)
                buffer.copied()
            total, largest = tile.finish()
        return total, largest <= np.array([summand.magnitude for summand in summands])

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context whose work runs in order, concurrently with other streams."""
        if not self.is_cuda:
            return nullcontext()
        return self.torch.cuda.stream(self.torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def pinned(self, num_elements: int, dtype: "torch.dtype") -> "torch.Tensor":
        """Allocate memory of the host from which the device copies by itself (DMA). torch caches it for later calls."""
        return self.torch.empty(num_elements, dtype=dtype, pin_memory=self.is_cuda)


class TileSum:
    """A sum that grows on a device, within one stream."""

    def __init__(self, device: Device, num_elements: int) -> None:
        self._device = device
        self._largest: list[torch.Tensor] = []
        self._total = device.torch.zeros(num_elements, dtype=device.torch.float64, device=device.device)
        self._exact = device.torch.empty_like(self._total)

    def add(self, values: "torch.Tensor", scale: float) -> None:
        """Add rint(values scale) to the sum; values (n) of any float dtype, on the host (pinned) or the device."""
        self._exact.copy_(values.to(self._device.device, non_blocking=True))
        low, high = self._exact.aminmax()
        self._largest.append(self._device.torch.maximum(-low, high))
        self._total.add_(self._exact.mul_(scale).round_())  # half to even, as rint

    def finish(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Wait for the sum (n); return it and the largest magnitude of each addition, NaN if it had one."""
        device = self._device
        total = device.pinned(self._total.numel(), device.torch.float64)
        total.copy_(self._total, non_blocking=True)
        largest = device.torch.stack(self._largest).cpu()  # waits for this stream
        return total.numpy(), largest.numpy()


class _Buffer:
    """A pinned buffer that is refilled, each time after the copy from it is done."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._torch = device.torch
        self._bytes = device.pinned(num_bytes, device.torch.uint8)
        self._event = device.torch.cuda.Event() if device.is_cuda else None
        self.array: NDArray[Any]
        """The memory that `values` returned last, for numpy."""

    def values(self, dtype: str, num_elements: int) -> "torch.Tensor":
        """Return memory for `num_elements` in their stored dtype: F32, F16 or BF16."""
        if self._event is not None:
            self._event.synchronize()
        room = self._bytes[: num_elements * ITEM_BYTES[dtype]]
        self.array = room.numpy().view(NUMPY_DTYPES[dtype])
        kinds = {"F32": self._torch.float32, "F16": self._torch.float16, "BF16": self._torch.bfloat16}
        return room.view(kinds[dtype])

    def copied(self) -> None:
        """Mark the point of the stream after which the buffer may be refilled."""
        if self._event is not None:
            self._event.record(self._torch.cuda.current_stream())
