"""The last line of every benchmark: one JSON object.

name      name of the benchmark
bars      list of {name, value, bar, ok}: a figure, its bar, and whether it passes
ok        whether all bars pass
ours      Atoll's figures, with their configuration
theirs    those of the other side, or "not measured: REASON"
machine   the machine and its software
"""

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure with the bar that it must pass."""

    name: str
    value: float
    bar: str
    ok: bool

    @classmethod
    def below(cls, name: str, value: float, limit: float) -> "Bar":
        """Return a bar that a value below the limit passes."""
        return cls(name, round(value, 6), f"< {limit:g}", value < limit)

    @classmethod
    def at_most(cls, name: str, value: float, limit: float) -> "Bar":
        """Return a bar that a value up to the limit passes, the limit included."""
        return cls(name, round(value, 6), f"<= {limit:g}", value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float) -> "Bar":
        """Return a bar that a value from the limit on passes, the limit included."""
        return cls(name, round(value, 6), f">= {limit:g}", value >= limit)

    @classmethod
    def exactly(cls, name: str, value: float, wanted: float) -> "Bar":
        """Return a bar that only this value passes."""
        return cls(name, value, f"= {wanted:g}", value == wanted)


def conclude(name: str, bars: Sequence[Bar], *, ours: Any, theirs: Any, why_not: str = "") -> int:
    """Print the last line; return the exit code, which is 0 also when a bar is missed."""
    document = {
        "name": name,
        "bars": [asdict(bar) for bar in bars],
        "ok": all(bar.ok for bar in bars),
        "ours": ours,
        "theirs": theirs if theirs is not None else f"not measured: {why_not}",
        "machine": machine(),
    }
    print(json.dumps(document), flush=True)
    return 0


def say(text: str) -> None:
    """Print a line of progress to standard output."""
    print(text, flush=True)


def machine() -> dict[str, Any]:
    """Return the properties of the machine and its software that figures depend on."""
    import grpc
    import numpy

    return {
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "fdatasync_ms": round(1e3 * _fdatasync_s(), 3),
        "python_loop_ms": round(1e3 * _python_loop_s(), 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "numpy": numpy.__version__,
        "argv": sys.argv[1:],
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of all values."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the middle 95 % of the medians of resampled ratios (bootstrap)."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {name: round(of(values), digits) for name, of in (("median", median), ("min", min), ("max", max))}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _python_loop_s() -> float:
    """Return the seconds of a fixed loop, which show the share of a processor that this process gets at present."""
    begun, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number * number % 7
    return time.perf_counter() - begun


def _fdatasync_s() -> float:
    """Return the median seconds of a durable write of 4 KiB to the folder of temporary files; a round has several."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(31):
            os.pwrite(file.fileno(), bytes(4096), 0)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return median(times)
