"""Dropout for many clients as one group, with the mask that each client draws alone.

A local training seeds torch's generator, draws the seed of the order of the examples, and then the masks of each step
in the order of the layers. So each client gets a separate generator in the same state, from which the masks of its
examples are drawn:

    dropout        y = x b / (1 - p),  b ~ Bernoulli(1 - p) for each number, or for each channel
    alpha dropout  y = a (x b - α (1 - b)) + a α p,  a = 1 / sqrt((1 + α^2 p) (1 - p)),  α = 1.758

A mode of torch replaces all functions that draw masks, in layers and in the user's forward. Source of the second:
Klambauer et al., "Self-Normalizing Neural Networks", NeurIPS 2017.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atoll.simulations.engines.batched.measures import Sizes
from atoll.simulations.engines.batched.stack import CannotBatch

ALPHA = 1.7580993408473766
"""The negative limit of SELU, times -1."""


class Masks:
    """Random generators of the clients of a group.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._generators: list[torch.Generator] = []
        self._seeds: Sequence[int] = ()
        self._is_shuffled = False
        self.is_used = False
        """A flag that is set once a mask has been drawn."""
        self.is_watched = True
        """Whether functions with dropout are replaced, at a microsecond for each call of torch."""

    def begin(self, seeds: Sequence[int], *, is_shuffled: bool) -> None:
        """Seed the generators of a new group of clients; a training may draw the seed of its order first."""
        self._seeds, self._is_shuffled = seeds, is_shuffled
        self._generators.clear()

    def settle(self) -> None:
        """Stop replacing functions if none has drawn; on a CPU, the generator shows a later draw."""
        self.is_watched = self.is_used or self.device != "cpu"

    def take(self, sizes: Sizes) -> None:
        """Set the number of each client's examples in the step that begins."""
        self._sizes: list[int] = sizes.tolist()

    @property
    def clients(self) -> int:
        """The number of clients that take the step, m."""
        return len(self._sizes)

    def draw(self, shape: Sequence[int], p: float, axis: int = 1) -> torch.Tensor:
        """Draw the dropout masks b for the examples of all clients.

        Args:
            shape: (m, ..., n, ...), with each client's n examples, padding last, at an axis.
            p: the probability of a zero.
            axis: the axis of the examples.

        Returns:
            b in this shape; 0 for padding.

        Raises:
            CannotBatch: a device other than a CPU has one generator for all.
        """
        if self.device != "cpu":
            raise CannotBatch(f"dropout draws from the generator of {self.device}, which all clients share")
        self.is_used = True
        if not self._generators:
            self._generators = [self._generator(seed) for seed in self._seeds]
        masks = torch.zeros(*shape)
        for mask, size, generator in zip(masks, self._sizes, self._generators, strict=False):
            own = mask.narrow(axis - 1, 0, size)
            if own.is_contiguous():
                own.bernoulli_(1 - p, generator=generator)
            else:
                own.copy_(torch.empty(own.shape).bernoulli_(1 - p, generator=generator))
        return masks

    def _generator(self, seed: int) -> torch.Generator:
        generator = torch.Generator().manual_seed(seed)
        if self._is_shuffled:
            torch.randint(2**62, (), generator=generator)
        return generator


class Dropouts(TorchFunctionMode):
    """Mode in which functions with dropout draw from `Masks`.

    Args:
        masks: the generators of the clients.
        call: calls a function of one tensor with the examples of all clients (m n, ...), as `Shared.call`.
    """

    def __init__(self, masks: Masks, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._masks, self._call = masks, call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or its replacement."""
        kwargs = kwargs or {}
        if (form := _FORMS.get(func)) is not None:
            return self._dropout(form, *args, **kwargs)
        if func is functional.scaled_dot_product_attention and (kwargs.get("dropout_p") or len(args) > 4):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, form: "Form", input: torch.Tensor, p: float = 0.5, training: bool | None = None, inplace: bool = False
    ) -> torch.Tensor:
        if not (form.trains if training is None else training) or not p or not input.numel():
            return input
        return self._call(lambda x: dropped(self._masks, x, p, form), input)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Compute the attention with a mask of its weights, as torch does on a CPU."""
        if enable_gqa:
            raise CannotBatch("attention with dropout and enable_gqa is not supported")
        if is_causal:
            length = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(length, dtype=torch.bool, device=query.device).tril()
        weights = attention_weights(query, key, attn_mask, scale)
        return self._dropout(Form(), weights, dropout_p) @ value


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None
) -> torch.Tensor:
    """Compute softmax(q k^T s + mask), with a boolean mask of the attended keys, or a float one."""
    scores = query * (scale or query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a function with dropout."""

    by_channel: bool = False
    is_alpha: bool = False
    trains: bool = True
    """Default value of `training`."""


def dropped(masks: Masks, x: torch.Tensor, p: float, form: Form = Form()) -> torch.Tensor:
    """Apply dropout to x (m n, ...)."""
    if p == 1:
        return x * 0.0
    by_client = x.unflatten(0, (masks.clients, -1))  # type: ignore[no-untyped-call]
    kept = _kept(masks, by_client, p, form.by_channel)
    if form.is_alpha:
        a = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p))
        y = by_client * (kept * a) + (kept - 1).mul_(ALPHA * a).add_(ALPHA * a * p)
    else:
        y = by_client * kept.div_(1 - p)
    together: torch.Tensor = y.flatten(0, 1)
    return together


def _kept(masks: Masks, x: torch.Tensor, p: float, by_channel: bool) -> torch.Tensor:
    """Draw the dropout masks b for x (m, n, ...), in the order of its memory, as torch does."""
    if by_channel:
        return masks.draw((*x.shape[:3], *(1 for _ in x.shape[3:])), p)
    order = sorted(range(1, x.dim()), key=x.stride().__getitem__, reverse=True)
    kept = masks.draw((len(x), *(x.shape[axis] for axis in order)), p, 1 + order.index(1))
    return kept.permute(0, *(1 + order.index(axis) for axis in range(1, x.dim())))


_FORMS: dict[Callable[..., Any], Form] = {
    functional.dropout: Form(),
    torch.dropout: Form(),
    functional.dropout1d: Form(by_channel=True),
    functional.dropout2d: Form(by_channel=True),
    functional.dropout3d: Form(by_channel=True),
    torch.feature_dropout: Form(by_channel=True),
    functional.alpha_dropout: Form(is_alpha=True, trains=False),
    torch.alpha_dropout: Form(is_alpha=True),
    functional.feature_alpha_dropout: Form(by_channel=True, is_alpha=True, trains=False),
    torch.feature_alpha_dropout: Form(by_channel=True, is_alpha=True),
}
