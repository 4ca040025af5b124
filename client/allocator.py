"""What the C library does with memory that was given back to it."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h; mallopt(3)."""

TRIM_BYTES, MMAP_BYTES = 32 << 20, 4 << 20


def keep_freed_memory() -> None:
    """Keep the memory of one chunk for the next one.

    Of itself glibc gives it back to the kernel, which clears every page of it once more: of sending an update that was
    a third of the processor's time. Where there is no glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
