"""The page faults of steps that free what they allocate, and the memory that a building process gives back."""

import ctypes
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc, whose heap it is"),
]

STEPS = """
import resource, sys
import numpy as np
from atoll.ground.process.heap import keep_freed_blocks, returning_freed_blocks

def step():
    return [np.ones(2**20) for _ in range(8)] and None  # 64 MiB

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
"""

FAULTS = STEPS + "{first}\nstep(); step(); before = faults()\nfor _ in range(10): step()\nprint(faults() - before)"

BUILT = (
    STEPS
    + """
keep_freed_blocks()
before = resident()
with returning_freed_blocks():
    step()
    print(resident() - before)
"""
)


def printed(text: str) -> int:
    return int(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout)


def test_steps_find_the_pages_of_the_step_before():
    fresh, kept = printed(FAULTS.format(first="")), printed(FAULTS.format(first="keep_freed_blocks()"))
    assert kept < fresh / 10


def test_a_building_process_gives_freed_blocks_back():
    assert printed(BUILT) < 16 * 2**20


SHARED = """
import ctypes, threading
from atoll.ground.process.heap import share_heaps_among_threads

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
barrier, heaps = threading.Barrier(8), set()

def allocate():
    barrier.wait()
    block = libc.malloc(1000)
    barrier.wait()
    heaps.add(block >> 26)  # a thread's heap lies within an aligned 64 MiB

{first}
threads = [threading.Thread(target=allocate) for _ in range(8)]
[each.start() for each in threads]
[each.join() for each in threads]
print(len(heaps))
"""


@pytest.mark.skipif(sys.maxsize < 2**32, reason="heaps of threads have another size")
def test_threads_share_two_heaps():
    alone, shared = printed(SHARED.format(first="")), printed(SHARED.format(first="share_heaps_among_threads()"))
    assert shared <= 2 < alone
