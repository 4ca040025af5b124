"""The sizes of the blocks in which a gradient is compressed. Importing this file does not import torch."""

BLOCK = 1024
"""Number of elements that share a scale."""

INT8_ROW = BLOCK + 4
"""Size of a block as int8 [bytes]."""

SIGN_ROW = BLOCK // 8 + 4
"""Size of a block as signs [bytes]."""


def num_blocks(num_elements: int, num_rows: int) -> int:
    """Return the number of blocks in each of `num_rows` equal rows that hold all elements."""
    return -(-num_elements // (BLOCK * num_rows))
