"""The codecs' effect on numbers: the golden values were computed in float64 from the papers' formulas."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.codecs.quantization import BUCKET_ELEMENTS, stochastic_levels

GOLDEN = np.array([0.9, -0.1, 0.05, -0.4, 0.3, -0.02, 0.7, -0.6], np.float32)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
chunks = arrays.arrays(np.float32, st.integers(1, 1200), elements=st.floats(-60000, 60000, width=32))


def normal(n, *, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def round_trip(name, values, *, seed=0):
    codec = parse_codec(name)
    return codec.decode(codec.encode(values, np.random.default_rng(seed)), values.size)


def squared(values):
    return float(np.square(values, dtype=np.float64).sum())


# ----- bf16 and fp16


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 50), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
@example(np.array([1.00390625, 1.01171875, -1.00390625, 1e-45, -0.0], np.float32))  # ties, both ways
def test_bf16_rounds_as_torch_does(values):
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16)
    data = parse_codec("bf16").encode(values, np.random.default_rng(0))
    assert data == theirs.view(torch.int16).numpy().tobytes()
    assert round_trip("bf16", values).tobytes() == theirs.to(torch.float32).numpy().tobytes()


def test_bf16_rounds_every_kind_of_bits_as_torch_does():
    bits = np.arange(0, 0x7F7F8000, 99_991, dtype=np.uint32)
    ties = np.arange(0x8000, 0x7F7F8000, 1 << 16, dtype=np.uint32)
    for part in (bits[:CHUNK_ELEMENTS], ties):
        for values in (part.view(np.float32), (part | np.uint32(1 << 31)).view(np.float32)):
            theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
            assert round_trip("bf16", values).tobytes() == theirs.tobytes()


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 50), elements=st.floats(-65504, 65504, width=32)))
@example(np.array([2**-24, 2**-25, 3 * 2**-25, 2**-14, 65519.996, 1 + 2**-11, 1 + 3 * 2**-11, -0.0], np.float32))
def test_fp16_rounds_as_torch_does(values):
    theirs = torch.from_numpy(values.copy()).to(torch.float16)
    data = parse_codec("fp16").encode(values, np.random.default_rng(0))
    assert data == theirs.view(torch.int16).numpy().tobytes()
    assert round_trip("fp16", values).tobytes() == theirs.to(torch.float32).numpy().tobytes()


def test_fp16_rounds_every_half_and_every_tie_as_torch_does():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    around = np.concatenate([np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    for values in (halves, ties, around, -ties):
        theirs = torch.from_numpy(values).to(torch.float16).to(torch.float32).numpy()
        assert round_trip("fp16", values).tobytes() == theirs.tobytes()


@settings(deadline=None)
@given(chunks)
def test_half_precision_errors_are_within_half_a_unit(values):
    for name, unit, least in (("bf16", 2**-8, 2**-134), ("fp16", 2**-11, 2**-25)):
        error = np.abs(round_trip(name, values).astype(np.float64) - values)
        assert (error <= np.maximum(unit * np.abs(values.astype(np.float64)), least)).all()


@pytest.mark.parametrize(("name", "bits", "largest"), [("bf16", 0x7F7F7FFF, 0x7F7F0000), ("fp16", 0x477FEFFF, 65504)])
def test_values_that_would_round_to_infinity_are_refused_not_saturated(name, bits, largest):
    last = np.array([bits], np.uint32).view(np.float32)
    first = np.array([bits + 1], np.uint32).view(np.float32)
    expected = np.float32(largest) if name == "fp16" else np.uint32(largest).view(np.float32)
    assert round_trip(name, last)[0] == expected
    assert round_trip(name, -last)[0] == -expected
    for beyond in (first, -first):
        with pytest.raises(ValueError, match=rf"{name}: values in .* are not within"):
            round_trip(name, beyond)


# ----- qsgd8


def test_qsgd_of_the_golden_vector():
    """Floors, probabilities and variance of Alistarh et al. 2017, section 3.1, for s = 4, in float64."""
    norm = np.array([np.linalg.norm(GOLDEN.astype(np.float64))], np.float32)
    rows = np.tile(GOLDEN, (40_000, 1))
    levels = stochastic_levels(rows, np.repeat(norm, 40_000), count=4, rng=np.random.default_rng(0))
    floors = np.array([2, 0, 0, 1, 0, 0, 2, 1])
    up = [0.596116342, 0.288457371, 0.144228686, 0.153829486, 0.865372114, 0.057691474, 0.0192016, 0.730744228]
    assert ((np.sign(levels) == np.sign(GOLDEN)) | (levels == 0)).all()
    assert set(np.unique(np.abs(levels) - floors)) == {0, 1}
    means = (np.abs(levels) - floors).mean(axis=0)
    assert means == pytest.approx(up, abs=5 * 0.5 / math.sqrt(40_000))  # five standard deviations at most
    errors = levels * (norm / 4) - GOLDEN
    assert np.square(errors).sum(axis=1).mean() == pytest.approx(0.130524108, rel=0.01)
    assert norm[0] ** 2 / 16 * sum(p * (1 - p) for p in up) == pytest.approx(0.130524108, rel=1e-6)


@pytest.mark.parametrize("n", [1, 100, BUCKET_ELEMENTS, 700])
def test_qsgd_is_unbiased_with_the_exact_variance(n):
    """The mean error of an element over m draws is normal with sqrt(variance / m): six of those are never passed."""
    values, draws = normal(n, seed=n, scale=1e-3), 4000
    rng, codec = np.random.default_rng(7), parse_codec("qsgd8")
    variance = np.empty(n)
    for begin in range(0, n, BUCKET_ELEMENTS):
        bucket = values[begin : begin + BUCKET_ELEMENTS].astype(np.float64)
        norm = np.linalg.norm(bucket)
        rest = np.modf(127 * np.abs(bucket) / norm)[0]
        variance[begin : begin + BUCKET_ELEMENTS] = (norm / 127) ** 2 * rest * (1 - rest)
        bound = min(bucket.size / 127**2, math.sqrt(bucket.size) / 127) * norm**2
        assert variance[begin : begin + BUCKET_ELEMENTS].sum() <= bound
    total, squares = np.zeros(n), np.zeros(n)
    for _ in range(draws):
        error = codec.decode(codec.encode(values, rng), n).astype(np.float64) - values
        total += error
        squares += error**2
    rounding = 2.0**-22 * np.abs(values) + 2.0**-17 * np.linalg.norm(values) / 127
    assert (np.abs(total / draws) <= 6 * np.sqrt(variance / draws) + rounding).all()
    assert squares.sum() / draws == pytest.approx(variance.sum(), rel=0.03, abs=1e-12)


@pytest.mark.parametrize("value", [0, 1e-9, -(2.0**-24), 0.001, -1 / 3, 0.5, 0.9999999, -1, *GOLDEN.tolist()])
def test_qsgd_is_unbiased_over_every_dither(value):
    """The mean over all 65,536 of them is exact."""

    class Every:
        def integers(self, low, high, size, dtype):
            return np.arange(1 << 16, dtype=np.uint16).view(dtype)

    rows = np.full((1, 1 << 16), value, np.float32)
    levels = stochastic_levels(rows, np.ones(1, np.float32), count=127, rng=Every())
    ratio = 127 * float(rows[0, 0])
    assert abs(levels.mean(dtype=np.float64) - ratio) <= 2.0**-17 + 2.0**-23 * abs(ratio)
    assert set(np.unique(levels)) <= {math.floor(ratio), math.floor(ratio) + 1}


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 600), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_qsgd_norm_is_never_below_a_value(values):
    data = parse_codec("qsgd8").encode(values, np.random.default_rng(0))
    norms = np.frombuffer(data, "<f4", count=-(-values.size // BUCKET_ELEMENTS))
    for norm, begin in zip(norms, range(0, values.size, BUCKET_ELEMENTS), strict=True):
        bucket = values[begin : begin + BUCKET_ELEMENTS]
        assert norm >= np.abs(bucket).max()
        assert norm == pytest.approx(np.linalg.norm(bucket.astype(np.float64)), rel=1e-7, abs=1e-45)


@settings(deadline=None)
@given(chunks)
def test_qsgd_is_within_one_level_of_every_value(values):
    decoded = round_trip("qsgd8", values)
    for begin in range(0, values.size, BUCKET_ELEMENTS):
        bucket = values[begin : begin + BUCKET_ELEMENTS].astype(np.float64)
        norm = np.linalg.norm(bucket)
        error = np.abs(decoded[begin : begin + BUCKET_ELEMENTS] - bucket)
        assert (error <= norm / 127 * (1 + 1e-5) + 127 * 1.5e-45).all()  # a level of subnormal size is no float32
        assert (decoded[begin : begin + BUCKET_ELEMENTS][bucket == 0] == 0).all()


@pytest.mark.parametrize("value", [1e-45, -1e-45, 1.1754944e-38, 1e-30, 3.0, 1e19, 1e38, -(2.0**127)])
@pytest.mark.parametrize("position", [0, 511, 512, 599])
def test_qsgd_gives_back_a_lonely_value_of_any_magnitude(value, position):
    values = np.zeros(600, np.float32)
    values[position] = value
    decoded = round_trip("qsgd8", values)
    assert decoded[position] == pytest.approx(float(values[position]), rel=1e-6, abs=127 * 1.5e-45)
    assert np.flatnonzero(np.delete(decoded, position)).size == 0


@pytest.mark.parametrize(("word", "expected"), [(0, [127, -127, 89, -90, 0]), (-1, [127, -127, 90, -89, 0])])
def test_qsgd_levels_never_leave_their_range(word, expected):
    """The fixed point is at its edges for |v| = N, with the least and the greatest dither."""

    class Fixed:
        def integers(self, low, high, size, dtype):
            assert (low, high, dtype) == (0, 1 << 64, np.uint64)
            return np.full(size, word % high, dtype)

    rows = np.zeros((4, BUCKET_ELEMENTS), np.float32)
    rows[0, 0], rows[1, 0], rows[2, :2] = 1, -1, (0.5, -0.5)
    norms = np.array([1, 1, np.sqrt(0.5), 0], np.float32)
    levels = stochastic_levels(rows, norms, count=127, rng=Fixed())
    assert [*levels[:2, 0], *levels[2, :2], levels[3, 0]] == expected
    assert np.count_nonzero(levels) == 4


def test_qsgd_refuses_a_norm_that_float32_could_not_undo():
    with pytest.raises(ValueError, match=r"norm 2\.4.* of a bucket is above"):
        round_trip("qsgd8", np.full(2, 1.7e38, np.float32))


# ----- topk


def test_top_k_of_the_golden_vector():
    decoded = round_trip("topk:0.25", GOLDEN)
    assert np.flatnonzero(decoded).tolist() == [0, 6]
    assert decoded[[0, 6]].tolist() == GOLDEN[[0, 6]].tolist()
    assert squared(GOLDEN - decoded) / squared(GOLDEN) == pytest.approx(0.323937802, rel=1e-6)


@settings(deadline=None)
@given(
    values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([0.0, -0.0, 1, -1, 2, -2, 0.5])),
    millionths=st.integers(1, 10**6),
)
def test_top_k_keeps_what_a_stable_sort_would(values, millionths):
    name = f"topk:{millionths / 1e6:.6f}"
    kept = sorted(np.argsort(-np.abs(values), kind="stable")[: parse_codec(name).num_kept(values.size)].tolist())
    expected = np.zeros_like(values)
    expected[kept] = values[kept]
    data = parse_codec(name).encode(values, np.random.default_rng(0))
    assert np.frombuffer(data, "<u2", offset=4 * len(kept)).tolist() == kept
    assert round_trip(name, values).tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["normal", "hidden", "few", "equal", "ascending"])
@pytest.mark.parametrize("name", ["topk:0.000001", "topk:0.001", "topk:0.01", "topk:0.3", "topk:0.99"])
def test_top_k_of_a_full_chunk_keeps_what_a_stable_sort_would(name, kind):
    """The result holds for any sample of the chunk: of the hidden elements it sees none, or sees them alone."""
    values = normal(CHUNK_ELEMENTS)
    if kind == "hidden":
        values[::16] *= 100 if name == "topk:0.01" else 0
    if kind == "few":
        values[values > -3] = 0
    if kind == "equal":
        values = np.sign(values)
    if kind == "ascending":
        values = np.sort(values)
    kept = np.argsort(-np.abs(values), kind="stable")[: parse_codec(name).num_kept(values.size)]
    expected = np.zeros_like(values)
    expected[kept] = values[kept]
    assert round_trip(name, values).tobytes() == expected.tobytes()


@settings(deadline=None)
@given(values=chunks, millionths=st.integers(1, 10**6))
def test_top_k_is_a_contraction(values, millionths):
    codec = parse_codec(f"topk:{millionths / 1e6:.6f}")
    left = squared(values - round_trip(codec.name, values))
    assert left <= (1 - codec.num_kept(values.size) / values.size) * squared(values) * (1 + 1e-12)


@settings(deadline=None)
@given(arrays.arrays(np.float32, st.integers(1, 300), elements=finite))
def test_top_k_of_everything_is_the_identity(values):
    assert round_trip("topk:1", values).tobytes() == values.tobytes()


# ----- sign


def test_sign_of_the_golden_vector():
    decoded = round_trip("sign", GOLDEN)
    assert np.abs(decoded) == pytest.approx(np.full(8, 0.38375), rel=1e-6)
    assert (np.sign(decoded) == np.sign(GOLDEN)).all()
    assert squared(GOLDEN - decoded) / squared(GOLDEN) == pytest.approx(1 - 0.612674868, rel=1e-6)
    data = parse_codec("sign").encode(GOLDEN, np.random.default_rng(0))
    assert data == struct.pack("<f", 0.38375) + bytes([0b10101010])


def test_sign_of_zero_is_plus():
    assert round_trip("sign", np.array([0.0, -0.0, -3], np.float32)).tolist() == [1, 1, -1]


@settings(deadline=None)
@given(chunks)
def test_sign_contracts_by_exactly_its_density(values):
    decoded = round_trip("sign", values)
    norm1, norm2 = float(np.abs(values).sum(dtype=np.float64)), squared(values)
    assert squared(values.astype(np.float64) - decoded) == pytest.approx(
        norm2 - norm1**2 / values.size, rel=1e-5, abs=1e-6 * norm2 + 1e-60
    )
    assert ((decoded < 0) == (values < 0)).all() or norm1 == 0 or np.float32(norm1 / values.size) == 0
