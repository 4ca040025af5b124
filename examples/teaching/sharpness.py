"""The sharpness of a minimum: the largest rise of the loss within a small box around the weights.

    φ(ε) = 100 (max of f over the box - f(w)) / (1 + f(w)),       box: |w'_i - w_i| <= ε (|w_i| + 1)

The paper climbs with ten iterations of L-BFGS-B. Here it is the conditional gradient method (Frank, Wolfe): step to the
corner of the box to which the gradient points, and halve the step until it raises f. It needs no step length and stays
in the box by itself. Both give lower bounds of the maximum: on small nets ten iterations of either end within -15 % and
+50 % of each other.

Source: Keskar et al., "On Large-Batch Training for Deep Learning: Generalization Gap and Sharp Minima", ICLR 2017,
section 2.2.2, metric 2.1 (with A the identity).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.training.optimizers.norms import local

HALVINGS = 6
"""Number of halvings of a step after which the climb ends."""


def sharpness(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    epsilon: float = 1e-3,
    iterations: int = 10,
    seed: int = 0,
) -> float:
    """Return φ(ε), in percent of 1 + f; the parameters are restored.

    Args:
        loss: f at the present weights, a mean over all the data and always over the same; the same on all ranks if the
            parameters are sharded.
        parameters: the weights that may move; those on which the loss does not depend stay.
        epsilon: ε > 0; the paper has 1e-3 and 5e-4.
        iterations: of the climb.
        seed: for the direction where the gradient is exactly zero, as at the bottom of a bowl.

    Raises:
        ValueError: ε or the iterations are not positive, or f is not finite.
    """
    if not (epsilon > 0 and iterations >= 1):
        raise ValueError(f"epsilon and iterations must be positive, got {epsilon!r} and {iterations!r}")
    weights = [local(parameter.detach()) for parameter in parameters]
    start = [weight.clone() for weight in weights]
    reach = [epsilon * (weight.abs() + 1) for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    try:
        bottom = _value(loss)
        top = bottom
        for _ in range(iterations):
            here = [weight.clone() for weight in weights]
            corner = _corner(loss, parameters, start, reach, generator)
            higher = _climb(loss, weights, here, corner, top)
            if higher is None:
                break
            top = higher
    finally:
        _place(weights, start)
    return 100 * (top - bottom) / (1 + bottom)


def _corner(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    start: list[Tensor],
    reach: list[Tensor],
    generator: torch.Generator,
) -> list[Tensor]:
    """Return the corner of the box to which the gradient points."""
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), list(parameters), allow_unused=True)
    corner = []
    for middle, width, gradient in zip(start, reach, gradients, strict=True):
        if gradient is None:
            corner.append(middle)
            continue
        coin = torch.randint(0, 2, middle.shape, generator=generator).to(middle) * 2 - 1
        direction = local(gradient).sign()
        corner.append(middle + width * torch.where(direction == 0, coin, direction))
    return corner


@torch.no_grad()
def _climb(
    loss: Callable[[], Tensor], weights: list[Tensor], here: list[Tensor], corner: list[Tensor], top: float
) -> float | None:
    """Move the weights to a loss above `top` and return it; move them back and return None if there is none."""
    for halving in range(HALVINGS + 1):
        _place(weights, [a.lerp(b, 0.5**halving) for a, b in zip(here, corner, strict=True)])
        value = _value(loss)
        if value > top:
            return value
    _place(weights, here)
    return None


@torch.no_grad()
def _value(loss: Callable[[], Tensor]) -> float:
    value = float(loss())
    if value - value != 0:
        raise ValueError(f"the loss must be finite, got {value}")
    return value


@torch.no_grad()
def _place(weights: list[Tensor], values: list[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)
