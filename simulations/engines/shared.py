"""Memory for results, which several processes may see: a file that lies in no folder, mapped on both sides.

It is not in /dev/shm, whose size a container limits. Whoever reads results keeps a block for as long as it holds an
array of it; a block that nobody holds is used again, so that a round needs no more than what is held at one time.
"""

import mmap
import os
import tempfile
import weakref
from collections import deque

from atoll.simulations.engines.rows import Form, Rows


def new_file(num_bytes: int) -> int:
    """The descriptor of a new file of this length."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("atoll-engine")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """The file as memory; it stays mapped for as long as anybody holds it, whether the descriptor is open or not."""
    return mmap.mmap(descriptor, num_bytes)


class Blocks:
    """Blocks of rows that one process writes.

    Args:
        form: of the results.
        is_shared: whether other processes are to map them.
    """

    def __init__(self, form: Form, *, is_shared: bool) -> None:
        self._form, self._is_shared = form, is_shared
        self._memory: list[mmap.mmap | bytearray] = []
        self._free: dict[int, deque[int]] = {}

    def take(self, count: int) -> tuple[int, Rows, int | None]:
        """A block of so many rows that nobody holds: its number, its rows; of a new, shared one its descriptor."""
        free, descriptor = self._free.setdefault(count, deque()), None
        if not free:
            size = Rows.num_bytes(self._form, count)
            if self._is_shared:
                descriptor = new_file(size)
            free.append(len(self._memory))
            self._memory.append(bytearray(size) if descriptor is None else mapped(descriptor, size))
        number = free.popleft()
        rows = Rows(self._form, count, self._memory[number])
        weakref.finalize(rows.memory, free.append, number)
        return number, rows, descriptor
