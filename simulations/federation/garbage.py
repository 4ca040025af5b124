"""Fewer passes of Python's collector: a simulation makes hundreds of thousands of small values a second, and no cycles.

What an update, an event or a record occupies goes with its last reference. The collector would only walk over the
sites, the records and every library, again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100_000
"""Values more than have gone, until the young ones are looked through; Python's own is 700."""


@contextmanager
def few_collections() -> Iterator[None]:
    """What there is already is not looked at, and what comes seldom. Afterwards all is as before."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
