"""LARS: a learning rate for each layer, in proportion to the norm of its weights over its gradient's norm.

Legend: w the layer's weights, g its gradient, γ the learning rate, η the trust coefficient, m the momentum, β the
weight decay, v the momentum buffer, which begins at zero.

    λ = η |w| / (|g| + β |w|)          one where |w| or |g| is zero
    v <- m v + γ λ (g + β w)
    w <- w - v

The paper has γ inside the momentum, so v remembers the higher rates of the past when the rate falls. With
`lr_in_momentum=False` the rate is outside, as in `torch.optim.SGD`; the two are the same while γ is constant:

    v <- m v + λ (g + β w);    w <- w - γ v

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017, Algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch

from atoll.training.optimizers.layerwise import Block, LayerwiseOptimizer, check_ranges, norms_by_block, ratio_or_one


class LARS(LayerwiseOptimizer):
    """The optimizer LARS: layer-wise adaptive rate scaling.

    Args:
        parameters: the parameters or groups, as for every torch optimizer.
        lr: γ >= 0.
        momentum: m in [0, 1).
        weight_decay: β >= 0.
        trust: η > 0.
        lr_in_momentum: the paper's order, or torch's.
        skip_1d: parameters of at most one dimension (biases, norms) get no trust ratio and no decay.

    Raises:
        ValueError: an option is out of its range; all faults at once.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust: float = 0.001,
        lr_in_momentum: bool = True,
        skip_1d: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        check_ranges("lars", **options)
        super().__init__(parameters, {**options, "lr_in_momentum": lr_in_momentum, "skip_1d": skip_1d})

    def _update(self, blocks: list[Block]) -> None:
        found = norms_by_block(blocks, [block.weights for block in blocks], [block.gradients for block in blocks])
        for block, (weight, gradient) in zip(blocks, found, strict=True):
            group, decay = block.group, block.weight_decay
            steps = torch._foreach_add(block.gradients, block.weights, alpha=decay)
            if not block.is_skipped:
                trust = ratio_or_one(group["trust"] * weight, gradient + decay * weight, weight, gradient)
                torch._foreach_mul_(steps, list(trust.unbind()))
            buffers = self._buffers(block, "momentum_buffer")
            before, after = (group["lr"], 1.0) if group["lr_in_momentum"] else (1.0, group["lr"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, steps, alpha=before)
            torch._foreach_add_(block.weights, buffers, alpha=-after)
