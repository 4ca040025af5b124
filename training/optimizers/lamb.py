"""LAMB: Adam's step, scaled for each layer so that its length is in proportion to the norm of the layer's weights.

Legend: w the layer's weights, g its gradient, t the number of the step from 1, η the learning rate, λ the weight decay.

    m <- β₁ m + (1 - β₁) g;            m̂ = m / (1 - β₁^t)
    v <- β₂ v + (1 - β₂) g²;           v̂ = v / (1 - β₂^t)
    u = m̂ / (sqrt(v̂) + ε) + λ w
    w <- w - η φ(|w|) / |u| u          a ratio of one where |w| or |u| is zero; φ(z) = z, or z clamped to `bounds`

The paper's third version has no bias correction (m̂ = m, v̂ = v); its last one has.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, Algorithm 2.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from atoll.training.optimizers.layerwise import Block, LayerwiseOptimizer, check_ranges, norms_by_block, ratio_or_one


class LAMB(LayerwiseOptimizer):
    """The optimizer LAMB: layer-wise adaptive moments.

    Args:
        parameters: the parameters or groups, as for every torch optimizer.
        lr: η >= 0.
        betas: β₁ and β₂, in [0, 1).
        eps: ε > 0.
        weight_decay: λ >= 0.
        bias_correction: divide the moments by 1 - β^t.
        bounds: γ_l and γ_u, the smallest and largest φ(|w|); None: φ(z) = z.
        skip_1d: parameters of at most one dimension (biases, norms) get no trust ratio and no decay: Adam.

    Raises:
        ValueError: an option is out of its range; all faults at once.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        bounds: tuple[float, float] | None = None,
        skip_1d: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bounds": bounds}
        check_ranges("lamb", **options)
        super().__init__(parameters, {**options, "bias_correction": bias_correction, "skip_1d": skip_1d})

    def _update(self, blocks: list[Block]) -> None:
        directions = [self._directions(block) for block in blocks]
        found = norms_by_block(blocks, [block.weights for block in blocks], directions)
        for block, updates, (weight, update) in zip(blocks, directions, found, strict=True):
            if not block.is_skipped:
                bounds = block.group["bounds"]
                target = weight if bounds is None else weight.clamp(*bounds)
                torch._foreach_mul_(updates, list(ratio_or_one(target, update, weight, update).unbind()))
            torch._foreach_add_(block.weights, updates, alpha=-block.group["lr"])

    def _directions(self, block: Block) -> list[Tensor]:
        """Return u of each layer: Adam's step and the decay."""
        beta1, beta2 = block.group["betas"]
        first, second = self._buffers(block, "exp_avg"), self._buffers(block, "exp_avg_sq")
        torch._foreach_lerp_(first, block.gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, block.gradients, block.gradients, 1 - beta2)
        steps = [self._count(parameter) for parameter in block.parameters]
        if not block.group["bias_correction"]:
            beta1 = beta2 = 0.0
        spread = torch._foreach_sqrt(second)
        torch._foreach_div_(spread, [math.sqrt(1 - beta2**t) for t in steps])
        torch._foreach_add_(spread, block.group["eps"])
        updates = torch._foreach_div(first, spread)
        torch._foreach_div_(updates, [1 - beta1**t for t in steps])
        torch._foreach_add_(updates, block.weights, alpha=block.weight_decay)
        return list(updates)

    def _count(self, parameter: Tensor) -> float:
        """Return the number of this step; it lies on the CPU, as in torch's optimizers, so reading it does not wait."""
        state = self.state[parameter]
        state["step"] = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
        return float(state["step"])
