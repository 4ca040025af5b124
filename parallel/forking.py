"""The fork of a process whose children must not collect its garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_garbage() -> Iterator[None]:
    """Keep all present objects out of the garbage collections of processes that are forked meanwhile.

    A child that frees an object of its parent's threads, such as a channel of gRPC, waits for them for ever or is
    ended by signal 11; and each object that a collection visits costs the copy of its page.
    """
    is_frozen = gc.get_freeze_count() > 0  # by a fork server (`frozen`), for good
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
