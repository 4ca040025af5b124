"""The SHA-256 of a range of a file, read in blocks."""

import hashlib
from typing import BinaryIO

from atoll.aggregation.printable import count_of

BLOCK_BYTES = 1 << 20


def sha256_of_next(file: BinaryIO, num_bytes: int) -> str:
    """Return the SHA-256, in hexadecimal, of the next bytes of a file; the file then stands behind them.

    Raises:
        EOFError: the file ends earlier.
    """
    digest, left = hashlib.sha256(), num_bytes
    while left:
        block = file.read(min(BLOCK_BYTES, left))
        if not block:
            raise EOFError(f"the file ends {count_of(left, 'byte')} too early")
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()
