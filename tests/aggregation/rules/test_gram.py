import os
import subprocess
import sys
import tracemalloc
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.rules import gram as gram_module
from atoll.aggregation.rules.gram import gram_matrix
from atoll.tensors.layout import Tensor, in_order
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import random_cuts, store, widened

SHAPES = {"conv": (4, 3, 5), "bias": (7,), "scale": (), "table": (50, 3), "none": (0, 2)}
LAYOUT = in_order([Tensor(name, "F32", shape) for name, shape in SHAPES.items()] + [Tensor("steps", "I64", ())])


def cohort(rng, num_updates, dtype=np.float32):
    return [
        {name: np.asarray(rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}
        | {"steps": np.array(rng.integers(1 << 40))}
        for _ in range(num_updates)
    ]


def stored(folder, updates, rng=None):
    """Files, cut into random boxes when there is a generator."""
    for k, arrays in enumerate(updates):
        cuts = rng and {name: random_cuts(rng, array.shape, depth=5) for name, array in arrays.items() if array.size}
        yield f"u{k}", store(folder / f"u{k}", arrays, cuts=cuts)


def gram_of(files, layout=LAYOUT, **options):
    with ExitStack() as stack:
        readers = {name: stack.enter_context(UpdateReader(update)) for name, update in files}
        return gram_matrix(layout, readers, **options)


def flat(arrays):
    return np.concatenate([widened(arrays[name]).reshape(-1).astype(np.float64) for name in SHAPES])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("num_updates", [1, 2, 9])
def test_gram_is_the_product_of_all_float_tensors_of_all_pairs(tmp_path, dtype, num_updates):
    rng = np.random.default_rng(num_updates)
    updates = cohort(rng, num_updates, dtype)
    rows = np.array([flat(arrays) for arrays in updates])
    gram = gram_of(stored(tmp_path, updates, rng))
    np.testing.assert_allclose(gram, rows @ rows.T, rtol=1e-13, atol=1e-13)
    assert np.array_equal(gram, gram.T)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), threads=st.integers(2, 4), values=st.integers(1, 300))
def test_gram_has_the_same_bits_for_any_threads_and_boxes(tmp_path_factory, seed, threads, values):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.getbasetemp()
    updates = cohort(rng, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_module, "TILE_VALUES", values)
        expected = gram_of(stored(folder, updates))
        assert np.array_equal(gram_of(stored(folder, updates, rng), threads=threads), expected)
    rows = np.array([flat(arrays) for arrays in updates])
    np.testing.assert_allclose(expected, rows @ rows.T, rtol=1e-12, atol=1e-12)


@pytest.mark.real
def test_gram_has_the_same_bits_whatever_threads_the_matrix_library_takes():
    script = (
        "import numpy as np; from atoll.aggregation.rules.gram import gram_matrix\n"
        "from atoll.tensors.layout import Tensor\n"
        "class Noise:\n"
        "    def __init__(self, seed): self.values = np.random.default_rng(seed).standard_normal(70001, np.float32)\n"
        "    def carries(self, tensor): return True\n"
        "    def read(self, tensor, start, stop): return self.values[start:stop]\n"
        "print(gram_matrix((Tensor('w', 'F32', (70001,)),), {str(k): Noise(k) for k in range(37)}).tobytes().hex())"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "OPENBLAS_NUM_THREADS": str(number)},
            capture_output=True,
            check=True,
        ).stdout
        for number in (1, 2, 3)
    ]
    assert printed[0] == printed[1] == printed[2]


def test_gram_adds_the_tiles_in_their_order_and_holds_few_of_them(tmp_path):
    values = np.random.default_rng(3).standard_normal(1 << 19).astype(np.float32)
    files = [(f"u{k}", store(tmp_path / f"u{k}", {"w": k * values})) for k in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_module, "TILE_VALUES", 1 << 14)
        tracemalloc.start()
        try:
            gram = gram_of(files, (Tensor("w", "F32", values.shape),), threads=2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    tiles = values.astype(np.float64).reshape(-1, 1 << 12)
    assert gram[1, 1] == pytest.approx(sum(float(tile @ tile) for tile in tiles), rel=1e-14)
    assert peak < 1 << 20 < values.nbytes


def test_gram_names_the_update_and_the_tensor_that_it_leaves_out(tmp_path):
    updates = cohort(np.random.default_rng(0), 3)
    del updates[1]["table"]
    with pytest.raises(ValueError, match="update u1: tensor 'table' is left out"):
        gram_of(stored(tmp_path, updates))


def test_gram_does_not_ask_for_integer_tensors(tmp_path):
    updates = cohort(np.random.default_rng(0), 2)
    expected = gram_of(stored(tmp_path, updates))
    del updates[1]["steps"]
    assert np.array_equal(gram_of(stored(tmp_path, updates)), expected)


def test_gram_of_the_largest_float32_is_finite(tmp_path):
    huge = np.full(1000, np.finfo(np.float32).max)
    gram = gram_of(
        [(f"u{k}", store(tmp_path / f"u{k}", {"w": huge})) for k in range(2)], (Tensor("w", "F32", (1000,)),)
    )
    assert gram[0, 1] == pytest.approx(1000 * float(huge[0]) ** 2)
