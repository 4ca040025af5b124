"""The key streams that mask a vector of words: AES-256 in counter mode (NIST SP 800-38A), from counter 0.

    S(key)[p] = word p of AES-256-CTR(key, zeros), little-endian, of 4 or 8 bytes

A block of a stream has 16 bytes: 4 words of 32 bits, or 2 of 64. Streams are added and subtracted modulo 2^bits.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

BLOCK = 16
CHUNK = 1 << 18
"""Bytes of a stream that are made at once: they stay in the processor's cache."""
SEEK_BYTES = 64 * 1024
"""Shortest run for which a cipher is set to its place; blocks of shorter runs are encrypted together."""
PADDING = 16 * BLOCK
"""Longest gap [bytes] over which a cipher is run instead of set to the next place."""

Words = NDArray[np.uint32] | NDArray[np.uint64]
Stream = tuple[bytes, int]
"""A key of 32 bytes, and the sign with which its stream is added: 1 or -1."""
Runs = NDArray[np.int64]
"""(runs, 2): first position and number of words of each."""

_ZEROS = bytes(CHUNK)
assert sys.byteorder == "little", "the streams' words are used in place"


class Streams:
    """Key streams that are added to the words of a vector, part by part.

    Each cipher stays where the last part ended, so parts in the order of their positions cost no seeking. An object is
    used by one thread.

    Args:
        streams: with their signs.
    """

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._ciphers = [_Cipher(key, sign) for key, sign in streams]
        self._buffer = bytearray(CHUNK + BLOCK)

    def add(self, words: Words, start: int = 0) -> None:
        """Add all streams, with their signs, to contiguous words in place, modulo 2^32 or 2^64.

        Args:
            words: uint32 or uint64.
            start: position of the first word.
        """
        each = CHUNK // words.itemsize
        for at in range(0, words.size, each):
            part = words[at : at + each]
            for cipher in self._ciphers:
                cipher.fill(self._buffer, (start + at) * words.itemsize, part.nbytes)
                cipher.change(part, np.frombuffer(self._buffer, words.dtype, part.size), out=part)


class _Cipher:
    """The stream of one key, at the place where it was last read."""

    def __init__(self, key: bytes, sign: int) -> None:
        self._key, self._position = key, 0
        self.change = np.add if sign > 0 else np.subtract
        self._encryptor = _counting(key, 0)

    def fill(self, buffer: bytearray, first: int, size: int) -> None:
        """Write the bytes first..first + size of the stream to the buffer, at most `CHUNK`."""
        gap = first - self._position
        if not 0 <= gap <= PADDING:
            self._encryptor, gap = _counting(self._key, first // BLOCK), first % BLOCK
        if gap:
            self._encryptor.update(_ZEROS[:gap])
        self._encryptor.update_into(memoryview(_ZEROS)[:size], buffer)
        self._position = first + size


def _counting(key: bytes, block: int) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(block.to_bytes(BLOCK))).encryptor()


def add_stream(words: Words, key: bytes, sign: int, start: int = 0) -> None:
    """Add a stream to contiguous words, or subtract it, in place.

    Args:
        words: uint32 or uint64; changed modulo 2^32 or 2^64.
        key: 32 bytes.
        sign: 1 or -1.
        start: position of the first word in the stream.
    """
    Streams([(key, sign)]).add(words, start)


def add_streams_at(words: Words, streams: Sequence[Stream], runs: Runs) -> None:
    """Add streams, with their signs, to words that stand for runs of positions, in place.

    Counter mode is the encryption of counters, so the blocks of many short runs are one call of AES in ECB mode: to set
    a cipher to the place of each would cost 30 to 500 times as much.

    Args:
        words: of all runs, one after the other.
        streams: with their signs.
        runs: in the order of `words`.
    """
    counts = runs[:, 1]
    ends = np.cumsum(counts)
    is_long = counts * words.itemsize >= SEEK_BYTES
    for (first, count), end in zip(runs[is_long].tolist(), ends[is_long].tolist(), strict=True):
        Streams(streams).add(words[end - count : end], first)
    is_short = ~is_long & (counts > 0)
    if is_short.any():
        _add_short(words, streams, runs[is_short], (ends - counts)[is_short])


def _add_short(words: Words, streams: Sequence[Stream], runs: Runs, offsets: NDArray[np.int64]) -> None:
    """Add streams to short runs, which begin at `offsets` in the words."""
    # Each encrypts counters, so that together with the addition it is the counter mode.
    ciphers = [(Cipher(algorithms.AES(key), modes.ECB()).encryptor(), sign) for key, sign in streams]
    buffer = bytearray()
    for batch in _batches(words.itemsize, runs, offsets):
        if len(buffer) < batch.counters.nbytes + BLOCK:
            buffer = bytearray(batch.counters.nbytes + BLOCK)
        stream = np.frombuffer(buffer, words.dtype, batch.counters.nbytes // words.itemsize)
        for encryptor, sign in ciphers:
            encryptor.update_into(batch.counters.data, buffer)
            mask = stream if batch.source is None else stream[batch.source]
            change = np.add if sign > 0 else np.subtract
            words[batch.target] = change(words[batch.target], mask)


class _Batch:
    """The blocks of some short runs, and the words of these blocks that belong to the runs.

    Attributes:
        counters: the counter of each block, as bytes.
        source: the indices of the words among those of the blocks; None: all of them.
        target: the place of the words.
    """

    def __init__(self, each: int, runs: Runs, offsets: NDArray[np.int64]) -> None:
        first, counts = runs[:, 0], runs[:, 1]
        first_block = first // each
        num_blocks = (first + counts - 1) // each - first_block + 1
        starts = np.cumsum(num_blocks) - num_blocks
        blocks = np.arange(num_blocks.sum()) - np.repeat(starts - first_block, num_blocks)
        counters = np.zeros((len(blocks), 2), ">u8")
        counters[:, 1] = blocks
        self.counters: NDArray[np.uint8] = counters.reshape(-1).view(np.uint8)
        total = int(counts.sum())
        within: NDArray[np.int64] | None = None
        self.source: NDArray[np.int64] | None = None
        if total != len(blocks) * each:
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            self.source = within + np.repeat(starts * each + first % each, counts)
        self.target: Any = slice(int(offsets[0]), int(offsets[0]) + total)
        if int(offsets[-1] + counts[-1] - offsets[0]) != total:  # long runs lie between them
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) if within is None else within
            self.target = within + np.repeat(offsets, counts)


def _batches(item: int, runs: Runs, offsets: NDArray[np.int64]) -> Iterator[_Batch]:
    """Yield the runs in batches of at most `CHUNK` bytes, or one run."""
    each = BLOCK // item
    blocks = np.cumsum((runs[:, 0] + runs[:, 1] - 1) // each - runs[:, 0] // each + 1)
    begin = 0
    while begin < len(runs):
        before = blocks[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(blocks, before + CHUNK // BLOCK, "right")))
        yield _Batch(each, runs[begin:end], offsets[begin:end])
        begin = end
