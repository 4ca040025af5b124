"""The plain loop that every strategy is compared with. It imports nothing of the engine.

The global batch of a step is the same for all; what a rank gets of it is cut by rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

STEPS = 3
BATCH = 16


@dataclass(frozen=True)
class Trace:
    """The measurements of a training."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def plain_training(
    model: nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    batches: list[tuple[Any, Any]],
    optimizer: str,
    clip_norm: float | None = None,
) -> Trace:
    """A loop as one would write it."""
    made = make_optimizer(optimizer, list(model.named_parameters()))
    losses, norms = [], []
    model.train()
    for inputs, targets in batches:
        made.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:  # torch cannot clip it
                parameter.grad = parameter.grad.to_dense()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))))
        made.step()
        losses.append(value.item())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    return Trace(losses, norms, parameters, {name: b.clone() for name, b in model.named_buffers()})


def make_optimizer(kind: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [parameter for _, parameter in named]
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def token_batches(vocab: int, sequence: int, *, last: int = BATCH, ignored: bool = False) -> list[tuple[Any, Any]]:
    """Different tokens in every step; the last batch may be smaller, and some targets may not count."""
    generator = torch.Generator().manual_seed(5)
    sizes = [BATCH] * (STEPS - 1) + [last]
    found = []
    for size in sizes:
        tokens = torch.randint(0, vocab, (size, sequence + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if ignored:
            lengths = torch.randint(1, sequence, (size, 1), generator=generator)
            lengths[-(size // 2) :] = 0  # half of the examples have nothing to learn from
            targets[torch.arange(sequence) >= lengths] = -100
        found.append((inputs, targets))
    return found


def image_batches(*, last: int = BATCH) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(6)
    sizes = [BATCH] * (STEPS - 1) + [last]
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))
        for size in sizes
    ]
