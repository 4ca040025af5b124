"""Server optimizers against the papers' formulas in float64, torch's own SGD and Adam, and slow twins."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.optimizers import OPTIMIZERS, DiLoCo, FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi

START = np.array([1.0, -2.0, 0.5])
MEANS = np.array([[0.1, -0.2, 0.05], [-0.05, 0.1, 0.2], [0.02, 0.02, -0.1]])

GOLDEN = [
    (FedAdagrad(), [1.099005, -2.09950125, 0.598019998], [1.072136513, -2.046110329, 0.651111284]),
    (FedAdam(), [1.090502831, -2.095126052, 0.581993574], [1.168866893, -2.151816191, 0.745799534]),
    (FedYogi(), [1.090498756, -2.095124922, 0.58198039], [1.168373569, -2.151661596, 0.745543209]),
    (FedAvgM(), [1.1, -2.2, 0.55], [1.196, -2.332, 0.9155]),
    (DiLoCo(), [1.133, -2.266, 0.5665], [1.17248, -2.26516, 0.866765]),
]


def state_of(optimizer, num_elements):
    return {slot: np.full(num_elements, optimizer.init(slot)) for slot in optimizer.slots}


def run(optimizer, means, start=START):
    state, model, models = state_of(optimizer, start.size), start, []
    for mean in means:
        model = optimizer.apply(model, mean, state)
        models.append(model)
    return models


@pytest.mark.parametrize(("optimizer", "first", "third"), GOLDEN, ids=lambda value: type(value).__name__)
def test_three_rounds_give_the_golden_numbers(optimizer, first, third):
    models = run(optimizer, MEANS)
    np.testing.assert_allclose(models[0], first, rtol=0, atol=5e-9)
    np.testing.assert_allclose(models[2], third, rtol=0, atol=5e-9)


def by_torch(make, means):
    parameter = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer = make([parameter])
    for mean in means:
        parameter.grad = -torch.tensor(mean)
        optimizer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (FedAvg(0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (FedAvgM(0.3, 0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        (FedAvgM(0.3, 0.8, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True)),
        (DiLoCo(), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
    ],
    ids=["sgd", "momentum", "nesterov", "diloco"],
)
def test_the_momentum_ones_are_torch_sgd_on_the_negative_mean(ours, theirs):
    means = np.random.default_rng(0).normal(size=(20, 3))
    np.testing.assert_allclose(run(ours, means)[-1], by_torch(theirs, means), rtol=1e-13)


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_the_adaptive_ones_are_algorithm_2_in_plain_python(name):
    optimizer = OPTIMIZERS[name](lr=0.2, beta1=0.7, beta2=0.9, tau=0.01)
    means = np.random.default_rng(1).normal(size=(30, 3))
    expected = []
    for x, deltas in zip(START.tolist(), means.T.tolist(), strict=True):
        m, v = 0.0, 0.01**2
        for d in deltas:
            m = 0.7 * m + 0.3 * d
            sign = (v > d * d) - (v < d * d)
            v = {
                "fedadagrad": v + d * d,
                "fedadam": 0.9 * v + 0.1 * d * d,
                "fedyogi": v - 0.1 * d * d * sign,
            }[name]
            x += 0.2 * m / (v**0.5 + 0.01)
        expected.append(x)
    np.testing.assert_allclose(run(optimizer, means)[-1], expected, rtol=1e-12)


@given(cut=st.integers(0, 50), seed=st.integers(0, 1000), name=st.sampled_from(sorted(OPTIMIZERS)))
def test_blocks_give_the_bits_of_the_whole(cut, seed, name):
    optimizer = OPTIMIZERS[name]()
    rng = np.random.default_rng(seed)
    start, means = rng.normal(size=50), rng.normal(size=(3, 50))
    whole = run(optimizer, means, start)[-1]
    parts = [run(optimizer, means[:, part], start[part])[-1] for part in (slice(0, cut), slice(cut, 50))]
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_without_an_update_the_first_round_changes_nothing(name):
    assert np.array_equal(run(OPTIMIZERS[name](), [np.zeros(3)])[0], START)


def test_fedavg_adds_the_mean_as_it_is():
    assert np.array_equal(run(FedAvg(), MEANS)[0], START + MEANS[0])
    assert FedAvg().slots == ()


def test_the_second_moment_of_yogi_never_turns_negative():
    optimizer, state = FedYogi(), state_of(FedYogi(), 3)
    for mean in np.random.default_rng(2).normal(size=(200, 3)) * 10.0:
        optimizer.apply(START, mean, state)
        assert (state["second_moment"] >= 0).all()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: FedAvg(0.0), "lr 0.0 is not positive"),
        (lambda: FedAvg(float("nan")), "lr nan"),
        (lambda: FedAvgM(momentum=1.0), r"momentum 1.0 is not in \[0, 1\)"),
        (lambda: FedAdam(tau=float("inf")), "tau inf"),
        (lambda: FedYogi(beta2=-0.1), r"beta2 -0.1 is not in"),
        (lambda: DiLoCo(lr=-1.0), "lr -1.0"),
    ],
)
def test_bad_settings_are_named(make, fault):
    with pytest.raises(ValueError, match=fault):
        make()
