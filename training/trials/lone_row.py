"""The refusal of a batch of one row by a batch norm, with the way out, which torch's message lacks."""

from collections.abc import Iterator
from contextlib import contextmanager

from atoll.task.errors import TaskBroken

WORDS = "Expected more than 1 value per channel"
"""The first words of torch's error (`torch.nn.functional._verify_batch_size`)."""


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
