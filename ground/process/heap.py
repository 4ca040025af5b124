"""The C library's heaps (glibc only): how many there are, and what becomes of freed blocks.

Freed blocks are kept for training, and returned while a model is built.

A block above a limit is mapped by itself, and goes back to the system when it is freed; the kernel then clears every
page of the next one. glibc raises that limit with the largest block that was freed, to 32 MiB at most, and gives back
the top of its heap where it is larger than twice the limit.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""The parameters of mallopt(3), from glibc's malloc.h."""

BUILDING_BYTES, TRAINING_BYTES = 256 << 10, 32 << 20
"""The size from which blocks are mapped, while a model is built and afterwards (the highest that glibc would
choose)."""

TOP_BYTES, KEPT_BYTES = 128 << 10, 1 << 30
"""The size of the free top that the heap keeps, while a model is built (the default) and afterwards."""

ARENAS_MAX = 2
"""Largest number of heaps of a process with few, short calls on threads."""

_libc: Any = ctypes.CDLL(None)


def share_heaps_among_threads() -> None:
    """Let the threads of this process share its heaps, of which each thread has one otherwise, with free blocks in it.

    A dashboard whose pages are read on four threads has 139 MB in place of 157 then, at 1,000 clients. Call it before
    the first thread starts.
    """
    _set(M_ARENA_MAX, ARENAS_MAX)


def keep_freed_blocks() -> None:
    """Keep freed blocks of up to 32 MiB for the next ones of this process.

    A step of training frees all that it has allocated: the activations of a CNN cost a tenth of its processor time in
    pages alone, the contents of a ServerApp half of its process's.
    """
    _set_sizes(TRAINING_BYTES, KEPT_BYTES)


@contextmanager
def returning_freed_blocks() -> Iterator[None]:
    """Return the freed blocks of this process to the system in a block, and keep them afterwards.

    The heap cannot shrink below the newest of its blocks: a rank that builds a model parameter by parameter would hold
    all of it.
    """
    _set_sizes(BUILDING_BYTES, TOP_BYTES)
    try:
        yield
    finally:
        keep_freed_blocks()


def _set_sizes(mapped_bytes: int, top_bytes: int) -> None:
    _set(M_MMAP_THRESHOLD, mapped_bytes)
    _set(M_TRIM_THRESHOLD, top_bytes)


def _set(parameter: int, value: int) -> None:
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(parameter, value)
