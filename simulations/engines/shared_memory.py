"""Memory for results that several processes may share: an anonymous file that each of them maps.

It is not in /dev/shm, whose size a container limits. A block is in use while any array of it is referenced; afterwards
it is reused, so that a round needs only the memory of the results in use at one time.
"""

import mmap
import os
import tempfile
import weakref
from collections import deque

from atoll.simulations.engines.rows import Form, Rows


def new_file(num_bytes: int) -> int:
    """Return the descriptor of a new file of this length."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("atoll-engine")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a file to memory, which stays valid while it is referenced, even after the descriptor is closed."""
    return mmap.mmap(descriptor, num_bytes)


class Blocks:
    """Blocks of rows that one process writes.

    Args:
        form: the form of the results.
        is_shared: True if other processes map the blocks, too.
    """

    def __init__(self, form: Form, *, is_shared: bool) -> None:
        self._form, self._is_shared = form, is_shared
        self._memory: list[mmap.mmap | bytearray] = []
        self._free: dict[int, deque[int]] = {}

    def take(self, count: int) -> tuple[int, Rows, int | None]:
        """Return an unused block of `count` rows: its number, its rows, and the descriptor of a new shared block."""
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
