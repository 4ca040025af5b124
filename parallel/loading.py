"""The import of modules without collections of garbage, which would visit all of them again and again.

What an import makes lives as long as the process: half of a million objects for torch. The collections meanwhile find
nothing and take a seventh of its time, and those at the end of the process as much again.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_command = False


def keep_modules() -> None:
    """Let no collection visit what `loading` has loaded, in a process of Atoll's own; its end collects nothing."""
    global _is_command
    _is_command = True
    atexit.register(gc.freeze)  # registered first, it runs after all other functions


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in the block, which imports modules; the collections go on after it, as before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _is_command:
            gc.freeze()
        if was_on:
            gc.enable()
