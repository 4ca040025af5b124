"""The encoding of a whole tensor in chunks: written one after the other, read from any position.

    elements   [0, 65,536)   [65,536, 131,072)   ...   the rest
    bytes      chunk 0       chunk 1             ...   last chunk

The elements belong to a tensor, or to one piece of it, in flat C order. Each chunk is encoded by itself into a size
that its length alone determines (`codec`), so the position of every chunk is known before a byte is read: a stored
update can be checked by its size, and any range of its elements decoded from the chunks that it meets. Only floats are
encoded; integer tensors are sent unencoded.
"""

from collections.abc import Callable, Iterator

import numpy as np

from atoll.tensors.codecs.codec import CHUNK_ELEMENTS, Codec, Values

ReadValues = Callable[[int, int], Values]
"""(start, stop) -> float32 elements [start, stop): `partial(reader.read, tensor)` of an `UpdateReader`, or a slice."""

ReadBytes = Callable[[int, int], bytes | memoryview]
"""(position, length) -> that number of bytes from the position on: a pread, or a slice of bytes."""


def encoded_bytes(codec: Codec, num_elements: int) -> int:
    """Return the exact size of all chunks of a tensor [bytes]; 0 for an empty one."""
    full, rest = divmod(num_elements, CHUNK_ELEMENTS)
    return full * codec.num_bytes(CHUNK_ELEMENTS) + codec.num_bytes(rest)


def chunk_bounds(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of a tensor, in order."""
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, num_elements)


def encode_chunks(codec: Codec, num_elements: int, read: ReadValues, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield the chunks of a tensor, one at a time: `file.writelines(encode_chunks(...))`. Memory is a few chunks.

    The same values and the same state of `rng` give the same bytes.

    Raises:
        ValueError: a chunk cannot be encoded (`Codec.encode`); the message names it.
    """
    for start, stop in chunk_bounds(num_elements):
        try:
            yield codec.encode(read(start, stop), rng)
        except ValueError as fault:
            raise ValueError(f"elements {start}..{stop}: {fault}") from fault


def decode_range(codec: Codec, num_elements: int, start: int, stop: int, read: ReadBytes) -> Values:
    """Return the elements [start, stop) of a tensor of `num_elements`: the bits that decoding all of it gives.

    Memory is the result and a few chunks. Each chunk that the range meets is read and checked whole.

    Args:
        codec: the codec of the tensor.
        num_elements: the number of elements of the tensor.
        start: the first element.
        stop: the element after the last one.
        read: returns bytes of the tensor's chunks; position 0 is the first byte of the first chunk.

    Raises:
        IndexError: the range is not inside the tensor.
        ValueError: a chunk is malformed, or `read` returned too few bytes (`Codec.decode`); the message names it.
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
