"""A whole tensor as encoded chunks: written one after the other, read at any place.

    elements   [0, 65,536)   [65,536, 131,072)   ...   the rest
    bytes      chunk 0       chunk 1             ...   last chunk

The elements are those of a tensor, or of one piece of it, in flat C order. A chunk is coded by itself into a size that
its length alone decides (`codec`), so the place of every chunk is known before a byte is read: a stored update can be
checked by its size, and any range of its elements decoded from the chunks that it meets. Only floats are coded;
integer tensors travel as they are.
"""

from collections.abc import Callable, Iterator

import numpy as np

from atoll.aggregation.codecs.codec import CHUNK_ELEMENTS, Codec, Values

ReadValues = Callable[[int, int], Values]
"""(start, stop) -> float32 elements [start, stop): `partial(reader.read, tensor)` of an `UpdateReader`, a slice."""

ReadBytes = Callable[[int, int], bytes | memoryview]
"""(position, length) -> so many bytes from there on: a pread, a slice of bytes."""


def encoded_bytes(codec: Codec, num_elements: int) -> int:
    """The exact size of all chunks of a tensor [bytes]; 0 of an empty one."""
    full, rest = divmod(num_elements, CHUNK_ELEMENTS)
    return full * codec.num_bytes(CHUNK_ELEMENTS) + codec.num_bytes(rest)


def chunk_bounds(num_elements: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each chunk of a tensor, in order."""
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, num_elements)


def encode_chunks(codec: Codec, num_elements: int, read: ReadValues, rng: np.random.Generator) -> Iterator[bytes]:
    """The chunks of a tensor, one at a time: `file.writelines(encode_chunks(...))`. Memory is a few chunks.

    The same values and the same state of `rng` give the same bytes.

    Raises:
        ValueError: a chunk cannot be coded (`Codec.encode`); says which.
    """
    for start, stop in chunk_bounds(num_elements):
        try:
            yield codec.encode(read(start, stop), rng)
        except ValueError as fault:
            raise ValueError(f"elements {start}..{stop}: {fault}") from fault


def decode_range(codec: Codec, num_elements: int, start: int, stop: int, read: ReadBytes) -> Values:
    """The elements [start, stop) of a tensor of `num_elements`: the bits that decoding all of it gives.

    Memory is the result and a few chunks. Each chunk that the range meets is read and checked whole.

    Args:
        read: finds the bytes of the tensor's chunks, position 0 being the first byte of the first.

    Raises:
        IndexError: the range is not inside the tensor.
        ValueError: a chunk is malformed, or `read` found too few bytes (`Codec.decode`); says which.
    """
    if not 0 <= start <= stop <= num_elements:
        raise IndexError(f"elements {start}..{stop} are not in 0..{num_elements}")
    values = np.empty(stop - start, np.float32)
    for chunk in range(start // CHUNK_ELEMENTS, -(-stop // CHUNK_ELEMENTS) if start < stop else 0):
        begin = chunk * CHUNK_ELEMENTS
        end = min(begin + CHUNK_ELEMENTS, num_elements)
        data = read(chunk * codec.num_bytes(CHUNK_ELEMENTS), codec.num_bytes(end - begin))
        low, high = max(begin, start), min(end, stop)
        part = values[low - start : high - start]
        try:
            if part.size == end - begin:
                codec.decode(data, end - begin, part)
            else:
                part[:] = codec.decode(data, end - begin)[low - begin : high - begin]
        except ValueError as fault:
            raise ValueError(f"elements {begin}..{end}: {fault}") from fault
    return values
