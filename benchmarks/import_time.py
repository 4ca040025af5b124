"""The processor time of `import atoll` beside that of `import torch`, which it leaves to the calls that need it.

    python -m benchmarks.import_time [--pairs N]

Each import is in a process of its own; the sides alternate, after one pair that writes the caches.
"""

import argparse
import subprocess
import sys
from statistics import median

from benchmarks.processes import keep_bytecode
from benchmarks.report import Bar, conclude, say

PROGRAM = """
import sys, time
begun = time.process_time()
import {module}
print(time.process_time() - begun, len(sys.modules))
"""
BAR, BAR_S = 0.1, 0.15
"""The largest part of torch's time, and the largest time [s]."""


def measured(module: str) -> tuple[float, int]:
    """Return the processor time of an import [s], and the number of modules that are loaded then."""
    answer = subprocess.check_output([sys.executable, "-c", PROGRAM.format(module=module)], text=True)
    seconds, modules = answer.split()
    return float(seconds), int(modules)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    keep_bytecode()
    pairs = [(measured("atoll"), measured("torch")) for _ in range(parser.parse_args().pairs + 1)][1:]
    ours, theirs = (median(pair[side][0] for pair in pairs) for side in (0, 1))
    say(f"import atoll {1000 * ours:.1f} ms, import torch {1000 * theirs:.0f} ms of processor time")
    bars = [
        Bar.at_most("import atoll: times import torch", median(a[0] / b[0] for a, b in pairs), BAR),
        Bar.at_most("import atoll: seconds of a processor", ours, BAR_S),
    ]
    return conclude(
        "import_time",
        bars,
        ours={"seconds": ours, "modules": pairs[0][0][1], "pairs": len(pairs)},
        theirs={"seconds": theirs, "modules": pairs[0][1][1]},
    )


if __name__ == "__main__":
    sys.exit(main())
