"""The import of modules without garbage collections, which would visit all of them again and again.

The objects of an import live as long as the process: half a million for torch. Collections during the import find
nothing and take a seventh of its time, and collections at the end of the process as much again.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_is_command = False


def keep_modules() -> None:
    """Make `loading` exclude what it imports from garbage collections; the exit of this process collects nothing."""
    global _is_command
    _is_command = True
    atexit.register(gc.freeze)  # registered first, it runs after all other functions


@contextmanager
def loading() -> Iterator[None]:
    """Suspend garbage collection in the block, which imports modules.

    A block that finds them imported excludes nothing: a process that reads views for days passes here at each, and
    what it has excluded from collections is never freed.
    """
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if _is_command and len(sys.modules) > num_modules:
            gc.freeze()
        if was_on:
            gc.enable()
