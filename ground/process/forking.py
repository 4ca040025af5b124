"""The fork of a process: its children must neither collect its garbage nor share the positions of its open files."""

import fcntl
import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

DESCRIPTORS = "/proc/self/fd"
"""The folder of this process's descriptors, where Linux has it."""

STANDARD = (0, 1, 2)
"""The descriptors of input, output and errors."""


@contextmanager
def leaving_garbage() -> Iterator[None]:
    """Keep all present objects out of the garbage collections of processes that are forked meanwhile.

    A child that frees an object of its parent's threads, such as a channel of gRPC, waits for them forever or is killed
    by signal 11; and each object that a collection visits costs the copy of its page.
    """
    is_frozen = gc.get_freeze_count() > 0  # by a fork server (`frozen`), for good
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def reopen_files() -> None:
    """Reopen the files of this newly forked process, so that its positions in them differ from its parent's.

    An inherited descriptor shares its position with the parent and with the parent's other children: two processes that
    seek and then read a row may each read at the other's position. The files of Python and of C libraries keep the
    numbers of their descriptors. Files that are only written, such as a log, stay shared, and so does the terminal.
    """
    if not os.path.isdir(DESCRIPTORS):
        return
    for descriptor in map(int, os.listdir(DESCRIPTORS)):
        with suppress(OSError):  # the listing's own, which is closed by now, or a file that may not be opened again
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            is_read = flags & os.O_ACCMODE != os.O_WRONLY and stat.S_ISREG(os.fstat(descriptor).st_mode)
            if is_read and descriptor not in STANDARD:
                _reopen(descriptor, flags)


def _reopen(descriptor: int, flags: int) -> None:
    position, is_inherited = os.lseek(descriptor, 0, os.SEEK_CUR), os.get_inheritable(descriptor)
    other = os.open(f"{DESCRIPTORS}/{descriptor}", flags)
    try:
        os.lseek(other, position, os.SEEK_SET)
        os.dup2(other, descriptor, inheritable=is_inherited)
    finally:
        os.close(other)
