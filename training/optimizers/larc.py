"""LARC: SGD with momentum in which a layer's rate is clipped to its LARS rate.

Legend: w the layer's weights, g its gradient, γ the learning rate, η the trust coefficient, m the momentum, β the
weight decay, v the momentum buffer, which begins at zero.

    λ = η |w| / (|g| + β |w|)
    r = min(λ / γ, 1)                  so the layer's rate γ r is the smaller of γ and λ
    v <- m v + r (g + β w)             v <- m v + g where |w| or |g| is zero
    w <- w - γ v

Source: NVIDIA apex, `apex/parallel/LARC.py` with `clip=True` around `torch.optim.SGD`, after You et al. 2017 (LARS).
"""

from collections.abc import Iterable
from typing import Any

import torch

from atoll.training.optimizers.layerwise import Block, LayerwiseOptimizer, check_ranges, norms_by_block


class LARC(LayerwiseOptimizer):
    """The optimizer LARC: layer-wise adaptive rate clipping.

    Args:
        parameters: the parameters or groups, as for every torch optimizer.
        lr: γ >= 0.
        momentum: m in [0, 1).
        weight_decay: β >= 0.
        trust: η > 0.
        skip_1d: parameters of at most one dimension (biases, norms) are plain SGD without decay.

    Raises:
        ValueError: an option is out of its range; all faults at once.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
        skip_1d: bool = True,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        check_ranges("larc", **options)
        super().__init__(parameters, {**options, "skip_1d": skip_1d})

    def _update(self, blocks: list[Block]) -> None:
        found = norms_by_block(blocks, [block.weights for block in blocks], [block.gradients for block in blocks])
        for block, (weight, gradient) in zip(blocks, found, strict=True):
            group, lr = block.group, block.group["lr"]
            steps = list(block.gradients)
            if not block.is_skipped:
                is_defined = (weight > 0) & (gradient > 0)
                decay = is_defined.to(weight.dtype) * block.weight_decay
                bounded = (
                    group["trust"] * weight / (gradient + decay * weight) / lr if lr > 0 else torch.ones_like(weight)
                )
                ratio = torch.where(is_defined, bounded.clamp(max=1.0), torch.ones_like(weight))
                decayed = torch._foreach_mul(block.weights, list((ratio * decay).unbind()))
                steps = list(torch._foreach_mul(block.gradients, list(ratio.unbind())))
                torch._foreach_add_(steps, decayed)
            buffers = self._buffers(block, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, steps)
            torch._foreach_add_(block.weights, buffers, alpha=-lr)
