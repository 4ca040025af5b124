"""Seeded draws: a uniform number in (0, 1) for each client and purpose, from (seed, purpose, client name) alone. Pure.

A client's device does not change when other clients join, leave or change their order.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

PURPOSES = ("compute", "download", "upload", "latency", "straggler", "kind", "noon", "sleeper")
"""Purposes of the draws, each with 8 of the 64 bytes of a client's hash; appending or reordering changes the bits."""

Draws = Mapping[str, NDArray[np.float64]]
"""Numbers in (0, 1), one for each client (clients,), by purpose."""

_CLIENTS_PER_BLOCK = 65_536


def client_draws(names: Iterable[str], seed: int) -> Draws:
    """Draw a uniform number of 53 bits for each client and purpose.

    The hash of a client is BLAKE2b(name, key=seed), 64 bytes: eight independent numbers from one hash.

    Args:
        names: the names of the clients, in the order of the result.
        seed: the seed of the run, in 0..2^63-1.
    """
    key = seed.to_bytes(8, "little")
    words = [np.frombuffer(b"".join(block), "<u8") for block in _blocks(names, key)]
    table = np.concatenate(words).reshape(-1, len(PURPOSES)) if words else np.empty((0, len(PURPOSES)), "<u8")
    numbers = ((table >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return {purpose: np.ascontiguousarray(numbers[:, at]) for at, purpose in enumerate(PURPOSES)}


def _blocks(names: Iterable[str], key: bytes) -> Iterator[list[bytes]]:
    digests = (hashlib.blake2b(name.encode(), key=key, person=b"atoll devices").digest() for name in names)
    while block := list(itertools.islice(digests, _CLIENTS_PER_BLOCK)):
        yield block
