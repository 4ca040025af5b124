"""SCAFFOLD's control variates in the fold, and FedNova's factors: beside the weighted mean of everything else."""

from fractions import Fraction

import numpy as np
import pytest

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.fold.weights import normalized
from atoll.aggregation.optimizers import FedAdam, FedAvg
from atoll.tensors import safetensors_file
from tests.aggregation.models import store

N = 7
TRAINED = frozenset({"w"})


def arrays(rng):
    return {
        "w": rng.standard_normal(50).astype(np.float32),
        "control/w": rng.standard_normal(50).astype(np.float32),
        "running": rng.standard_normal(3).astype(np.float32),
        "count": np.array(rng.integers(1, 9), np.int64),
    }


def given(tmp_path, weights):
    """A base and three updates."""
    rng = np.random.default_rng(1)
    base, updates = arrays(rng), [arrays(rng) for _ in weights]
    safetensors_file.write(tmp_path / "base", base)
    return base, updates, [store(tmp_path / f"u{k}", update) for k, update in enumerate(updates)]


def mean(updates, name, weights):
    total = sum(update[name].astype(np.float64) * weight for update, weight in zip(updates, weights, strict=True))
    return total / sum(weights)


@pytest.mark.parametrize("optimizer", [FedAvg(0.5), FedAdam()])
def test_variates_move_by_the_sum_over_n_whatever_the_weights_and_the_optimizer(tmp_path, optimizer):
    weights = (100, 1, 30)
    base, updates, stored = given(tmp_path, weights)
    after = {slot: tmp_path / slot for slot in optimizer.slots}
    step = Step(optimizer, TRAINED, num_clients=N, after=after)
    weighted = [Weighted(update, weight) for update, weight in zip(stored, weights, strict=True)]
    fold(tmp_path / "base", weighted, tmp_path / "new", step=step, execution=Execution(tile_elements=16))
    new = safetensors_file.read(tmp_path / "new")
    total = sum(update["control/w"].astype(np.float64) for update in updates)
    np.testing.assert_array_equal(new["control/w"], (base["control/w"] + total / N).astype(np.float32))
    state = {slot: np.full(50, optimizer.init(slot)) for slot in optimizer.slots}
    moved = optimizer.apply(base["w"].astype(np.float64), mean(updates, "w", weights), state)
    np.testing.assert_allclose(new["w"], moved, rtol=1e-6)
    np.testing.assert_allclose(new["running"], base["running"] + mean(updates, "running", weights), rtol=1e-6)
    for slot in optimizer.slots:
        assert set(safetensors_file.read(tmp_path / slot)) == {"w"}
    fold(tmp_path / "base", weighted[::-1], tmp_path / "again", step=step)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "new").read_bytes()


def test_without_clients_a_tensor_of_that_name_is_like_any_other(tmp_path):
    base, updates, stored = given(tmp_path, (1, 3))
    fold(tmp_path / "base", [Weighted(u, w) for u, w in zip(stored, (1, 3), strict=True)], tmp_path / "new")
    moved = base["control/w"] + mean(updates, "control/w", (1, 3))
    np.testing.assert_allclose(safetensors_file.read(tmp_path / "new")["control/w"], moved, rtol=1e-6)


def test_fednova_normalizes_what_is_trained_alone(tmp_path):
    weights, norms = (5, 2, 3), (40.0, 13.1441, 1000.0)
    base, updates, stored = given(tmp_path, weights)
    nova = normalized(weights, norms, norms)
    weighted = [Weighted(u, w, trained_factor=f) for u, w, f in zip(stored, weights, nova.factors, strict=True)]
    step = Step(FedAvg(), TRAINED, scale=nova.scale)
    fold(tmp_path / "base", weighted, tmp_path / "new", step=step, execution=Execution(tile_elements=16))
    new = safetensors_file.read(tmp_path / "new")
    tau = sum(w * Fraction(a) for w, a in zip(weights, norms, strict=True)) / 10
    shares = [float(tau * w / (10 * Fraction(a))) for w, a in zip(weights, norms, strict=True)]
    moved = base["w"] + sum(s * update["w"].astype(np.float64) for s, update in zip(shares, updates, strict=True))
    np.testing.assert_allclose(new["w"], moved, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(new["running"], base["running"] + mean(updates, "running", weights), rtol=1e-6)
    assert new["count"] == base["count"] + round(mean(updates, "count", weights))


def test_fednova_of_equal_steps_is_fedavg_to_the_bit(tmp_path):
    weights = (5, 2, 3)
    _, _, stored = given(tmp_path, weights)
    nova = normalized(weights, (13.1441,) * 3, (13.1441,) * 3)
    plain = [Weighted(*numbers) for numbers in zip(stored, weights, strict=True)]
    weighted = [Weighted(u, w, trained_factor=f) for u, w, f in zip(stored, weights, nova.factors, strict=True)]
    fold(tmp_path / "base", plain, tmp_path / "plain", step=Step(FedAvg(), TRAINED))
    fold(tmp_path / "base", weighted, tmp_path / "nova", step=Step(FedAvg(), TRAINED, scale=nova.scale))
    assert (tmp_path / "nova").read_bytes() == (tmp_path / "plain").read_bytes()


def test_an_update_that_is_scaled_down_takes_no_bits_from_the_others(tmp_path):
    safetensors_file.write(tmp_path / "base", {"w": np.zeros(3, np.float32)})
    honest = store(tmp_path / "honest", {"w": np.array([1e-3, 2e-3, 3e-3], np.float32)})
    huge = store(tmp_path / "huge", {"w": np.full(3, 1e30, np.float32)})
    weighted = [Weighted(honest, 1), Weighted(huge, 1, factor=1e-33)]
    fold(tmp_path / "base", weighted, tmp_path / "new")
    np.testing.assert_allclose(safetensors_file.read(tmp_path / "new")["w"], [1e-3, 1.5e-3, 2e-3], rtol=1e-6)


@pytest.mark.parametrize("factor", [-0.1, 1.1, float("nan")])
def test_factor_out_of_range_is_named(tmp_path, factor):
    _, _, [stored] = given(tmp_path, (1,))
    with pytest.raises(ValueError, match=rf"factor {factor} is not in \[0, 1\]"):
        fold(tmp_path / "base", [Weighted(stored, 1, trained_factor=factor)], tmp_path / "new")
