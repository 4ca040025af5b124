"""The loops of the stacked fold in machine code. Importing this module needs numba; `passes` imports it.

Rows are given by the addresses of their first values, wherever they lie; the caller keeps them alive.
"""

from typing import Any

import numpy as np
from numba import carray, float32, float64, int64, njit, types, uint32, uint64  # type: ignore[attr-defined]
from numba.extending import intrinsic

SUMS_AT_ONCE = 1 << 14
"""Number of sums that one pass over all rows computes: 128 KiB, which stay in the second-level cache. With fewer, the
hardware prefetcher would fall behind: it predicts reads only within a row."""

Addresses = types.Array(uint64, 1, "C", readonly=True)
Scales = types.Array(float64, 1, "C", readonly=True)


def _pointer(typing: Any, address: Any) -> Any:
    """Return the type and the code of a pointer to the float32 at an address, for numba's `intrinsic`."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointers: Any = types.CPointer
    return pointers(float32)(uint64), code


pointer: Any = intrinsic(_pointer)


@njit(types.void(Addresses, int64, int64, uint32[::1]), nogil=True, cache=True)
def largest(addresses: Any, start: Any, stop: Any, found: Any) -> None:
    """Store in `found` (K) the largest bits, without sign, of each row's values from `start` to `stop`."""
    for k in range(addresses.size):
        bits = carray(pointer(addresses[k]), stop)[start:].view(np.uint32)
        most = np.uint32(0)
        for i in range(bits.size):
            most = max(most, bits[i] & np.uint32(0x7FFFFFFF))
        found[k] = most


@njit(types.void(Addresses, int64, Scales, float64[::1]), nogil=True, cache=True)
def add_up(addresses: Any, start: Any, scales: Any, total: Any) -> None:
    """Add rint(scale_k u_k) of all rows to `total` (n), for their values from `start` on."""
    for first in range(0, total.size, SUMS_AT_ONCE):
        tile = total[first : first + SUMS_AT_ONCE]
        begin, end = start + first, start + first + tile.size
        for k in range(0, addresses.size - 3, 4):
            a, b = carray(pointer(addresses[k]), end)[begin:], carray(pointer(addresses[k + 1]), end)[begin:]
            c, d = carray(pointer(addresses[k + 2]), end)[begin:], carray(pointer(addresses[k + 3]), end)[begin:]
            for i in range(tile.size):
                tile[i] += (np.rint(a[i] * scales[k]) + np.rint(b[i] * scales[k + 1])) + (
                    np.rint(c[i] * scales[k + 2]) + np.rint(d[i] * scales[k + 3])
                )
        for k in range(addresses.size // 4 * 4, addresses.size):
            rest = carray(pointer(addresses[k]), end)[begin:]
            for i in range(tile.size):
                tile[i] += np.rint(rest[i] * scales[k])
