"""The core dumps of a process that has secrets in memory: without that memory (Linux)."""

from contextlib import suppress
from pathlib import Path

FILTER = Path("/proc/self/coredump_filter")


def leave_memory_out_of_core_dumps() -> None:
    """Leave the memory of this process, and of those that it starts from now on, out of core dumps (core(5)).

    A core dump would put the keys and shares of secure sums on a disk. A limit of its size is no bound where the system
    pipes core dumps to a program, and the stacks of Python are in the log as before.
    """
    with suppress(OSError):  # another system
        FILTER.write_text("0", "ascii")
