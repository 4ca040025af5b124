"""A model larger than memory: 16 updates of 2 GB folded within 600 MB, against reading the same bytes.

    python -m benchmarks.out_of_core [--megabytes N] [--updates K] [--limit MB]

Each piece of work is a process in a memory cgroup of that size, which includes the page cache; where no cgroup can be
made, the largest resident set counts. The files are dropped from the page cache before each. The bits of the new
version are compared with the same formulas on slices in memory, element by element.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.grid import grid_exponent
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.rules.coordinate import Median
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.updates.reader import StoredUpdate
from benchmarks.report import Bar, conclude, say

CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
"""The folder of cgroups of version 1 and of version 2, and the file of the limit."""

BLOCK = 1 << 20
SLICES = 24
TIMES_READING = 1.5


# ---------------------------------------------------------------- the child: one piece of work in little memory


def work(kind: str, folder: Path) -> None:
    """Do one piece of work, and print its seconds and its largest resident set."""
    begun = time.perf_counter()
    if kind == "read":
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_read, [folder / "base", *_update_paths(folder)]))
    else:
        rule = Median() if kind == "median" else None
        execution = Execution(os.cpu_count() or 1)
        fold(folder / "base", updates_in(folder), folder / kind, step=Step(rule=rule), execution=execution)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


def _read(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def updates_in(folder: Path) -> list[Weighted]:
    """Return the updates as the coordinator records them."""
    known = json.loads((folder / "known.json").read_text())
    piece = Piece("w", "F32", (0,), (known["elements"],), "")
    return [
        Weighted(StoredUpdate(path, (piece,), {"w": magnitude}), k + 1)
        for k, (path, magnitude) in enumerate(zip(_update_paths(folder), known["magnitudes"], strict=True))
    ]


def _update_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("update-*"))


# ---------------------------------------------------------------- the parent


def make_files(folder: Path, num_elements: int, num_updates: int) -> None:
    """Write a base and updates of normal numbers, block by block."""
    rng = np.random.default_rng(0)
    with safetensors_file.TensorFileWriter(folder / "base", [Tensor("w", "F32", (num_elements,))]) as writer:
        for begin in range(0, num_elements, BLOCK):
            writer.append(rng.standard_normal(min(BLOCK, num_elements - begin), dtype=np.float32))
        writer.finish()
    magnitudes = []
    for k in range(num_updates):
        magnitude = 0.0
        with (folder / f"update-{k:03d}").open("wb") as file:
            for begin in range(0, num_elements, BLOCK):
                values = rng.standard_normal(min(BLOCK, num_elements - begin), dtype=np.float32)
                magnitude = max(magnitude, float(np.abs(values).max()))
                file.write(values.data)
            os.fsync(file.fileno())
        magnitudes.append(magnitude)
    (folder / "known.json").write_text(json.dumps({"elements": num_elements, "magnitudes": magnitudes}))


def measured(kind: str, folder: Path, limit_bytes: int) -> dict[str, Any]:
    """Run one child in its cgroup, with an empty page cache."""
    for path in [folder / "base", *_update_paths(folder)]:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    cgroup = _cgroup(limit_bytes)
    try:
        enter = _entering(cgroup)
        command = [sys.executable, "-m", "benchmarks.out_of_core", "--child", kind, str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=enter)
    finally:
        if cgroup is not None:
            cgroup.rmdir()
    if done.returncode:
        return {"seconds": float("inf"), "peak_bytes": 0, "in_cgroup": cgroup is not None, "exit": done.returncode}
    return {**json.loads(done.stdout), "in_cgroup": cgroup is not None}


def _cgroup(limit_bytes: int) -> Path | None:
    for root, limit in CGROUPS:
        path = Path(root) / f"atoll-bench-{os.getpid()}"
        with suppress(OSError):
            path.mkdir()
            try:
                (path / limit).write_text(str(limit_bytes))
                return path
            except OSError:
                path.rmdir()
    return None


def _entering(cgroup: Path | None) -> Callable[[], None] | None:
    if cgroup is None:
        return None
    return lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())) and None


def wrong_elements(folder: Path, name: str, expected: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]) -> int:
    """Return the number of elements, in random slices of a version, that differ in bits from `expected` in memory."""
    updates = updates_in(folder)
    num_elements = json.loads((folder / "known.json").read_text())["elements"]
    _, start = safetensors_file.parse_header(folder / "base")
    wrong, length = 0, min(BLOCK, num_elements)
    for begin in np.random.default_rng(1).integers(0, num_elements - length + 1, SLICES).tolist():
        rows = np.stack([np.fromfile(u.update.path, np.float32, length, offset=4 * begin) for u in updates])
        base, new = (np.fromfile(folder / n, np.float32, length, offset=start + 4 * begin) for n in ("base", name))
        wrong += int((expected(rows, base).view(np.uint32) != new.view(np.uint32)).sum())
    return wrong


def exact_mean(updates: list[Weighted]) -> Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]:
    """Return the formulas of `grid` on whole arrays."""
    weights = [item.weight for item in updates]
    magnitude = max(item.update.magnitudes["w"] for item in updates)
    quantum = 2.0 ** grid_exponent(float(magnitude), total_weight=sum(weights), count=len(weights))

    def expected(rows: NDArray[Any], base: NDArray[Any]) -> NDArray[Any]:
        on_grid = sum(np.rint(row.astype(np.float64) * (w / quantum)) for row, w in zip(rows, weights, strict=True))
        return np.asarray((base + on_grid * quantum / sum(weights)).astype(np.float32))

    return expected


def median_of(rows: NDArray[Any], base: NDArray[Any]) -> NDArray[Any]:
    """Return the base plus the median of the rows, element by element."""
    ordered, count = np.sort(rows, axis=0).astype(np.float64), len(rows)
    return np.asarray((base + (ordered[(count - 1) // 2] + ordered[count // 2]) * 0.5).astype(np.float32))


def main() -> int:
    """Make the files, then do each piece of work, and print the result."""
    if sys.argv[1:2] == ["--child"]:
        work(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.out_of_core", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--megabytes", type=int, default=2000, help="megabytes of one update")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--limit", type=int, default=600, help="memory limit in megabytes")
    arguments = parser.parse_args()
    limit = arguments.limit * 10**6
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder = Path(name)
        make_files(folder, arguments.megabytes * 10**6 // 4, arguments.updates)
        say(f"  {arguments.updates} updates of {arguments.megabytes} MB are made")
        seen: dict[str, Any] = {}
        for kind in ("read", "mean", "read again", "median"):
            seen[kind] = measured(kind.removesuffix(" again"), folder, limit)
            say(f"  {kind}: {seen[kind]}")
        wrong = {
            "mean": wrong_elements(folder, "mean", exact_mean(updates_in(folder))),
            "median": wrong_elements(folder, "median", median_of),
        }
    reading = min(seen["read"]["seconds"], seen["read again"]["seconds"])
    bars = []
    for kind in ("mean", "median"):
        bars.append(Bar.at_most(f"{kind}: times as long as reading", seen[kind]["seconds"] / reading, TIMES_READING))
        bars.append(Bar.exactly(f"{kind}: elements with other bits than in memory", wrong[kind], 0))
        bars.append(Bar.below(f"{kind}: resident memory [MB]", seen[kind]["peak_bytes"] / 1e6, arguments.limit))
    ours = {"updates": arguments.updates, "megabytes": arguments.megabytes, "limit_mb": arguments.limit, **seen}
    why = "the other side of this one is the disk: reading the same bytes with as many threads"
    return conclude("out_of_core", bars, ours=ours, theirs=None, why_not=why)


if __name__ == "__main__":
    sys.exit(main())
