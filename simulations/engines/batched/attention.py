"""Attention of many clients as one group: nn.MultiheadAttention, alone and in torch's transformer layers.

    q, k, v = x W_q^T + b_q, ...;  y = dropout(softmax(q k^T / sqrt(d) + mask)) v, for each head of d numbers;  y W_o^T

Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from atoll.simulations.engines.batched.dropout import attention_weights, dropped
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.batched.stacked_layers import Stacked, linear


class Attention(Stacked):
    """The stacked nn.MultiheadAttention."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend in the sequences of (m n) examples, as torch does; `attn_mask` has the causal mask, if any.

        Raises:
            CannotBatch: there is one sequence without an axis of examples.
        """
        if query.dim() != 3:
            raise CannotBatch(f"{self.prefix}: a single sequence is not stacked")
        axis = 0 if self.layer.batch_first else 1
        others = () if query is key and key is value else (key, value)

        def run(padding: torch.Tensor | None, mask: torch.Tensor | None, *inputs: torch.Tensor) -> Any:
            every = [x if axis == 0 else x.transpose(0, 1) for x in inputs]
            y, weights = self._attend(every, _mask(padding, mask, self.layer.num_heads), need_weights)
            y = self.shared.laid_out(y)
            y = y if axis == 0 else y.transpose(0, 1)
            if not need_weights or weights is None:
                return y
            return y, weights.mean(1) if average_attn_weights else weights

        axes = (0, 0 if attn_mask is not None and attn_mask.dim() == 3 else None, *(axis for _ in (query, *others)))
        out_axes = (axis, 0) if need_weights else (axis,)
        found = self.shared.call(run, key_padding_mask, attn_mask, query, *others, axes=axes, out_axes=out_axes)
        return found if need_weights else (found, None)

    def _attend(
        self, inputs: list[torch.Tensor], mask: torch.Tensor | None, need_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map (m n, L, E) to the outputs (m n, L, E), and the weights (m n, heads, L, S) if they are needed."""
        heads, p = self.layer.num_heads, self.layer.dropout if self.layer.training else 0.0
        projected = self._of_self(inputs[0]) if len(inputs) == 1 else self._of_others(*inputs)
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in projected)  # type: ignore[no-untyped-call]
        weights = None
        if p or need_weights:
            weights = attention_weights(q, k, mask)
            weights = dropped(self.shared.masks, weights, p) if p else weights
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        bias = f"{self.prefix}out_proj.bias" if self.layer.out_proj.bias is not None else None
        return linear(self.shared, f"{self.prefix}out_proj.weight", bias, y.transpose(1, 2).flatten(2)), weights

    def _of_self(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v of the same inputs."""
        if (weight := self.named("in_proj_weight")) is None:
            return self._of_others(x, x, x)
        return linear(self.shared, weight, self.named("in_proj_bias"), x).chunk(3, -1)

    def _of_others(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v of different inputs."""
        if (packed := self.named("in_proj_weight")) is not None:
            weights = self.shared.leaf(packed).chunk(3, 1)
        else:
            weights = tuple(self.shared.leaf(f"{self.prefix}{name}_proj_weight") for name in "qkv")
        name = self.named("in_proj_bias")
        biases = self.shared.leaf(name).chunk(3, 1) if name else (None, None, None)
        return tuple(map(_projected, (query, key, value), weights, biases))

    @staticmethod
    def obstacles(layer: Any) -> Iterator[str]:
        """Yield the options that are not supported."""
        if layer.bias_k is not None or layer.add_zero_attn:
            yield "has add_bias_kv or add_zero_attn set"


def _projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x W^T + b of each client, from x (m n, L, in) and W (m, out, in)."""
    by_client = x.reshape(len(weight), -1, x.shape[-1])
    across = weight.transpose(1, 2)
    y = torch.bmm(by_client, across) if bias is None else torch.baddbmm(bias.unsqueeze(1), by_client, across)
    return y.reshape(*x.shape[:-1], -1)


def _mask(padding: torch.Tensor | None, mask: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Return the sum of both masks, for (m n, heads, L, S); a boolean one marks the ignored keys."""
    parts = []
    if mask is not None:
        parts.append(_as_numbers(mask.view(-1, heads, *mask.shape[1:]) if mask.dim() == 3 else mask))
    if padding is not None:
        parts.append(_as_numbers(padding)[:, None, None])
    return sum(parts[1:], parts[0]) if parts else None


def _as_numbers(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)
