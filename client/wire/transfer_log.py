"""The progress of a long transfer in the agent's log: the completed share, and the time left."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.ground.printable import printable_size

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds from the beginning of a transfer to its first line, and between two lines."""


@contextmanager
def told(what: str, total: int, position: Callable[[], int]) -> Iterator[None]:
    """Log the progress of the transfer in the block every `EVERY_S`; a shorter one logs nothing.

    Args:
        what: the beginning of the line, such as "uploading the update of round 3".
        total: the size of the whole [bytes].
        position: returns the number of bytes transferred.
    """
    task = asyncio.ensure_future(_tell(what, total, position))
    try:
        yield
    finally:
        task.cancel()


async def _tell(what: str, total: int, position: Callable[[], int]) -> None:
    loop = asyncio.get_running_loop()
    first, begun = position(), loop.time()
    while True:
        await asyncio.sleep(EVERY_S)
        logger.info("%s: %s", what, so_far(first, position(), total, loop.time() - begun))


def so_far(first: int, now: int, total: int, elapsed_s: float) -> str:
    """Return a transfer's progress as text: bytes transferred, their share, and the seconds left.

    Args:
        first: bytes present at its start.
        now: bytes present now.
        total: the size of the whole.
        elapsed_s: seconds since its start.
    """
    share = now / total if total else 1.0
    left = f"{elapsed_s * (total - now) / (now - first):.0f} s left" if now > first else "nothing arrives"
    return f"{printable_size(now)} of {printable_size(total)} ({share:.0%}), {left}"
