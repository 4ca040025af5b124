"""The tuning of the C library's allocator for freed memory (glibc; no effect elsewhere)."""

import ctypes
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""

TRIM_BYTES, MMAP_BYTES = 32 << 20, 4 << 20

ARENAS = 2

MUCH_BYTES = 64 << 20
"""Traffic after which it pays to return the memory of its buffers [bytes]."""

_libc: Any = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Keep the memory of one chunk for the next one.

    By default glibc returns it to the kernel, which clears every page again: this took a third of the processor time of
    sending an update, and prolonged a download by a fifth in about one process of three.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        _libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def share_heaps() -> None:
    """Share two heaps among all threads: glibc would give each thread a separate heap, which never shrinks."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed buffers from malloc to the system, such as the buffers of many uploads before a fold."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
