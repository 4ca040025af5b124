"""Imports without collections: what they bring is excluded, and what a later passage leaves behind is freed."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, weakref
from atoll.ground.process.loading import keep_modules, loading

class Ring:
    def __init__(self):
        self.me = self

keep_modules()
before = gc.get_freeze_count()
with loading():
    import statistics
imported = gc.get_freeze_count()
rings = []
for _ in range(10):
    ring = Ring()
    rings.append(weakref.ref(ring))
    del ring
    with loading():
        import statistics
gc.collect()
assert gc.isenabled()
print(imported > before, gc.get_freeze_count() - imported, sum(ring() is not None for ring in rings))
"""


@pytest.mark.real
def test_a_passage_that_imports_nothing_keeps_no_garbage() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "0", "0"]
