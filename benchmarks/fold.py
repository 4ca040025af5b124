"""The exact fold against Flower's aggregate function: 16 and 64 updates of 25 million float32 parameters.

    python -m benchmarks.fold [--updates K ...] [--pairs N]

Both sides compute the weighted mean of the same numbers on all cores, in turns. Ours reads them from stored update
files in the page cache, adds the mean to the model, hashes and writes the new version and makes it durable; Flower's
numbers are in its memory all the time, and its result stays there. The time of making a file durable is reported beside
it, as the other side has no such step; the bar is on the whole. `make peers` installs the other side.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.streaming import TILE_ELEMENTS, Weighted, fold
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece
from atoll.tensors.updates.reader import StoredUpdate
from benchmarks.report import Bar, conclude, say, spread

NUM_PARAMETERS = 25_000_000
ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-peers" / "bin" / "python"
TILES = (1 << 17, 1 << 18, 1 << 19, 1 << 20)
SPEEDUP = 1.5


@dataclass(slots=True)
class Pairs:
    """The measurements with one number of updates."""

    num_updates: int
    tile_elements: int
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    their_peak_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all updates."""
        return 4 * NUM_PARAMETERS * self.num_updates

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        sides = {"ours": self.ours_s, "theirs": self.theirs_s}
        speeds = {f"{side}_gb_per_s": round(self.num_bytes / median(s) / 1e9, 2) for side, s in sides.items() if s}
        seconds = {f"{side}_s": spread(s) for side, s in sides.items() if s}
        return {"updates": self.num_updates, "tile_elements": self.tile_elements, **seconds, **speeds}


def make_updates(folder: Path, count: int) -> list[Weighted]:
    """Write files of normal numbers with weights 1, 2, 3, ..., and the magnitudes that the inspection would record."""
    pieces = (Piece("w", "F32", (0,), (NUM_PARAMETERS,), ""),)
    updates = []
    for k in range(count):
        path = folder / f"update-{k:03d}"
        values = np.random.default_rng(k).standard_normal(NUM_PARAMETERS, dtype=np.float32)
        values.tofile(path)
        magnitude = float(np.abs(values).max())
        updates.append(Weighted(StoredUpdate(path, pieces, {"w": magnitude}), k + 1))
    return updates


def ours(folder: Path, updates: list[Weighted], tile_elements: int) -> float:
    """Return the seconds of one whole fold."""
    begun = time.perf_counter()
    fold(folder / "base", updates, folder / "new", execution=Execution(os.cpu_count() or 1, tile_elements))
    return time.perf_counter() - begun


@contextmanager
def flower(updates: list[Weighted]) -> Iterator[subprocess.Popen[str]]:
    """Start the other side, which has the updates in its memory."""
    what = [f"{item.weight},{item.update.path}" for item in updates]
    command = [str(PEER), str(ROOT / "benchmarks" / "flower_fold.py"), *what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError("Flower's side did not start")
            yield process
        finally:
            process.stdin.close()


def theirs(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Run one aggregation of the other side, and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("again\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def measure(folder: Path, num_updates: int, num_pairs: int) -> Pairs:
    """Find the best tile, then measure pairs."""
    updates = make_updates(folder, num_updates)
    sweep = {tile: min(ours(folder, updates, tile) for _ in range(2)) for tile in TILES}
    say(f"  {num_updates} updates, by tile: " + ", ".join(f"{tile} {s:.3f} s" for tile, s in sweep.items()))
    pairs = Pairs(num_updates, TILE_ELEMENTS)
    if not PEER.exists():
        pairs.ours_s = [ours(folder, updates, TILE_ELEMENTS) for _ in range(num_pairs)]
        return pairs
    with flower(updates) as process:
        theirs(process)  # once, to warm up
        for _ in range(num_pairs):
            pairs.ours_s.append(ours(folder, updates, TILE_ELEMENTS))
            answer = theirs(process)
            pairs.theirs_s.append(answer["seconds"])
            pairs.their_peak_bytes = answer["peak_bytes"]
        check_same(folder, answer["first"])
    return pairs


def peak_accumulators(folder: Path, updates: list[StoredUpdate]) -> float:
    """Return the memory that one fold adds to a fresh process, in accumulators: float64 for each parameter."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_growth, (folder, updates)) / (8 * NUM_PARAMETERS)


def _peak_growth(folder: Path, updates: list[StoredUpdate]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak inherited from the parent
    before = _status("VmRSS")
    ours(folder, updates, TILE_ELEMENTS)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    """Return a value of /proc/self/status [bytes]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def largest_error(folder: Path, num_updates: int = 16, size: int = 100_000) -> float:
    """Return the relative L2 error of the mean against a float64 mean, of the worst of tensors from 1e-6 to 1e2."""
    rng, names = np.random.default_rng(1), {f"w{power}": 10.0**power for power in range(-6, 3)}
    safetensors_file.write(folder / "mixed", {name: np.zeros(size, np.float32) for name in names})
    weights, items, twins = rng.integers(1, 5000, num_updates), [], dict.fromkeys(names, 0.0)
    for k, weight in enumerate(weights):
        arrays = {name: (scale * rng.standard_normal(size)).astype(np.float32) for name, scale in names.items()}
        path = folder / f"mixed{k}"
        pieces = safetensors_file.write(path, arrays, durable=False)
        magnitudes = {name: float(np.abs(array).max()) for name, array in arrays.items()}
        start = safetensors_file.parse_header(path)[1]
        items.append(Weighted(StoredUpdate(path, pieces, magnitudes, data_start=start), int(weight)))
        twins = {name: twins[name] + int(weight) * arrays[name].astype(np.float64) for name in names}
    fold(folder / "mixed", items, folder / "mean", execution=Execution(os.cpu_count() or 1))
    found = safetensors_file.read(folder / "mean")
    exact = {name: twin / weights.sum() for name, twin in twins.items()}
    return max(float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])) for name in names)


def check_same(folder: Path, first: list[float]) -> None:
    """Check that both sides have the same result: the base is zero, so the new version is the mean."""
    np.testing.assert_allclose(safetensors_file.read(folder / "new")["w"][:8], first, rtol=1e-5, atol=1e-7)


def durable_s(folder: Path) -> float:
    """Return the seconds in which the disk makes the bytes of a new version durable."""
    data, times = bytes(4 * NUM_PARAMETERS), []
    for _ in range(5):
        begun = time.perf_counter()
        with (folder / "durable").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        times.append(time.perf_counter() - begun)
    return median(times)


def main() -> int:
    """Measure each number of updates, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fold", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, nargs="+", default=[16, 64], metavar="K")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    results, peaks = [], {}
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder = Path(name)
        safetensors_file.write(folder / "base", {"w": np.zeros(NUM_PARAMETERS, np.float32)})
        durable = durable_s(folder)
        for num_updates in arguments.updates:
            results.append(measure(folder, num_updates, arguments.pairs))
            say(f"  {results[-1].summary()}")
            peaks[num_updates] = peak_accumulators(folder, make_updates(folder, num_updates))
        error = largest_error(folder)
    bars = [
        Bar.at_least(f"times as fast as Flower, {pairs.num_updates} updates", _speedup(pairs), SPEEDUP)
        for pairs in results
        if pairs.theirs_s
    ]
    bars += [
        Bar.at_most(f"peak memory, {num_updates} updates [accumulators]", peak, 1.25)
        for num_updates, peak in peaks.items()
    ]
    bars.append(Bar.at_most("relative error of the worst tensor, magnitudes 1e-6 to 1e2 [1e-6]", error * 1e6, 1.0))
    our_figures = {"scales": [pairs.summary() for pairs in results], "file_made_durable_s": round(durable, 3)}
    their_figures = {"flower": "1.41.0", "peak_bytes": {pairs.num_updates: pairs.their_peak_bytes for pairs in results}}
    why = "run `make peers` first"
    return conclude("fold", bars, ours=our_figures, theirs=their_figures if PEER.exists() else None, why_not=why)


def _speedup(pairs: Pairs) -> float:
    return median(pairs.theirs_s) / median(pairs.ours_s)


if __name__ == "__main__":
    sys.exit(main())
