"""The key streams that mask a vector of words: AES-256 in counter mode (NIST SP 800-38A), from counter 0.

    S(key)[p] = word p of AES-256-CTR(key, zeros), little-endian, of 4 or 8 bytes

A block of a stream has 16 bytes: 4 words of 32 bits, or 2 of 64. Streams are added and subtracted modulo 2^bits.
"""

import sys
from collections.abc import Iterable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

BLOCK = 16
CHUNK = 1 << 20
"""Bytes of a stream that are made at once: they stay in the processor's cache."""
SEEK_BYTES = 64 * 1024
"""Shortest run for which a cipher is set to its place; blocks of shorter runs are encrypted together."""

Words = NDArray[np.uint32] | NDArray[np.uint64]

_ZEROS = bytes(CHUNK)
assert sys.byteorder == "little", "the streams' words are used in place"


def add_stream(words: Words, key: bytes, sign: int, start: int = 0) -> None:
    """Add a stream to contiguous words, or subtract it, in place.

    Args:
        words: uint32 or uint64; changed modulo 2^32 or 2^64.
        key: 32 bytes.
        sign: 1 or -1.
        start: position of the first word in the stream.
    """
    change = np.add if sign > 0 else np.subtract
    for at, stream in _stream(key, start * words.itemsize, words.nbytes):
        part = words[at // words.itemsize : (at + stream.nbytes) // words.itemsize]
        change(part, stream.view(words.dtype), out=part)


def _stream(key: bytes, first: int, size: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the bytes first..first + size of a stream in chunks, with offsets; a chunk is valid until the next one."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR((first // BLOCK).to_bytes(BLOCK))).encryptor()
    encryptor.update(_ZEROS[: first % BLOCK])
    buffer = bytearray(CHUNK + BLOCK)
    for at in range(0, size, CHUNK):
        count = min(CHUNK, size - at)
        encryptor.update_into(memoryview(_ZEROS)[:count], buffer)
        yield at, np.frombuffer(buffer, np.uint8, count)


def add_stream_at(words: Words, key: bytes, sign: int, runs: Iterable[tuple[int, int]]) -> None:
    """Add a stream to words that stand for runs of positions, or subtract it, in place.

    Counter mode is the encryption of counters, so the blocks of many short runs are one call of AES in ECB mode: to set
    a cipher to the place of each would cost 30 to 500 times as much.

    Args:
        words: of all runs, one after the other.
        key: 32 bytes.
        sign: 1 or -1.
        runs: first position and number of words of each, in the order of `words`.
    """
    at, short = 0, []
    for first, count in runs:
        if count * words.itemsize >= SEEK_BYTES:
            add_stream(words[at : at + count], key, sign, first)
        elif count:
            short.append((at, first, count))
        at += count
    if short:
        _add_short(words, key, sign, np.array(short, np.int64))


def _add_short(words: Words, key: bytes, sign: int, runs: NDArray[np.int64]) -> None:
    """Add the stream to short runs: rows of offset in `words`, first position, number of words."""
    each = BLOCK // words.itemsize
    change = np.add if sign > 0 else np.subtract
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # of counters, which is CTR
    most = CHUNK // BLOCK
    first_block = runs[:, 1] // each
    num_blocks = (runs[:, 1] + runs[:, 2] - 1) // each - first_block + 1
    ends = np.cumsum(num_blocks)
    begin = 0
    while begin < len(runs):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most, "right")))
        counts = num_blocks[begin:end]
        starts = np.cumsum(counts) - counts
        blocks = np.arange(counts.sum()) - np.repeat(starts - first_block[begin:end], counts)
        counters = np.zeros((len(blocks), 2), ">u8")
        counters[:, 1] = blocks
        stream = np.frombuffer(encryptor.update(counters.tobytes()), words.dtype)
        lengths = runs[begin:end, 2]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = within + np.repeat(starts * each + runs[begin:end, 1] % each, lengths)
        target = within + np.repeat(runs[begin:end, 0], lengths)
        words[target] = change(words[target], stream[source])
        begin = end
