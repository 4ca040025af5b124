"""`fold_rows` is held against `fold`, whose own oracles are in test_fold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.optimizers import FedAdam, FedAvg, FedAvgM
from atoll.aggregation.stacked.rows import Rows, can_stack, fold_rows
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.tensors.updates.reader import StoredUpdate

SHAPES = {"a": (3, 5), "buffer": (4,), "control/a": (2,), "z": ()}
LAYOUT = in_order([Tensor(name, "F32", shape) for name, shape in SHAPES.items()])
NUM_ELEMENTS = sum(tensor.num_elements for tensor in LAYOUT)


def stored(row, k):
    pieces, magnitudes, start = [], {}, 0
    for tensor in LAYOUT:
        block = row[start : start + tensor.num_elements]
        start += tensor.num_elements
        pieces.append(Piece(tensor.name, "F32", (0,) * len(tensor.shape), tensor.shape, ""))
        magnitudes[tensor.name] = float(np.abs(block).max())
    return StoredUpdate(path=f"update {k}", pieces=tuple(pieces), magnitudes=magnitudes, data=row.tobytes())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 12),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    optimizer=st.sampled_from([FedAvg(), FedAvg(0.5), FedAvgM(0.7), FedAdam()]),
    scale=st.sampled_from([1.0, 3.7]),
    num_clients=st.sampled_from([None, 20]),
)
def test_rows_fold_to_the_bits_of_files_over_several_rounds(
    tmp_path_factory, seed, count, spread, optimizer, scale, num_clients
):
    folder, rng = tmp_path_factory.mktemp("fold"), np.random.default_rng(seed)
    base = {tensor.name: rng.standard_normal(tensor.shape).astype(np.float32) for tensor in LAYOUT}
    safetensors_file.write(folder / "0", base)
    slots = {}
    for version in range(3):
        rows = (rng.standard_normal((count, NUM_ELEMENTS)) * spread).astype(np.float32)
        weights = rng.integers(1, 1 << 40, count).tolist()
        factors = rng.choice([0.0, 0.3, 1.0], count).tolist()
        trained_factors = rng.choice([0.9, 1.0], count).tolist()
        files = {slot: folder / f"{version}.{slot}" for slot in optimizer.slots}
        step = Step(
            optimizer,
            frozenset({"a", "z"}),
            scale=scale,
            num_clients=num_clients,
            before=files if version else {},
            after={slot: folder / f"{version + 1}.{slot}" for slot in optimizer.slots},
        )
        updates = [Weighted(stored(row, k), weights[k], factors[k], trained_factors[k]) for k, row in enumerate(rows)]
        fold(folder / f"{version}", updates, folder / f"{version + 1}", step=step)
        expected = safetensors_file.read(folder / f"{version + 1}")
        order = rng.permutation(count)
        values = rows[order] if version % 2 else list(rows[order])  # wherever they lie
        shuffled = Rows(values, *([kind[k] for k in order] for kind in (weights, factors, trained_factors)))
        base = fold_rows(base, LAYOUT, shuffled, step, slots)
        for name, array in expected.items():
            assert base[name].tobytes() == array.tobytes(), name
        for slot in optimizer.slots:
            for name, array in safetensors_file.read(folder / f"{version + 1}.{slot}").items():
                assert slots[f"{slot}/{name}"].tobytes() == array.tobytes()


@pytest.mark.slow
def test_many_large_rows_are_added_by_the_compiled_loop_to_the_same_bits():
    layout, rng = (Tensor("w", "F32", (1 << 20,)),), np.random.default_rng(0)
    values = rng.standard_normal((5, 1 << 20)).astype(np.float32)
    base = {"w": rng.standard_normal(1 << 20).astype(np.float32)}
    whole = fold_rows(base, layout, Rows(values, [3, 1, 4, 1, 5], [1.0] * 5, [1.0] * 5), Step(), {})
    apart = fold_rows(base, layout, Rows(list(values), [3, 1, 4, 1, 5], [1.0] * 5, [1.0] * 5), Step(), {})
    assert apart["w"].tobytes() == whole["w"].tobytes()
    exact = base["w"] + np.average(values.astype(np.float64), axis=0, weights=[3, 1, 4, 1, 5])
    np.testing.assert_allclose(whole["w"], exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("held", [np.asarray, list])
def test_a_value_that_is_not_finite_is_named_with_its_tensor(value, held):
    rows = np.zeros((2, 3), np.float32)
    rows[1, 2] = value
    layout, base = (Tensor("w", "F32", (3,)),), {"w": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="'w': an update has values that are not finite"):
        fold_rows(base, layout, Rows(held(rows), [1, 1], [1, 1], [1, 1]), Step(), {})


def test_integers_and_rules_are_for_the_fold_of_files():
    class Anything:
        def reduce(self, rows):
            return rows.mean(axis=0)

    floats = (Tensor("w", "F32", (3,)),)
    assert can_stack(floats, Step())
    assert not can_stack((*floats, Tensor("n", "I64", ())), Step())
    assert not can_stack(floats, Step(rule=Anything()))
