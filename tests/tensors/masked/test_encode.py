"""Encoding file to file: against numpy and Python's integers; whole updates and the boxes of a mesh."""

import math
import random
import re
import tracemalloc
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.masked.encode import BoxEncoder, NotFinite, encode_update, exact_words, measured, merged
from atoll.tensors.secure.exact import decode_exact
from atoll.tensors.secure.plan import Vector
from atoll.tensors.secure.vector import decode, step_of
from tests.tensors.masked.members import LAYOUT, METRICS, meshes, plan_of, stored, update_of

KEY = bytes(range(32))


def encoded(tmp_path, update, plan, layout=LAYOUT, rounding=KEY, name="u"):
    """Return the result of an encoding and the words that it has written, signed."""
    done = encode_update(
        stored(tmp_path / name, update), tmp_path / "words", layout=layout, plan=plan, rounding=rounding
    )
    return done, safetensors_file.read(tmp_path / "words")


def exact_of(words, plan, layout=LAYOUT, members=1):
    return decode_exact(words["secure/exact"].view(np.uint64), Vector(layout, plan).exact, members)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("size", [0.01, 3.0])
def test_words_stand_for_the_clipped_and_weighted_update(tmp_path, bits, size):
    update, plan = update_of(LAYOUT, 1, size), plan_of(LAYOUT, bits)
    done, words = encoded(tmp_path, update, plan)
    floats = [update[t.name].astype(np.float64) for t in LAYOUT if t.dtype == "F32"]
    norm = math.sqrt(sum(float((each**2).sum()) for each in floats))
    assert done.norm == pytest.approx(norm, rel=1e-14)
    factor = 0.4 * min(1.0, 1.0 / norm)
    for tensor in LAYOUT:
        if tensor.dtype == "F32":
            found = decode(words[tensor.name], bits, 1.0)
            assert np.abs(found - factor * update[tensor.name].astype(np.float64)).max(initial=0) <= step_of(
                bits, 1.0
            ) * (1 + 1e-9)
    sums = exact_of(words, plan)
    assert (sums.members, sums.weight, sums.within) == (1, round(Fraction(2, 5) * 2**52), int(norm <= 1))
    assert sums.statistics == {"loss": (1.5, 40.0), "accuracy": (31.0, 40.0)}
    assert {name: [int(n) for n in array] for name, array in sums.integers.items()} == {
        name: [sums.weight * int(n) for n in update[name].reshape(-1)] for name in ("steps", "small")
    }
    assert [piece.tensor for piece in done.pieces] == [
        *(["secure/exact"] if bits == 32 else []),
        "a.w",
        "b",
        "empty",
        "scale",
        *(["secure/exact"] if bits == 64 else []),
    ]


def test_the_update_is_clipped_and_not_the_weights(tmp_path):
    """Truxify#3844: the norm is of local - global, over all float tensors together; integers have none."""
    update = {t.name: np.zeros(t.shape, np.float32 if t.dtype == "F32" else np.int64) for t in LAYOUT}
    update["a.w"][0, 0], update["b"][1], update["steps"] = 3.0, 4.0, np.array(10**6)
    done, words = encoded(tmp_path, update, plan_of(LAYOUT, 64, num_examples=100))
    assert done.norm == 5.0
    assert decode(words["a.w"], 64, 1.0)[0, 0] == pytest.approx(0.6, abs=1e-12)
    assert decode(words["b"], 64, 1.0)[1] == pytest.approx(0.8, abs=1e-12)


def test_a_zero_update_is_a_member_like_any_other(tmp_path):
    """flower#7631: no division by a norm of zero."""
    update = {t.name: np.zeros(t.shape, np.float32 if t.dtype == "F32" else np.int64) for t in LAYOUT}
    plan = plan_of(LAYOUT)
    done, words = encoded(tmp_path, update, plan)
    assert done.norm == 0
    assert not any(words[name].any() for name in ("a.w", "b", "scale"))
    sums = exact_of(words, plan)
    assert (sums.within, sums.cut, sums.small) == (1, (0,) * 4, (0,) * 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails_before_anything_is_written(tmp_path, value):
    update = update_of(LAYOUT, 1)
    update["b"][2] = value
    with pytest.raises(NotFinite, match="NaN or infinite values in b"):
        encoded(tmp_path, update, plan_of(LAYOUT))
    assert [path.name for path in tmp_path.iterdir()] == ["u"]


def test_dishonest_move_55_a_value_that_is_not_finite_fails_at_its_site_wherever_it_is(tmp_path):
    for seed in range(20):
        draw, folder = random.Random(f"nan {seed}"), tmp_path / str(seed)
        folder.mkdir()
        update = update_of(LAYOUT, seed)
        name = draw.choice([t.name for t in LAYOUT if t.dtype == "F32" and math.prod(t.shape)])
        update[name].reshape(-1)[draw.randrange(update[name].size)] = draw.choice([math.nan, math.inf, -math.inf])
        with pytest.raises(NotFinite, match=f"NaN or infinite values in {re.escape(name)}"):
            encoded(folder, update, plan_of(LAYOUT, draw.choice([32, 64])))
        assert [path.name for path in folder.iterdir()] == ["u"]


def test_another_layout_is_refused(tmp_path):
    update = update_of(LAYOUT, 1)
    missing = {name: array for name, array in update.items() if name != "b"}
    for wrong, words in (
        (missing, "'b' is missing"),
        ({**update, "b": np.zeros(6, np.float32)}, r"'b' is F32 \(6,\)"),
        ({**update, "b": np.zeros(5, np.int64)}, "'b' is I64"),
        ({**update, "c": np.zeros(6, np.float32)}, "'c' is not one of the 6"),
    ):
        with pytest.raises(ValueError, match=words):
            encoded(tmp_path, wrong, plan_of(LAYOUT))
    with pytest.raises(ValueError, match="3 ranges for 4 float tensors"):
        encoded(tmp_path, update, plan_of(LAYOUT, exponents=(0, 0, 0)))
    beside = (*LAYOUT, Tensor("control/b", "F32", (5,)))
    with pytest.raises(ValueError, match="control/b: a secure sum takes the tensors of the model alone"):
        encoded(tmp_path, update, plan_of(beside), beside)


def test_fills_are_counted_by_tensor(tmp_path):
    update = {**update_of(LAYOUT, 1, 1e-3), "scale": np.float32(0.5), "b": np.full(5, 0.001, np.float32)}
    update["a.w"][:] = 0
    plan = plan_of(LAYOUT, num_examples=100, exponents=(-3, 0, -1, -3))
    _, words = encoded(tmp_path, update, plan)  # of a.w, b, empty, scale
    sums = exact_of(words, plan)
    assert (sums.cut, sums.small) == ((0, 0, 0, 1), (0, 1, 0, 0))
    assert decode(words["scale"], 32, 2.0**-3) == 2.0**-3


def test_metrics_that_the_terms_do_not_have_are_left_out_and_said(tmp_path):
    statistics = {"loss": (1.0, 2.0, 3.0), "auc": (1.0,), "accuracy": (2.0**37, 1.0)}
    plan = plan_of(LAYOUT, statistics=statistics)
    done, words = encoded(tmp_path, update_of(LAYOUT, 1), plan)
    assert exact_of(words, plan).statistics == {}
    assert sorted(done.left_out) == [
        "metric 'accuracy' has a sum that is not within 6.87195e+10",
        "metric 'auc' is not in the terms of the sum",
        "metric 'loss' has 3 sums, and the terms have 2",
    ]
    one = plan_of(LAYOUT, statistics={"loss": (-0.5, 3.0)})
    assert exact_of(encoded(tmp_path, update_of(LAYOUT, 1), one)[1], one).having == {"loss": 1}


def test_rounding_is_secret_and_new_at_each_encoding(tmp_path):
    update, plan = update_of(LAYOUT, 1, 0.01), plan_of(LAYOUT)
    first, second = (encoded(tmp_path, update, plan, rounding=None)[1]["a.w"] for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.abs(first - second).max() <= 1
    assert np.array_equal(
        encoded(tmp_path, update, plan)[1]["a.w"], encoded(tmp_path, update, plan, name="again")[1]["a.w"]
    )


@given(meshes(), st.sampled_from([32, 64]), st.integers(0, 2**32 - 1), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_the_boxes_of_a_mesh_have_the_words_of_one_process(tmp_path_factory, mesh, bits, seed, block):
    shape, boxes = mesh
    layout = (Tensor("n", "I64", (2,)), Tensor("w", "F32", shape), Tensor("z", "F32", (3,)))
    update, plan = update_of(layout, seed, 0.3), plan_of(layout, bits, metrics=METRICS)
    folder = tmp_path_factory.mktemp("mesh")
    done, words = encoded(folder, update, plan, layout)
    vector, joined = Vector(layout, plan), np.zeros(shape, words["w"].dtype)
    slices = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in boxes]
    ranks = [measured(iter([("w", update["w"][each])])) for each in slices]
    found = merged([*ranks, measured(iter([("z", update["z"])]))])
    assert found.norm == pytest.approx(done.norm, rel=1e-14)
    factor = plan.factor(plan.weight, done.norm, vector.num_values)
    for (offsets, lengths), at in zip(boxes, slices, strict=True):
        flat = update["w"][at].reshape(-1)
        encoder = BoxEncoder(vector, plan, Piece("w", "F32", offsets, lengths, ""), factor, KEY)
        cuts = [*range(0, flat.size, block), flat.size]
        parts = [encoder.words(flat[start:stop], start) for start, stop in pairwise(cuts)]
        joined[at] = np.concatenate(parts).reshape(lengths)
    assert np.array_equal(joined, words["w"])
    integers = {"n": update["n"]}
    exact = exact_words(vector, plan, found._replace(squares=done.norm**2), integers)
    assert np.array_equal(exact, words["secure/exact"])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for size in (1_000_000, 5_000_000):
        layout = (Tensor("w", "F32", (size,)),)
        update, plan = stored(tmp_path / "u", {"w": np.full(size, 1e-4, np.float32)}), plan_of(layout)
        tracemalloc.start()
        encode_update(update, tmp_path / "words", layout=layout, plan=plan)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] < 30_000_000
