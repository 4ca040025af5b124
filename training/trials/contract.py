"""Contract of a task with each of its steps: the loss is one real number, and a batch norm gets more than one row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from atoll.task.errors import TaskBroken

LONE_ROW = "Expected more than 1 value per channel"
"""The first words of torch's error (`torch.nn.functional._verify_batch_size`)."""


def one_loss(found: Any, *, is_trained: bool = False) -> torch.Tensor:
    """Return the result of a loss function as a tensor of no dimensions.

    Args:
        found: one real number, as a tensor of one element.
        is_trained: require that it has a gradient.

    Raises:
        TaskBroken: it is something else.
    """
    if not isinstance(found, torch.Tensor):
        _refuse(type(found).__name__)
    if found.numel() != 1:
        _refuse(f"shape {tuple(found.shape)}")
    if not found.is_floating_point():
        raise TaskBroken(f"the loss must be a float, got {found.dtype}: counts and complex numbers have no gradient")
    if is_trained and not found.requires_grad:
        raise TaskBroken(
            "the loss has no gradient: it was detached, or computed without the model's trained parameters"
        )
    single: torch.Tensor = found.reshape(()) if found.dim() else found
    return single


def _refuse(kind: str) -> None:
    raise TaskBroken(
        f"the loss must be a single number, the mean over the batch, as a tensor, got {kind} (where it is a sum and a "
        "weight, return their quotient, and the weight by Task(units=...))"
    )


@contextmanager
def lone_row_refused() -> Iterator[None]:
    """Surround a step, and add the way out, which torch's message lacks, to the error of a batch of one row.

    Raises:
        TaskBroken: a batch norm got one value per channel, as of a batch of one row.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(LONE_ROW):
            raise
        raise TaskBroken(
            "a batch norm has a single value per channel to normalize, as in a batch of one row: train on at least two "
            "rows (leave out a site with one, or choose another batch size), or use GroupNorm or LayerNorm"
        ) from error
