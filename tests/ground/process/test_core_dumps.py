"""The memory in core dumps: none of it, here and in processes that are started later."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from atoll.ground.process.core_dumps import FILTER, leave_memory_out_of_core_dumps
FILTER.write_text("0x33")  # the default: this process may inherit less
print(int(FILTER.read_text(), 16) & 1)
leave_memory_out_of_core_dumps()
print(int(FILTER.read_text(), 16))
sys.stdout.flush()
subprocess.run(["cat", "/proc/self/coredump_filter"])
"""


@pytest.mark.real
@pytest.mark.skipif(not Path("/proc/self/coredump_filter").exists(), reason="this system has no filter of core dumps")
def test_a_process_and_its_children_dump_no_memory() -> None:
    given, *left = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.split()
    assert given == "1"
    assert [int(bits, 16) for bits in left] == [0, 0]
