"""The early writeback of a growing file, so that a later fdatasync has little left to write."""

import ctypes

SYNC_FILE_RANGE_WRITE = 2
"""A flag of Linux's fcntl.h."""


def begin_writeback(fd: int, start: int, num_bytes: int) -> None:
    """Let the kernel start writing these bytes of a file to the disk.

    A hint without a guarantee: if the call does not exist or fails, fdatasync writes everything.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, num_bytes, SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
