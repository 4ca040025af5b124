"""FedNova's normalizer against fixed points in float64, the paper's sums, and torch's own optimizer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import Deadline, Local
from atoll.aggregation.fold import weights
from atoll.task.errors import TaskBroken
from atoll.training.local import fednova
from atoll.training.local.fednova import Normalizer
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.federation.quadratics_task import task as quadratics
from tests.training.tasks import make_task


def after(num_steps: int, **local: float) -> Normalizer:
    normalizer = Normalizer(Local(**local))  # type: ignore[arg-type]
    for _ in range(num_steps):
        normalizer.step()
    return normalizer


@pytest.mark.parametrize(
    ("local", "norm"),
    [({}, 5.0), ({"momentum": 0.9}, 13.1441), ({"lr": 0.1, "prox_mu": 1.0}, 4.0951)],
)
def test_five_steps_have_the_norm_of_the_reference(local: dict[str, float], norm: float) -> None:
    assert after(5, **local).normalizer == pytest.approx(norm, rel=1e-12)


def test_effective_steps_are_the_norm_and_with_a_proximal_term_the_steps() -> None:
    assert after(5, momentum=0.9).effective_steps == after(5, momentum=0.9).normalizer
    assert after(5, lr=0.1, prox_mu=1.0).effective_steps == 5.0


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30),
    st.floats(0, 0.99),
    st.floats(0, 1.9),
)
def test_it_is_the_sum_of_what_torch_makes_of_each_gradient(num_steps: int, momentum: float, pull: float) -> None:
    """‖a‖₁ = sum_k |a_k|, with a_k = (x - y) / η after a unit gradient at step k alone; prox as in `training.Step`."""
    lr = 0.5
    total = 0.0
    for at in range(num_steps):
        x = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD([x], lr=lr, momentum=momentum)
        for step in range(num_steps):
            x.grad = torch.tensor(float(step == at), dtype=torch.float64) + pull / lr * x.detach()
            optimizer.step()
        total += abs(x.item()) / lr
    assert after(num_steps, lr=lr, momentum=momentum, prox_mu=pull / lr).normalizer == pytest.approx(total, rel=1e-9)


def of_the_authors(num_steps: int, lr: float, momentum: float, mu: float) -> tuple[float, float]:
    """Return the normalizer and the effective steps as `FedNova.step` and `average` of the authors' code do.

    Source: JYWa/FedNova, distoptim/FedNova.py, with one client.
    """
    counter = vector = 0.0
    for _ in range(num_steps):
        if momentum != 0:
            counter = counter * momentum + 1
            vector += counter
        if lr * mu != 0:
            vector = vector * (1 - lr * mu) + 1
        if momentum == 0 and lr * mu == 0:
            vector += 1
    return vector, num_steps if mu != 0 else vector


@settings(deadline=None)
@given(st.integers(1, 30), st.sampled_from([(0.0, 0.0), (0.9, 0.0), (0.3, 0.0), (0.0, 0.1), (0.0, 1.0), (0.0, 1.9)]))
def test_momentum_or_a_proximal_term_gives_what_the_authors_code_gives(
    num_steps: int, given_: tuple[float, float]
) -> None:
    momentum, mu = given_
    found = after(num_steps, lr=0.5, momentum=momentum, prox_mu=mu)
    vector, effective = of_the_authors(num_steps, 0.5, momentum, mu)
    assert (found.normalizer, found.effective_steps) == pytest.approx((vector, effective), rel=1e-12)


def test_both_together_differ_from_the_authors_code_as_the_page_says() -> None:
    vector, effective = of_the_authors(5, 0.5, 0.9, 0.2)
    by_hand, powers = 0.0, 0.0
    for _ in range(5):
        powers = 0.9 * powers + 1
        by_hand = (1 - 0.1) * (by_hand + powers) + 1
    assert vector == pytest.approx(by_hand)
    found = after(5, lr=0.5, momentum=0.9, prox_mu=0.2)
    assert abs(found.normalizer - vector) > 1
    assert found.effective_steps == effective == 5.0


def moved_by_the_authors(gradients: list[float], lr: float, momentum: float, mu: float) -> float:
    """Return x - y after the steps of the authors' optimizer, whose `d_p = buf` makes the term part of the buffer."""
    parameter, buffer = 0.0, 0.0
    for gradient in gradients:
        buffer = momentum * buffer + gradient
        buffer += mu * parameter  # in place: the start is 0
        parameter -= lr * buffer
    return -parameter


@given(st.integers(1, 20), st.sampled_from([0.3, 0.9]), st.sampled_from([0.1, 1.0]))
def test_both_together_count_the_weights_in_the_steps_of_the_authors_optimizer(
    num_steps: int, momentum: float, mu: float
) -> None:
    impulses = [[float(at == step) for step in range(num_steps)] for at in range(num_steps)]
    weights_of_gradients = [moved_by_the_authors(impulse, 0.5, momentum, mu) / 0.5 for impulse in impulses]
    norm = sum(map(abs, weights_of_gradients))
    assert after(num_steps, lr=0.5, momentum=momentum, prox_mu=mu).normalizer == pytest.approx(norm, rel=1e-9)


def test_equal_steps_with_a_proximal_term_move_further_than_fedavg_as_the_page_says() -> None:
    found = after(5, lr=0.1, prox_mu=1.0)
    mean = weights.normalized([3, 1], [found.normalizer] * 2, [found.effective_steps] * 2)
    assert mean.factors == (1.0, 1.0)
    assert mean.scale == pytest.approx(5 / ((1 - 0.9**5) / 0.1))
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text("utf-8")
    assert f"{mean.scale:.2f} times for five steps with ημ = 0.1" in " ".join(page.split())


def test_a_proximal_term_that_diverges_is_named() -> None:
    with pytest.raises(TaskBroken, match=r"local.lr \* local.prox_mu is 4"):
        _ = after(40, lr=0.5, prox_mu=8.0).normalizer


def test_client_and_coordinator_allow_the_same() -> None:
    assert fednova.NORMALIZER_MAX == weights.NORMALIZER_MAX


def test_a_task_that_does_not_go_with_the_algorithm_does_not_load() -> None:
    def fit(*_: object) -> float:
        return 1.0

    with pytest.raises(TaskBroken, match=r"a custom `fit`.*local.optimizer must be 'sgd'.*got 'adam'"):
        ModelBench(make_task(fit=fit), {"local": {"optimizer": "adam"}, "algorithm": "fednova"})
    with pytest.raises(TaskBroken, match=r"supports fedavg, .*fednova"):
        ModelBench(make_task(), {"algorithm": "fedmoon"})


@pytest.mark.parametrize(("algorithm", "fixed_point"), [("fednova", 2.99023), ("fedavg", 3.74694)])
def test_unequal_steps_leave_the_right_objective_and_fedavg_another(algorithm: str, fixed_point: float) -> None:
    """The fixed points of Wang et al. 2020 in float64 where sites take 2 and 10 steps of 1e-3; the optimum is 3."""
    version = ModelBench(quadratics, {}).initial(0)
    version["x"] = np.array([fixed_point], np.float32)
    request = {"seed": 0, "algorithm": algorithm, "local": {"lr": 1e-3}}
    outcomes = [
        ModelBench(quadratics, {"site": site}).train(Received(version), request, Deadline.never()) for site in "ab"
    ]
    nova = weights.normalized(
        (1, 1),
        [outcome.report.get("normalizer", 1.0) for outcome in outcomes],
        [outcome.report.get("effective_steps", 1.0) for outcome in outcomes],
    )
    moves = [float(outcome.trained.update["x"][0]) for outcome in outcomes]
    assert min(map(abs, moves)) > 1e-3
    assert nova.scale * sum(f * move for f, move in zip(nova.factors, moves, strict=True)) / 2 == pytest.approx(
        0.0, abs=2e-6
    )
