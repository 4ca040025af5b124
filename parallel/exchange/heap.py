"""The C library's heap while a model is built by shares: freed parameters go back to the system (glibc alone).

glibc raises the size from which it maps blocks by themselves with the largest block that was freed. Smaller ones come
from its heap, which cannot shrink below the newest of them: a rank that builds a model parameter by parameter would
hold all of it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_MMAP_THRESHOLD = -3
"""The parameter of mallopt(3), from glibc's malloc.h."""

BUILDING_BYTES, TRAINING_BYTES = 256 << 10, 32 << 20
"""The size from which blocks are mapped: while a model is built, and afterwards, as high as glibc would raise it."""

_libc: Any = ctypes.CDLL(None)


@contextmanager
def returning_freed_blocks() -> Iterator[None]:
    """Return the freed blocks of this process to the system in a block."""
    if not hasattr(_libc, "mallopt"):
        yield
        return
    _libc.mallopt(M_MMAP_THRESHOLD, BUILDING_BYTES)
    try:
        yield
    finally:
        _libc.mallopt(M_MMAP_THRESHOLD, TRAINING_BYTES)
