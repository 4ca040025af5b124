"""What the C library does with memory that was given back to it. Where there is no glibc nothing happens."""

import ctypes
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Of glibc's malloc.h; mallopt(3)."""

TRIM_BYTES, MMAP_BYTES = 32 << 20, 4 << 20

ARENAS = 2

MUCH_BYTES = 64 << 20
"""After so many bytes have passed through, it is worth asking for what is left of their buffers."""

_libc: Any = ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Keep the memory of one chunk for the next one.

    Of itself glibc gives it back to the kernel, which clears every page of it once more: of sending an update that was
    a third of the processor's time, and a download took a fifth longer in about one process of three.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        _libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def share_heaps() -> None:
    """Let all threads share two heaps: glibc would give each its own, and each keeps what it once needed."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Give the system what malloc keeps of buffers that are free again: those of a crowd's uploads, before a fold."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
