"""One number in (0, 1) for each client and purpose, from (seed, purpose, client name) alone. Pure.

So a client's device does not change when others join, leave or are named in another order.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

PURPOSES = ("compute", "download", "upload", "latency", "straggler", "kind", "noon", "sleeper")
"""What is drawn for a client, each from 8 of the 64 bytes of its hash: append nothing, reorder nothing."""

Lots = Mapping[str, NDArray[np.float64]]
"""By purpose, one number (clients,) in (0, 1) each."""

_AT_ONCE = 65_536


def lots(names: Iterable[str], seed: int) -> Lots:
    """Draw for each client and purpose, uniformly, 53 bits each.

    The hash of a client is BLAKE2b(name, key=seed), 64 bytes: eight independent numbers for the price of one.

    Args:
        names: of the clients, in the order of the result.
        seed: of the run, in 0..2^63-1.
    """
    key = seed.to_bytes(8, "little")
    words = [np.frombuffer(b"".join(block), "<u8") for block in _blocks(names, key)]
    table = np.concatenate(words).reshape(-1, len(PURPOSES)) if words else np.empty((0, len(PURPOSES)), "<u8")
    numbers = ((table >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return {purpose: np.ascontiguousarray(numbers[:, at]) for at, purpose in enumerate(PURPOSES)}


def _blocks(names: Iterable[str], key: bytes) -> Iterator[list[bytes]]:
    digests = (hashlib.blake2b(name.encode(), key=key, person=b"atoll devices").digest() for name in names)
    while block := list(itertools.islice(digests, _AT_ONCE)):
        yield block
