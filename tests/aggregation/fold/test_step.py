"""The fold with a server optimizer: several rounds over files give what the optimizer gives on whole arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.optimizers import OPTIMIZERS, FedAdam, FedAvg, FedAvgM
from atoll.tensors import safetensors_file
from tests.aggregation.models import store

TRAINED = frozenset({"w", "b"})


def model(rng):
    floats = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in [("w", (9, 5)), ("b", (5,))]}
    return floats | {"running_var": np.full(3, 0.5, np.float32), "steps": np.array(7, np.int64)}


def updates(rng, folder, name, *, without=()):
    weighted, arrays = [], []
    for k in range(3):
        update = {key: value for key, value in model(rng).items() if key not in without}
        arrays.append((update, k + 1))
        weighted.append(Weighted(store(folder / f"{name}-{k}", update), k + 1))
    return weighted, arrays


def files_of(folder, number, optimizer):
    return {slot: folder / f"{number}.{slot}" for slot in optimizer.slots}


def folded(folder, optimizer, rounds, **execution):
    """The model and the slots after the rounds, each a list of weighted updates."""
    base = folder / "0.model"
    safetensors_file.write(base, model(np.random.default_rng(0)))
    before = {}
    for number, weighted in enumerate(rounds, start=1):
        after, out = files_of(folder, number, optimizer), folder / f"{number}.model"
        step = Step(optimizer, TRAINED, before=before, after=after)
        fold(base, weighted, out, step=step, execution=Execution(**execution))
        base, before = out, after
    return safetensors_file.read(base), {slot: safetensors_file.read(path) for slot, path in before.items()}


def twin(optimizer, rounds):
    """Compute on whole arrays: float64 in between, the model and the slots rounded to float32 after each round."""
    arrays = {name: array.astype(np.float64) for name, array in model(np.random.default_rng(0)).items()}
    state = {s: {n: np.full(arrays[n].shape, optimizer.init(s)) for n in TRAINED} for s in optimizer.slots}
    for updates_of_round in rounds:
        for name in ("w", "b", "running_var"):
            carrying = [
                (update[name].astype(np.float64), weight) for update, weight in updates_of_round if name in update
            ]
            if not carrying:
                continue
            mean = sum(u * w for u, w in carrying) / sum(w for _, w in carrying)
            if name in TRAINED:
                slots = {slot: values[name] for slot, values in state.items()}
                new = optimizer.apply(arrays[name], mean, slots)
                for slot in slots:
                    state[slot][name] = slots[slot].astype(np.float32).astype(np.float64)
            else:
                new = arrays[name] + mean
            arrays[name] = new.astype(np.float32).astype(np.float64)
    return arrays, state


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_rounds_over_files_are_rounds_over_arrays(tmp_path, name):
    optimizer, rng = OPTIMIZERS[name](), np.random.default_rng(1)
    rounds = [updates(rng, tmp_path, f"r{number}") for number in range(4)]
    new, slots = folded(tmp_path, optimizer, [weighted for weighted, _ in rounds])
    expected, state = twin(optimizer, [arrays for _, arrays in rounds])
    for key in ("w", "b", "running_var"):
        np.testing.assert_allclose(new[key], expected[key], rtol=2e-6, atol=1e-6)
    assert new["steps"] == 7 + 4 * 7, "an integer follows the mean"
    assert set(slots) == set(optimizer.slots)
    for slot, values in slots.items():
        assert set(values) == TRAINED
        for key in TRAINED:
            np.testing.assert_allclose(values[key], state[slot][key], rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    tile=st.integers(1, 50),
    threads=st.integers(1, 3),
)
def test_the_bits_depend_on_no_block_and_no_order(tmp_path_factory, name, tile, threads):
    folder, optimizer = tmp_path_factory.mktemp("step"), OPTIMIZERS[name]()
    rng = np.random.default_rng(2)
    rounds = [updates(rng, folder, f"r{number}")[0] for number in range(2)]
    expected = folded(folder, optimizer, rounds)
    actual = folded(folder, optimizer, [r[::-1] for r in rounds], tile_elements=tile, threads=threads)
    for one, other in zip((expected[0], *expected[1].values()), (actual[0], *actual[1].values()), strict=True):
        assert {key: value.tobytes() for key, value in one.items()} == {k: v.tobytes() for k, v in other.items()}


def test_fedavg_with_rate_one_gives_the_bits_of_the_plain_fold(tmp_path):
    rounds = [updates(np.random.default_rng(3), tmp_path, "r")[0]]
    new, _ = folded(tmp_path, FedAvg(), rounds)
    fold(tmp_path / "0.model", rounds[0], tmp_path / "plain")
    assert {k: v.tobytes() for k, v in new.items()} == {
        k: v.tobytes() for k, v in safetensors_file.read(tmp_path / "plain").items()
    }


def test_a_server_rate_scales_the_mean_of_trained_tensors_alone(tmp_path):
    rounds = [updates(np.random.default_rng(4), tmp_path, "r")]
    new, _ = folded(tmp_path, FedAvg(0.5), [rounds[0][0]])
    expected, _ = twin(FedAvg(0.5), [rounds[0][1]])
    np.testing.assert_allclose(new["w"], expected["w"], rtol=1e-6)
    np.testing.assert_allclose(new["running_var"], 0.5 + 0.5, rtol=1e-6)


def test_a_tensor_that_nobody_sends_keeps_its_value_and_its_moments(tmp_path):
    rng = np.random.default_rng(5)
    first, second = updates(rng, tmp_path, "r1"), updates(rng, tmp_path, "r2", without=("b",))
    new, slots = folded(tmp_path, FedAvgM(), [first[0], second[0]])
    once, slots_once = folded(tmp_path, FedAvgM(), [first[0]])
    assert new["b"].tobytes() == once["b"].tobytes()
    assert slots["momentum"]["b"].tobytes() == slots_once["momentum"]["b"].tobytes()
    assert new["w"].tobytes() != once["w"].tobytes()


def test_a_moment_that_leaves_float32_is_named_and_nothing_appears(tmp_path):
    huge = {"w": np.full((9, 5), 3e38, np.float32)}
    weighted = [Weighted(store(tmp_path / "u", huge), 1)]
    with pytest.raises(ValueError, match=r"tensor .w.: second_moment in .* leave float32"):
        folded(tmp_path, FedAdam(), [weighted])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.model", "u"]
