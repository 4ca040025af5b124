"""Lets the kernel begin to write a file to the disk while it still grows: a later fdatasync has little to wait for."""

import ctypes

SYNC_FILE_RANGE_WRITE = 2
"""Of Linux's fcntl.h."""


def begin_writeback(fd: int, start: int, num_bytes: int) -> None:
    """Send these bytes of a file on their way to the disk.

    Promises nothing: where there is no such call, or it fails, fdatasync does it all.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, start, num_bytes, SYNC_FILE_RANGE_WRITE)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
