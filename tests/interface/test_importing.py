"""The import of `atoll` alone: nothing but the standard library, in a fraction of the time of `import torch`."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys, time
before, begun = set(sys.modules), time.process_time()
import {module}
seconds = time.process_time() - begun
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
MODULES_MAX = 12
SECONDS_MAX = 0.15


def imported(module: str) -> tuple[float, list[str]]:
    """The processor time of an import in a process of its own [s], and the new modules."""
    answer = subprocess.check_output([sys.executable, "-c", PROGRAM.format(module=module)], cwd=ROOT, text=True)
    seconds, modules = json.loads(answer)
    return seconds, modules


def test_the_import_is_of_the_standard_library_alone() -> None:
    _, modules = imported("atoll")
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert foreign == {"atoll"}
    assert [name for name in modules if name.startswith("atoll")] == ["atoll"]
    assert len(modules) <= MODULES_MAX


def test_the_import_takes_a_small_part_of_the_processor_time_of_torch() -> None:
    ours = min(imported("atoll")[0] for _ in range(3))
    assert ours < SECONDS_MAX
    assert ours < imported("torch")[0] / 10
