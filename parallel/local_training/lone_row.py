"""The refusal of a batch of one row by a batch norm, in words of Atoll: torch names a tensor's size and no way out."""

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.parallel.task.errors import TaskBroken

WORDS = "Expected more than 1 value per channel"
"""The beginning of torch's own error (`torch.nn.functional._verify_batch_size`)."""


@contextmanager
def lone_row_refused() -> Iterator[None]:
    """Surround a training step.

    Raises:
        TaskBroken: a batch norm got one value per channel, as of a batch of one row.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(WORDS):
            raise
        raise TaskBroken(
            "a batch norm has a single value per channel to normalize, as in a batch of one row: train on at least two "
            "rows (leave out a site with one, or choose another batch size), or use GroupNorm or LayerNorm"
        ) from error
