"""The compiled loops against numpy, bit for bit, over values and bytes of every kind."""

from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors.codecs import kernels, quantization, sparsification
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba: make setup installs it")

NAMES = ("bf16", "fp16", "qsgd8", "topk:0.1")
compiled = cache(kernels.compiled)


def outcome(function):
    """The bytes that it gives, or what it says."""
    try:
        result = function()
    except ValueError as fault:
        return str(fault)
    return result if isinstance(result, bytes) else result.tobytes()


def both(function):
    """Compute with the loops, and without."""
    outcomes = []
    for loops in (compiled(), None):
        with pytest.MonkeyPatch.context() as patch:
            for module in (quantization, sparsification):
                patch.setattr(module, "loops_for", lambda _, loops=loops: loops)
            outcomes.append(outcome(function))
    return outcomes


def check_encode(name, values, seed=0):
    by_loops, by_numpy = both(lambda: parse_codec(name).encode(values, np.random.default_rng(seed)))
    assert by_loops == by_numpy
    return by_numpy


def check_decode(name, data, n):
    by_loops, by_numpy = both(lambda: parse_codec(name).decode(data, n))
    assert by_loops == by_numpy
    into = np.full(n, np.nan, np.float32)
    for given_out in both(lambda: parse_codec(name).decode(data, n, into)):
        assert given_out == by_numpy
        assert isinstance(by_numpy, str) or into.tobytes() == by_numpy


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), bits=st.binary(min_size=4, max_size=4 * 1100), seed=st.integers(0, 99))
def test_floats_of_any_bits_are_encoded_alike_or_refused_alike(name, bits, seed):
    check_encode(name, np.frombuffer(bits[: len(bits) // 4 * 4], np.float32), seed)


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 1100), exponent=st.integers(-45, 37), seed=st.integers(0, 1 << 20))
def test_values_of_any_magnitude_are_coded_alike(name, n, exponent, seed):
    with np.errstate(all="ignore"):
        values = (10.0**exponent * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)
    data = check_encode(name, values, seed)
    if isinstance(data, bytes):
        check_decode(name, data, n)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 1100), seed=st.integers(0, 1 << 20), calm=st.booleans())
def test_bytes_of_any_kind_are_decoded_alike_or_refused_alike(name, n, seed, calm):
    raw = np.random.default_rng(seed).integers(0, 256, parse_codec(name).num_bytes(n), np.uint8)
    if calm and name != "qsgd8":
        raw[1::2] &= 0x37  # no exponent of infinities
    if calm and name.startswith("topk"):
        raw[-2 * parse_codec(name).num_kept(n) :].view("<u2")[:] = np.arange(parse_codec(name).num_kept(n))
    check_decode(name, raw.tobytes(), n)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_all_halves_are_decoded_alike_one_by_one(name):
    halves = np.arange(CHUNK_ELEMENTS, dtype="<u2")
    largest = 0x7F80 if name == "bf16" else 0x7C00
    finite = halves[(halves & 0x7FFF) < largest]
    check_decode(name, finite.tobytes(), finite.size)
    for half in (largest, largest | 0x8000, largest + 1, 0x7FFF, 0xFFFF):
        spoilt = np.append(finite[:5], np.uint16(half)).astype("<u2").tobytes()
        check_decode(name, spoilt, 6)
        assert "not finite" in both(lambda data=spoilt: parse_codec(name).decode(data, 6))[0]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_values_that_lie_oddly_are_taken(name):
    values = np.random.default_rng(0).standard_normal(1200).astype(np.float32)
    values.setflags(write=False)
    data = check_encode(name, values)
    for part in (values[::2], values[::-1]):
        assert check_encode(name, part) == check_encode(name, part.copy())
    check_decode(name, memoryview(b"x" + data)[1:], 1200)
    check_decode(name, memoryview(bytearray(data)), 1200)
    check_decode(name, memoryview(b"x" + data)[1:], 1200)
