"""NovoGrad: momentum over gradients divided by a running norm of their layer; one second moment per layer.

Legend: w the layer's weights, g its gradient, λ the learning rate, d the weight decay.

    v <- β₂ v + (1 - β₂) |g|²          v = |g|² at the first gradient that is not zero
    m <- β₁ m + g / (sqrt(v) + ε) + d w           with `averaging`, the new part times (1 - β₁)
    w <- w - λ m

There is no bias correction. ε at the first step is ours, the paper has none there: with it a layer whose gradients have
all been zero does not move.

Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks",
2019, Algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from atoll.training.optimizers.layerwise import Block, LayerwiseOptimizer, check_ranges, norms_by_block


class NovoGrad(LayerwiseOptimizer):
    """The optimizer NovoGrad: normalized gradients with layer-wise second moments.

    Args:
        parameters: the parameters or groups, as for every torch optimizer.
        lr: λ >= 0.
        betas: β₁ and β₂, in [0, 1).
        eps: ε > 0.
        weight_decay: d >= 0.
        averaging: the momentum is a mean of gradients instead of their sum.
        skip_1d: parameters of at most one dimension (biases, norms) get no decay.

    Raises:
        ValueError: an option is out of its range; all faults at once.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.001,
        averaging: bool = False,
        skip_1d: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_ranges("novograd", **options)
        super().__init__(parameters, {**options, "averaging": averaging, "skip_1d": skip_1d})

    def _update(self, blocks: list[Block]) -> None:
        found = norms_by_block(blocks, [block.gradients for block in blocks])
        for block, (gradient,) in zip(blocks, found, strict=True):
            group = block.group
            beta1, beta2 = group["betas"]
            spread = self._second_moments(block, gradient.square(), beta2).sqrt() + group["eps"]
            steps = torch._foreach_div(block.gradients, list(spread.unbind()))
            torch._foreach_add_(steps, block.weights, alpha=block.weight_decay)
            buffers = self._buffers(block, "exp_avg")
            torch._foreach_mul_(buffers, beta1)
            torch._foreach_add_(buffers, steps, alpha=1 - beta1 if group["averaging"] else 1.0)
            torch._foreach_add_(block.weights, buffers, alpha=-group["lr"])

    def _second_moments(self, block: Block, squared: Tensor, beta2: float) -> Tensor:
        """Return v of each layer: (layers,)."""
        states = [self.state[parameter] for parameter in block.parameters]
        past = torch.stack(
            [state.get("exp_avg_sq", torch.zeros_like(new)) for state, new in zip(states, squared, strict=True)]
        )
        present = torch.where(past > 0, beta2 * past + (1 - beta2) * squared, squared)
        for state, moment in zip(states, present.unbind(), strict=True):
            state["exp_avg_sq"] = moment.clone()
        return present
