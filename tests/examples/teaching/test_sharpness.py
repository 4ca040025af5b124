import numpy as np
import pytest
import torch
from torch import nn

from examples.teaching.sharpness import sharpness
from tests.later import later

optimize = later("scipy.optimize")

CURVATURE = torch.tensor([0.5, 2.0, 10.0], dtype=torch.float64)


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_a_bowl_s_sharpness_is_known(off: float) -> None:
    """f = sum h (w - c)² / 2 is highest in the corner of the box that is farthest from c."""
    weights = nn.Parameter(torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64))
    centre = weights.detach() - off
    before = weights.detach().clone()

    def loss() -> torch.Tensor:
        return (CURVATURE * (weights - centre) ** 2).sum() / 2

    reach = 0.01 * (before.abs() + 1)
    bottom = float((CURVATURE * off**2).sum() / 2)
    top = float((CURVATURE * (abs(off) + reach) ** 2).sum() / 2)
    assert sharpness(loss, [weights], epsilon=0.01) == pytest.approx(100 * (top - bottom) / (1 + bottom), rel=1e-12)
    assert torch.equal(weights.detach(), before)


def test_a_steeper_bowl_is_sharper_and_a_flat_floor_is_not() -> None:
    weights = nn.Parameter(torch.zeros(4))
    flat, steep = (
        sharpness(lambda curvature=curvature: (curvature * weights**2).sum(), [weights], epsilon=0.1)
        for curvature in (0.0, 5.0)
    )
    assert flat == 0.0
    assert steep == pytest.approx(100 * 5 * 4 * 0.01, rel=1e-5)


@pytest.mark.parametrize(("epsilon", "seed"), [(1e-3, 0), (1e-2, 1), (5e-2, 0)])
def test_a_small_net_s_sharpness_is_that_of_the_paper_s_method(epsilon: float, seed: int) -> None:
    """Compared with scipy's L-BFGS-B with ten iterations, as in Keskar et al., neither is far below the other."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs, targets = torch.randn(60, 4, dtype=torch.float64), torch.randint(0, 3, (60,))
    optimizer = torch.optim.Adam(net.parameters(), 0.05)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(net(inputs), targets)

    for _ in range(150):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    parameters = list(net.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach()

    def negative(vector: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(vector), parameters)
        value = loss()
        gradients = torch.autograd.grad(value, parameters)
        return -value.item(), -torch.cat([gradient.flatten() for gradient in gradients]).numpy()

    bottom, ours = loss().item(), sharpness(loss, parameters, epsilon=epsilon)
    reach = epsilon * (start.abs() + 1)
    bounds = list(zip((start - reach).tolist(), (start + reach).tolist(), strict=True))
    solved = optimize.minimize(
        negative, start.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 10}
    )
    theirs = 100 * (-solved.fun - bottom) / (1 + bottom)
    assert 0.85 * theirs < ours < 1.5 * theirs


def test_parameters_that_the_loss_does_not_reach_stay() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert sharpness(lambda: (used**2).sum(), [used, unused], epsilon=0.1) > 0
    assert torch.equal(unused.detach(), torch.ones(2))


def test_a_loss_that_is_not_finite_is_refused_and_the_weights_are_put_back() -> None:
    weights = nn.Parameter(torch.full((2,), 0.5))
    with pytest.raises(ValueError, match="the loss must be finite, got nan"):
        sharpness(lambda: -(0.51 - weights).log().sum(), [weights], epsilon=0.1)
    assert torch.equal(weights.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize(("epsilon", "iterations"), [(0.0, 10), (0.1, 0)])
def test_a_box_without_width_or_a_climb_without_steps_is_refused(epsilon: float, iterations: int) -> None:
    weights = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=f"{epsilon} and {iterations}"):
        sharpness(lambda: weights.sum(), [weights], epsilon=epsilon, iterations=iterations)
