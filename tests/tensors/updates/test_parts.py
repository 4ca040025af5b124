"""An update in several files: what is read, inspected and folded has the bits of the same update in one file."""

import math
import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold import streaming as fold_module
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.rules.coordinate import Median
from atoll.aggregation.rules.geometric import MultiKrum
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.inspection import Merged, inspect
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import in_parts, random_cuts, store
from tests.tensors.blocks import read_block
from tests.tensors.encoded_by_hand import store_encoded

SHAPES = {"w": (9, 14), "v": (3, 4, 5), "b": (5,)}


def arrays_of(rng):
    floats = {name: (10.0 ** rng.uniform(-6, 2, shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return floats | {"steps": np.array(rng.integers(1000), np.int64)}


def cuts_of(rng, arrays):
    return {name: random_cuts(rng, array.shape, depth=int(rng.integers(9))) for name, array in arrays.items()}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(1, 5), st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_reader_gives_any_range_of_parts_as_numpy_slices_it(tmp_path_factory, seed, num_parts, ends):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("parts")
    arrays = arrays_of(rng)
    update = in_parts(store(folder / "u", arrays, cuts=cuts_of(rng, arrays), junk=b"junk"), num_parts, rng)
    for name, array in arrays.items():
        tensor = Tensor(name, "I64" if name == "steps" else "F32", array.shape)
        start, stop = sorted(round(end * array.size) for end in ends)
        for keep_open in (True, False):
            with UpdateReader(update, keep_open=keep_open) as reader:
                assert np.array_equal(reader.read(tensor, start, stop), array.reshape(-1)[start:stop])


@pytest.mark.parametrize("codec", ["bf16", "fp16", "topk:0.1"])
def test_encoded_boxes_may_lie_in_any_part(tmp_path, codec):
    rng = np.random.default_rng(3)
    array = rng.standard_normal((40, 30)).astype(np.float32)
    whole, values = store_encoded(
        tmp_path / "u", {"w": array}, {"w": codec}, cuts={"w": random_cuts(rng, array.shape, depth=6)}
    )
    found = read_block(in_parts(whole, 4, rng), Tensor("w", "F32", array.shape), 7, 1100)
    assert np.array_equal(found, values["w"].reshape(-1)[7:1100])


def test_every_file_is_closed_also_when_one_is_missing(tmp_path):
    update = in_parts(store(tmp_path / "u", arrays_of(np.random.default_rng(1))), 4, np.random.default_rng(1))
    before = os.listdir("/proc/self/fd")
    with UpdateReader(update):
        assert len(os.listdir("/proc/self/fd")) == len(before) + 4
    update.parts[2][0].unlink()
    with pytest.raises(FileNotFoundError), UpdateReader(update):
        pass
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("rule", [None, Median(), MultiKrum(1)], ids=["mean", "median", "krum"])
@pytest.mark.parametrize("files_open", [0, 5, 256])
def test_a_fold_of_parts_has_the_bits_of_one_of_whole_updates(tmp_path, rule, files_open, monkeypatch):
    rng = np.random.default_rng(files_open)
    safetensors_file.write(tmp_path / "base", arrays_of(rng))
    whole, parted = [], []
    for k in range(6):
        arrays = arrays_of(rng)
        whole.append(Weighted(store(tmp_path / f"w{k}", arrays), k + 1))
        cut = store(tmp_path / f"c{k}", arrays, cuts=cuts_of(rng, arrays))
        parted.append(Weighted(cut if k == 2 else in_parts(cut, 1 + k, rng), k + 1))  # one client is a plain one
    monkeypatch.setattr(fold_module, "FILES_OPEN_MAX", files_open)
    step = Step() if rule is None else Step(trained=frozenset(SHAPES), rule=rule)
    for name, updates in (("a", whole), ("b", parted)):
        fold(tmp_path / "base", updates, tmp_path / name, step=step, execution=Execution(2, 17))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(1, 6))
def test_what_was_found_in_parts_is_what_is_found_in_the_whole(tmp_path_factory, seed, num_parts):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("parts")
    arrays = arrays_of(rng)
    whole = store(folder / "u", arrays, cuts=cuts_of(rng, arrays))
    update = in_parts(whole, num_parts, rng)
    found, pieces = [], iter(update.pieces)
    for path, count in update.parts:
        found.append(inspect(path, [next(pieces) for _ in range(count)]))
    expected = inspect(whole.path, whole.pieces)
    merged, reverse = Merged(), Merged()
    for one, other in zip(found, reversed(found), strict=True):
        merged.add(one.magnitudes, one.squared_norms)
        reverse.add(other.magnitudes, other.squared_norms)
    assert merged.magnitudes == reverse.magnitudes == expected.magnitudes
    norms = merged.squared_norms
    assert norms == reverse.squared_norms
    for name, array in arrays.items():
        exact = sum(Fraction(float(value)) ** 2 for value in array.reshape(-1))
        assert math.isclose(norms[name], float(exact), rel_tol=1e-14)
