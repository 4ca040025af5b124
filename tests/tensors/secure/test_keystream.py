"""Key streams: those of AES-256-CTR by another library call, at any place, in any pieces."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.secure import keystream
from atoll.tensors.secure.keystream import add_stream, add_streams_at

KEY = bytes(range(32))
DTYPES = [np.uint32, np.uint64]


def words_of(count, dtype):
    """Return the first words of the stream, by one call from counter 0."""
    encryptor = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(count * np.dtype(dtype).itemsize)), dtype)


def test_the_first_block_is_that_of_nist():
    """SP 800-38A, F.5.5, has another counter; the block of a counter is AES of it (FIPS 197, C.3)."""
    encryptor = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    assert (
        encryptor.update(bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == "8ea2b7ca516745bfeafc49904b496089"
    )
    assert words_of(4, np.uint32).tobytes() == encryptor.update(bytes(16))


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 300), st.integers(0, 300))
def test_a_stream_at_a_place_is_that_part_of_the_whole(dtype, start, count):
    words = np.zeros(count, dtype)
    add_stream(words, KEY, 1, start)
    assert np.array_equal(words, words_of(start + count, dtype)[start:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stream_is_longer_than_a_chunk_and_wraps(dtype):
    count = 3 * keystream.CHUNK // np.dtype(dtype).itemsize + 5
    words = np.full(count, np.iinfo(dtype).max, dtype)
    add_stream(words, KEY, 1)
    assert np.array_equal(words, words_of(count, dtype) - dtype(1))
    add_stream(words, KEY, -1)
    assert np.all(words == np.iinfo(dtype).max)


@pytest.mark.parametrize("dtype", DTYPES)
@given(runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=12), most=st.sampled_from([64, 4096]))
def test_scattered_runs_have_the_words_at_their_positions(dtype, runs, most):
    at, places = 0, []
    for gap, count in runs:
        places.append((at + gap, count))
        at += gap + count
    whole = words_of(at, dtype)
    expected = np.concatenate([np.zeros(0, dtype), *(whole[first : first + count] for first, count in places)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keystream, "CHUNK", most)
        patch.setattr(keystream, "SEEK_BYTES", 256)
        words = np.zeros(len(expected), dtype)
        add_streams_at(words, [(KEY, 1)], np.array(places, np.int64).reshape(-1, 2))
    assert np.array_equal(words, expected)
    add_streams_at(words, [(KEY, -1)], np.array(places, np.int64).reshape(-1, 2))
    assert not words.any()


def test_positions_beyond_32_bits_are_counted():
    far = 2**40
    words = np.zeros(8, np.uint32)
    add_stream(words, KEY, 1, far)
    other = np.zeros(8, np.uint32)
    add_streams_at(other, [(KEY, 1)], np.array([(far, 8)]))
    assert np.array_equal(words, other)
