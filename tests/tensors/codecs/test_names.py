import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec

NAMES = ["bf16", "fp16", "qsgd8", "sign", "topk:0.01", "topk:0.25", "topk:1"]
EDGES = [1, 2, 7, 8, 9, 511, 512, 513, 1024, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS]

codecs = st.sampled_from(NAMES).map(parse_codec)
small = st.floats(-60000, 60000, width=32)
chunks = arrays.arrays(np.float32, st.integers(1, 1200), elements=small)


def normal(n, *, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def round_trip(name, values, *, seed=0):
    codec = parse_codec(name)
    return codec.decode(codec.encode(values, np.random.default_rng(seed)), values.size)


@pytest.mark.parametrize("name", NAMES)
def test_name_of_a_codec_leads_back_to_it(name):
    codec = parse_codec(name)
    assert codec.name == name
    assert parse_codec(codec.name) == codec
    assert codec.is_biased == name.startswith(("topk", "sign"))


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("topk:0.010", "topk:0.01"), ("topk:1.0", "topk:1"), ("topk:0.000001", "topk:0.000001")],
)
def test_fraction_has_one_name(name, canonical):
    assert parse_codec(name).name == canonical


@pytest.mark.parametrize(
    "name",
    [
        *("", "BF16", "bf16 ", "int8", "topk", "topk:", "topk:0", "topk:0.0", "topk:1.1", "topk:2", "topk:-0.1"),
        *("topk:nan", "topk:1e-2", "topk:.1", "topk:0.0000001", "topk:0.1\n", "topk:0.١"),
    ],
)
def test_unknown_name_is_refused_with_what_is_allowed(name):
    with pytest.raises(ValueError, match="is not one of bf16, fp16, qsgd8, sign, topk:F") as refusal:
        parse_codec(name)
    assert repr(name) in str(refusal.value)


@settings(deadline=None)
@given(millionths=st.integers(1, 10**6), n=st.integers(1, CHUNK_ELEMENTS))
@example(millionths=70_000, n=100)  # 0.07 * 100 is 7.000000000000001 in floats
@example(millionths=1, n=1)
@example(millionths=249, n=CHUNK_ELEMENTS)  # 0.000249 * 1e6 is below 249 in floats
def test_top_k_keeps_the_exact_ceiling(millionths, n):
    codec = parse_codec(f"topk:{millionths / 1e6:.6f}")
    assert codec.millionths == millionths
    assert codec.num_kept(n) == math.ceil(n * millionths / 10**6 - 1e-9) >= 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", EDGES)
def test_size_is_known_before_a_value_is(name, n):
    codec = parse_codec(name)
    sizes = {
        "bf16": 2 * n,
        "fp16": 2 * n,
        "qsgd8": n + 4 * math.ceil(n / 512),
        "sign": 4 + math.ceil(n / 8),
        "topk:0.01": 6 * math.ceil(n / 100),
        "topk:0.25": 6 * math.ceil(n / 4),
        "topk:1": 6 * n,
    }
    for values in (normal(n), np.zeros(n, np.float32)):
        data = codec.encode(values, np.random.default_rng(0))
        assert len(data) == codec.num_bytes(n) == sizes[name]
        decoded = codec.decode(data, n)
        assert (decoded.dtype, decoded.shape) == (np.float32, (n,))
        assert codec.decode(memoryview(data), n).tobytes() == decoded.tobytes()
    assert codec.num_bytes(0) == 0


@settings(deadline=None)
@given(codec=codecs, values=chunks, seed=st.integers(0, 1000))
def test_same_seed_gives_the_same_bytes_and_leaves_the_values_alone(codec, values, seed):
    before = values.copy()
    first, second = (codec.encode(values, np.random.default_rng(seed)) for _ in range(2))
    assert first == second
    assert values.tobytes() == before.tobytes()


def test_other_seed_gives_other_levels():
    codec, values = parse_codec("qsgd8"), normal(600)
    assert codec.encode(values, np.random.default_rng(1)) != codec.encode(values, np.random.default_rng(2))


@pytest.mark.parametrize("n", [1, 511, 512, 513])
def test_randomness_drawn_depends_on_the_length_alone(n):
    def state_after(values):
        rng = np.random.default_rng(3)
        parse_codec("qsgd8").encode(values, rng)
        return rng.bit_generator.state

    assert state_after(normal(n)) == state_after(np.zeros(n, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 1, 299])
def test_values_that_are_not_finite_are_never_encoded(name, value, position):
    values = normal(300)
    values[position] = value
    with pytest.raises(ValueError, match=rf"^{name}: values in .* are not within"):
        round_trip(name, values)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, CHUNK_ELEMENTS + 1])
def test_chunk_of_no_or_too_many_elements_is_refused(name, n):
    codec = parse_codec(name)
    with pytest.raises(ValueError, match=rf"{name}: float32 array \({n},\) is not a chunk of 1..65536 float32"):
        codec.encode(np.zeros(n, np.float32), np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"{name}: chunk of {n} elements"):
        codec.decode(bytes(codec.num_bytes(n)), n)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 2), np.float32), np.zeros(4, np.int32), np.float32(1)])
def test_arrays_that_are_no_chunk_are_never_encoded(name, wrong):
    with pytest.raises(ValueError, match="is not a chunk of"):
        parse_codec(name).encode(wrong, np.random.default_rng(0))


@pytest.mark.parametrize("name", NAMES)
def test_strided_values_are_encoded_like_their_copy(name):
    values, codec = normal(1200), parse_codec(name)
    for part in (values[::2], values[::-1]):
        data = codec.encode(part, np.random.default_rng(0))
        assert data == codec.encode(part.copy(), np.random.default_rng(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 9, 600])
def test_wrong_length_is_refused(name, n):
    codec = parse_codec(name)
    data = codec.encode(normal(n), np.random.default_rng(0))
    for wrong in (b"", data[:-1], data[1:], data + b"\0", data * 2):
        with pytest.raises(ValueError, match=f"{name}: {len(wrong)} bytes? for {n} elements?, not {len(data)}"):
            codec.decode(wrong, n)


NAN, INF, MINUS_ZERO = struct.pack("<f", math.nan), struct.pack("<f", math.inf), struct.pack("<f", -0.0)
SIGNALING = struct.pack("<I", 0x7F800001)
ONE, TWO_127 = struct.pack("<f", 1.0), struct.pack("<f", 2.0**127)
ABOVE_2_127 = struct.pack("<I", 0x7F000001)


@pytest.mark.parametrize(
    ("name", "n", "data", "fault"),
    [
        ("bf16", 2, bytes.fromhex("0000807f"), "not finite"),
        ("bf16", 2, bytes.fromhex("000080ff"), "not finite"),
        ("bf16", 1, bytes.fromhex("817f"), "not finite"),
        ("fp16", 2, bytes.fromhex("007c0000"), "not finite"),
        ("fp16", 1, bytes.fromhex("00fc"), "not finite"),
        ("fp16", 1, bytes.fromhex("017c"), "not finite"),
        ("qsgd8", 2, NAN + b"\0\0", "scale is not in"),
        ("qsgd8", 2, SIGNALING + b"\0\0", "scale is not in"),
        ("qsgd8", 2, INF + b"\0\0", "scale is not in"),
        ("qsgd8", 2, MINUS_ZERO + b"\0\0", "scale is not in"),
        ("qsgd8", 2, struct.pack("<f", -1) + b"\0\0", "scale is not in"),
        ("qsgd8", 2, ABOVE_2_127 + b"\0\0", "scale is not in"),
        ("qsgd8", 513, ONE + NAN + bytes(513), "scale is not in"),
        ("qsgd8", 2, ONE + b"\x7f\x80", "level -128 is not in -127..127"),
        ("topk:1", 2, ONE + NAN + bytes([0, 0, 1, 0]), "not finite"),
        ("topk:1", 2, INF + ONE + bytes([0, 0, 1, 0]), "not finite"),
        ("topk:1", 2, ONE + ONE + bytes([1, 0, 0, 0]), "not strictly ascending in 0..1"),
        ("topk:1", 2, ONE + ONE + bytes([1, 0, 1, 0]), "not strictly ascending in 0..1"),
        ("topk:1", 2, ONE + ONE + bytes([0, 0, 2, 0]), "not strictly ascending in 0..1"),
        ("topk:0.01", 100, ONE + bytes([100, 0]), "not strictly ascending in 0..99"),
        ("topk:0.01", 100, ONE + bytes([255, 255]), "not strictly ascending in 0..99"),
        ("sign", 8, NAN + b"\0", "scale is not in"),
        ("sign", 8, INF + b"\0", "scale is not in"),
        ("sign", 8, MINUS_ZERO + b"\0", "scale is not in"),
        ("sign", 8, struct.pack("<f", -1) + b"\0", "scale is not in"),
        ("sign", 7, ONE + b"\x80", "padding behind element 6 is not 0"),
        ("sign", 9, ONE + b"\0\x02", "padding behind element 8 is not 0"),
    ],
)
def test_malformed_bytes_are_refused_with_what_is_wrong(name, n, data, fault):
    with pytest.raises(ValueError, match=f"^{name}: .*{fault}"):
        parse_codec(name).decode(data, n)


@pytest.mark.parametrize(
    ("name", "n", "data", "values"),
    [
        ("qsgd8", 2, TWO_127 + b"\x7f\x81", [2.0**127, -(2.0**127)]),
        ("topk:1", 2, ONE + ONE + bytes([0, 0, 1, 0]), [1, 1]),
        ("topk:0.01", 100, ONE + bytes([99, 0]), [0] * 99 + [1]),
        ("sign", 7, ONE + b"\x41", [-1, 1, 1, 1, 1, 1, -1]),
        ("sign", 9, ONE + b"\x80\x01", [1, 1, 1, 1, 1, 1, 1, -1, -1]),
        ("sign", 8, struct.pack("<f", 0) + b"\xff", [0] * 8),
    ],
)
def test_bytes_at_the_edge_of_what_is_allowed_are_taken(name, n, data, values):
    assert parse_codec(name).decode(data, n).tolist() == pytest.approx(values, rel=1e-6)


@settings(max_examples=300, deadline=None)
@given(codec=codecs, n=st.integers(1, 1100), data=st.data())
def test_mutated_bytes_give_finite_values_or_a_value_error(codec, n, data):
    raw = bytearray(codec.encode(normal(n, seed=n), np.random.default_rng(0)))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check_decoded_or_refused(codec, bytes(raw), n)


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes_give_finite_values_or_a_value_error(name):
    rng, codec = np.random.default_rng(11), parse_codec(name)
    for _ in range(300):
        n = int(rng.integers(1, 40))
        check_decoded_or_refused(codec, rng.bytes(codec.num_bytes(n) + int(rng.integers(-1, 2))), n)


def check_decoded_or_refused(codec, raw, n):
    try:
        decoded = codec.decode(raw, n)
    except ValueError as refusal:
        return None if str(refusal).startswith(f"{codec.name}: ") else pytest.fail(f"{refusal} names no codec")
    assert (decoded.dtype, decoded.shape) == (np.float32, (n,))
    assert np.isfinite(decoded).all()
