import dataclasses
import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold import streaming as fold_module
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.kernel import add_within_for
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.fold.weights import Share, integer_weights
from atoll.tensors import safetensors_file
from atoll.tensors.coverage import check_cover
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.inspection import inspect
from atoll.tensors.updates.reader import StoredUpdate
from tests.aggregation.models import float64_twin, fold_in, integer_twin, random_cuts, store

SHAPES = {"conv": (4, 3, 5), "bias": (7,), "scale": (), "table": (50, 3)}


def f32(*values):
    return np.array(values, np.float32)


def model(rng, scale=1.0):
    arrays = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return arrays | {"steps": rng.integers(0, 1000, (), dtype=np.int64), "codes": rng.integers(-9, 9, 5, dtype=np.int8)}


def cohort(rng, num_updates):
    """Updates over 24 orders of magnitude, some without a tensor, with weights from 1 to 2^40 or fractions of such."""
    claims = [2 ** rng.uniform(0, 40) for _ in range(num_updates)]
    weights = [int(claim) for claim in claims] if rng.random() < 0.5 else integer_weights(list(map(Share, claims)))
    updates = []
    for weight in weights:
        arrays = model(rng, 10.0 ** rng.integers(-12, 12))
        for name in [name for name in SHAPES if rng.random() < 0.2]:
            del arrays[name]
        updates.append((arrays, weight))
    return updates


def bits(arrays):
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_updates=st.integers(1, 9))
def test_fold_gives_the_same_bits_in_any_order(tmp_path_factory, seed, num_updates):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("order")
    base, updates = model(rng), cohort(rng, num_updates)
    expected = bits(fold_in(folder, base, updates))
    shuffled = [updates[k] for k in rng.permutation(num_updates)]
    assert bits(fold_in(folder, base, shuffled)) == expected


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tile=st.integers(1, 70),
    threads=st.integers(1, 3),
    files_open=st.integers(0, 4),
)
def test_fold_gives_the_same_bits_for_any_tiles_threads_and_boxes(tmp_path_factory, seed, tile, threads, files_open):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("cuts")
    base, updates = model(rng), cohort(rng, 4)
    expected = bits(fold_in(folder, base, updates))
    weighted = []
    for k, (arrays, weight) in enumerate(updates):
        cuts = {name: random_cuts(rng, array.shape, depth=int(rng.integers(9))) for name, array in arrays.items()}
        update = store(folder / f"cut{k}", arrays, cuts=cuts, junk=bytes(k))
        layout = [Tensor(name, tensorfile_dtype(array), array.shape) for name, array in arrays.items()]
        assert check_cover(tuple(layout), update.pieces) == []
        weighted.append(Weighted(update, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_module, "FILES_OPEN_MAX", files_open)
        fold(folder / "base", weighted, folder / "cut", execution=Execution(threads, tile))
    assert bits(safetensors_file.read(folder / "cut")) == expected


def tensorfile_dtype(array):
    return {"f": "F32", "i": f"I{8 * array.itemsize}"}[array.dtype.kind]


@pytest.mark.parametrize("num_updates", [1, 3, 40])
def test_fold_is_within_1e_6_of_the_float64_mean_from_1e_minus_6_to_1e_2(tmp_path, num_updates):
    rng = np.random.default_rng(num_updates)
    scales = {f"t{exponent}": 10.0**exponent for exponent in range(-6, 3)}
    zeros = {name: np.zeros((30, 40), np.float32) for name in scales}
    updates = [
        ({name: (s * rng.standard_normal((30, 40))).astype(np.float32) for name, s in scales.items()}, int(weight))
        for weight in rng.integers(1, 1 << 30, num_updates)
    ]
    new = fold_in(tmp_path, zeros, updates)
    for name in scales:
        twin = float64_twin(zeros, updates, name)
        assert np.linalg.norm(new[name] - twin) <= 1e-6 * np.linalg.norm(twin)
        assert np.linalg.norm(twin) > 0


def test_mixed_magnitudes_fold_to_the_correctly_rounded_mean_of_fsum(tmp_path):
    rng = np.random.default_rng(5)
    updates = [({"w": (10.0 ** rng.uniform(-6, 2, 300)).astype(np.float32)}, int(w)) for w in rng.integers(1, 99, 20)]
    new = fold_in(tmp_path, {"w": np.zeros(300, np.float32)}, updates)["w"]
    total = sum(weight for _, weight in updates)
    exact = [math.fsum(w * float(arrays["w"][i]) for arrays, w in updates) / total for i in range(300)]
    assert np.array_equal(new, np.array(exact).astype(np.float32))


def test_fold_adds_local_minus_global_to_the_global_model(tmp_path):
    base = {"w": f32(1, 2, 3)}
    new = fold_in(tmp_path, base, [({"w": f32(1, 0, -1)}, 1), ({"w": f32(4, 0, 2)}, 2)])
    assert new["w"].tolist() == [4, 2, 4]


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    weights=st.lists(st.integers(1, 1 << 53), min_size=1, max_size=6),
)
def test_fold_of_equal_updates_is_that_update_to_within_the_grid(tmp_path_factory, values, weights):
    folder = tmp_path_factory.getbasetemp()
    update = {"w": np.array(values, np.float32)}
    zeros = {"w": np.zeros(len(values), np.float32)}
    new = fold_in(folder, zeros, [(update, weight) for weight in weights])["w"].astype(np.float64)
    grid = (len(weights) + 1) * np.abs(update["w"]).max().astype(np.float64) * 2.0**-52
    exact = update["w"].astype(np.float64)
    half_an_ulp = np.maximum(np.abs(exact) * 2.0**-24, np.finfo(np.float32).smallest_subnormal)
    assert np.all(np.abs(new - exact) <= grid + half_an_ulp)


@given(power=st.integers(-60, 60))
@settings(max_examples=20, deadline=None)
def test_fold_scales_with_its_updates_exactly_by_powers_of_two(tmp_path_factory, power):
    folder = tmp_path_factory.getbasetemp()
    rng = np.random.default_rng(3)
    updates = [({"w": rng.standard_normal(40).astype(np.float32)}, k + 1) for k in range(5)]
    scaled = [({"w": np.ldexp(arrays["w"], power)}, weight) for arrays, weight in updates]
    zeros = {"w": np.zeros(40, np.float32)}
    assert np.array_equal(fold_in(folder, zeros, scaled)["w"], np.ldexp(fold_in(folder, zeros, updates)["w"], power))


def test_fold_neither_overflows_nor_underflows_at_the_ends_of_float32(tmp_path):
    largest, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    base = {"huge": f32(0, -largest), "tiny": f32(0, 0), "none": f32(0, 5)}
    update = {"huge": f32(largest, largest), "tiny": f32(least, -3 * least), "none": f32(0, 0)}
    for weights in ((1,), (1 << 53,) * 17, (1, 1 << 53)):
        new = fold_in(tmp_path, base, [(update, weight) for weight in weights])
        assert new["huge"].tolist() == [largest, 0]
        assert new["tiny"].tolist() == [least, -3 * least]
        assert new["none"].tolist() == [0, 5]


def test_fold_divides_by_the_weight_of_those_that_carry_the_tensor(tmp_path):
    base = {"both": f32(0), "one": f32(0), "none": f32(-0.0, np.pi), "kept": np.array([3], np.int16)}
    updates = [({"both": f32(2), "one": f32(2)}, 3), ({"both": f32(6)}, 1)]
    new = fold_in(tmp_path, base, updates)
    assert (new["both"].item(), new["one"].item()) == (3, 2)
    assert bits({"none": new["none"], "kept": new["kept"]}) == bits({"none": base["none"], "kept": base["kept"]})


@settings(max_examples=40, deadline=None)
@given(
    terms=st.lists(st.tuples(st.integers(-(1 << 62), 1 << 62), st.integers(1, 1 << 53)), min_size=1, max_size=6),
    base=st.integers(-(1 << 40), 1 << 40),
)
def test_fold_of_integers_is_the_rounded_rational_mean(tmp_path_factory, terms, base):
    folder = tmp_path_factory.getbasetemp()
    updates = [({"n": np.array([u, u // 2], np.int64), "t": np.array(u % 50, np.int32)}, w) for u, w in terms]
    bases = {"n": np.array([base, -base], np.int64), "t": np.array(7, np.int32)}
    new = fold_in(folder, bases, updates)
    weights = [w for _, w in terms]
    assert new["n"].tolist() == [
        integer_twin(base, [u for u, _ in terms], weights),
        integer_twin(-base, [u // 2 for u, _ in terms], weights),
    ]
    assert (new["t"].item(), new["t"].dtype) == (integer_twin(7, [u % 50 for u, _ in terms], weights), np.int32)


def test_fold_takes_float16_and_bfloat16_updates_into_float32_masters(tmp_path):
    base = {"w": f32(1, 1)}
    bfloat16 = {"w": np.array([0x3F80, 0xC000], np.uint16)}
    new = fold_in(tmp_path, base, [(bfloat16, 1), ({"w": np.array([3, 2], np.float16)}, 1), ({"w": f32(2, 3)}, 1)])
    assert new["w"].tolist() == [3, 2]


def test_fold_returns_the_manifest_of_a_sound_file_that_keeps_the_metadata(tmp_path):
    rng = np.random.default_rng(0)
    base = model(rng) | {"empty": np.zeros((0, 3), np.float32)}
    safetensors_file.write(tmp_path / "base", base, metadata={"format": "pt"})
    update = store(tmp_path / "u", model(rng) | {"empty": np.zeros((0, 3), np.float32)})
    pieces = fold(tmp_path / "base", [Weighted(update, 2)], tmp_path / "out").pieces
    layout, data_start = safetensors_file.parse_header(tmp_path / "out")
    assert check_cover(layout, pieces) == []
    assert [piece.tensor for piece in pieces] == [tensor.name for tensor in layout]
    assert inspect(tmp_path / "out", pieces, data_start=data_start).is_sound
    assert safetensors_file.read_metadata(tmp_path / "out") == {"format": "pt"}
    assert sorted(os.listdir(tmp_path)) == ["base", "out", "u"]


def test_fold_reads_a_base_whose_tensors_are_not_in_canonical_order(tmp_path):
    header = (
        b'{"b":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    raw = len(header).to_bytes(8, "little") + header + bytes([1, 2, 3, 4]) + f32(0.5).tobytes()
    (tmp_path / "base").write_bytes(raw)
    fold(tmp_path / "base", [Weighted(store(tmp_path / "u", {"a": f32(1)}), 1)], tmp_path / "out")
    new = safetensors_file.read(tmp_path / "out")
    assert (new["a"].tolist(), new["b"].tolist()) == ([1.5], [1, 2, 3, 4])


def test_fold_calls_between_before_each_tile_and_leaves_nothing_when_it_raises(tmp_path):
    calls = []

    def stop_at_the_third():
        calls.append(None)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fold_in(
            tmp_path, {"w": f32(*range(10))}, [({"w": f32(*range(10))}, 1)], tile_elements=2, between=stop_at_the_third
        )
    assert sorted(os.listdir(tmp_path)) == ["base", "u0"]
    calls.extend([None] * 10)
    fold_in(tmp_path, {"w": f32(*range(10))}, [({"w": f32(*range(10))}, 1)], tile_elements=2, between=stop_at_the_third)
    assert len(calls) == 13 + 5


def test_fold_memory_grows_neither_with_the_model_nor_with_the_cohort(tmp_path):
    block = 1 << 12
    values = np.ones(64 * block, np.float32)
    safetensors_file.write(tmp_path / "base", {"w": values})
    update = store(tmp_path / "u", {"w": values})
    add_within_for(50 * values.size)(np.zeros(1), f32(1), np.float64(1), 1.0)  # the compiler's memory is not the fold's
    tracemalloc.start()
    try:
        fold(tmp_path / "base", [Weighted(update, 1)] * 50, tmp_path / "out", execution=Execution(1, block))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.all(safetensors_file.read(tmp_path / "out")["w"] == 2)
    assert peak < 16 * block * 4 < values.nbytes / 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.0, -3.0])
def test_fold_names_update_and_tensor_when_a_value_is_beyond_its_recorded_magnitude(tmp_path, bad):
    safetensors_file.write(tmp_path / "base", {"w": f32(0, 0)})
    good = store(tmp_path / "good", {"w": f32(1, 2)})
    broken = dataclasses.replace(store(tmp_path / "broken", {"w": f32(bad, 1)}), magnitudes={"w": 2.0})
    with pytest.raises(ValueError, match=r"broken: tensor 'w' has values in .*beyond its recorded magnitude 2\.0"):
        fold(tmp_path / "base", [Weighted(good, 1), Weighted(broken, 1)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("base", "update", "fault"),
    [
        ({"w": f32(3e38)}, {"w": f32(3e38)}, r"tensor 'w': new values in 6\.0.* leave float32"),
        ({"w": f32(np.nan)}, {"w": f32(1)}, "tensor 'w': new values in nan"),
        ({"n": np.array([127], np.int8)}, {"n": np.array([1], np.int8)}, "tensor 'n': value 128 is not in -128..127"),
        ({"w": np.zeros(1, np.float16)}, {"w": f32(1)}, "tensor 'w' is F16, masters are F32"),
        ({"w": f32(0)}, {"x": f32(1)}, "F32 'x', the base has no such tensor"),
        ({"w": f32(0)}, {"w": np.array([1])}, "I64 'w', the base has F32"),
        ({"w": np.array([1])}, {"w": np.array([1], np.int32)}, "I32 'w', the base has I64"),
        ({"w": np.array([1])}, {"w": f32(1)}, "F32 'w', the base has I64"),
    ],
)
def test_fold_refuses_values_and_tensors_that_do_not_fit(tmp_path, base, update, fault):
    with pytest.raises(ValueError, match=fault):
        fold_in(tmp_path, base, [(update, 1)])
    assert sorted(os.listdir(tmp_path)) == ["base", "u0"]


@pytest.mark.parametrize("weight", [0, -1, (1 << 53) + 1])
def test_fold_refuses_weights_out_of_range(tmp_path, weight):
    with pytest.raises(ValueError, match=f"u0: weight {weight} is no integer >= 1"):
        fold_in(tmp_path, {"w": f32(0)}, [({"w": f32(1)}, weight)])


def test_fold_refuses_an_empty_cohort_and_an_update_without_magnitudes(tmp_path):
    with pytest.raises(ValueError, match="no updates to fold"):
        fold_in(tmp_path, {"w": f32(0)}, [])
    update = store(tmp_path / "u", {"w": f32(1)})
    with pytest.raises(ValueError, match="'w' has no recorded magnitude"):
        fold(tmp_path / "base", [Weighted(StoredUpdate(update.path, update.pieces), 1)], tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "wider", "base", "terms", "expected"),
    [
        (np.uint8, np.int16, [1, 255, 10], [([-1, -255, 245], 3), ([-1, 0, -10], 1)], [0, 64, 191]),
        (np.int8, np.int16, [127, -128, 0], [([-255, 255, 0], 1), ([0, 0, 0], 1)], [-1, 0, 0]),
        (np.int16, np.int32, [32767, 0, 0], [([-65535, 1, 0], 1)], [-32768, 1, 0]),
    ],
)
def test_fold_takes_differences_in_the_next_wider_dtype_into_narrow_integers(
    tmp_path, dtype, wider, base, terms, expected
):
    updates = [({"n": np.array(values, wider)}, weight) for values, weight in terms]
    new = fold_in(tmp_path, {"n": np.array(base, dtype)}, updates)
    assert (new["n"].dtype, new["n"].tolist()) == (dtype, expected)
