"""Robust rules over stored updates: seconds for 50 updates of a million float32 each, on all cores.

    python -m benchmarks.robust [--updates K] [--elements N] [--pairs N] [--threads N]

Ours reads the updates from their files (in the page cache, as they are when a round closes) and gives the float64
update, in tiles of bounded memory; a fifth of the updates is taken for malicious. The other sides are the tightest
loop by hand (`tight_sort`: the same reads, and numpy's fastest way to put the values in order), and numpy as a script
would use it, all values in memory before the clock starts: `median`, and a trimmed mean by `partition`, at the best of
the printed layouts and threads. All sides alternate, and must agree; a ratio is the median of those of the turns. The
rules that look at the geometry of the updates have no bar: two passes over the files, the first of which is the Gram
matrix.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.combine import combine, mixing_for
from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.geometric import CenteredClipping, GeometricMedian, MultiKrum, NearestNeighbourMixing
from atoll.aggregation.rules.rule import Rule, takes_centre
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader
from atoll.tensors.updates.sources import Zeros
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.tight_sort import STEPS, WAYS, TightSort

LIMIT_S, LIMIT_OF_TIGHT = 0.15, 0.8
RANGE = 1 << 17
"""Elements for which a rule is called at once, as the fold does it."""

Array = NDArray[Any]


class Ours:
    """The updates as files, and what applies rules to them."""

    def __init__(self, rows: Array, folder: Path, threads: int, stack: ExitStack) -> None:
        self._tensor, self._threads = Tensor("w", "F32", rows.shape[1:]), threads
        self.pool = stack.enter_context(ThreadPoolExecutor(threads))
        self.paths = [folder / f"{k:03d}" for k in range(len(rows))]
        self._readers = {}
        for path, row in zip(self.paths, rows, strict=True):
            path.write_bytes(row.tobytes())
            update = StoredUpdate(path, (Piece("w", "F32", (0,), row.shape, ""),))
            self._readers[path.name] = stack.enter_context(UpdateReader(update))

    def __call__(self, rule: Rule) -> Array:
        """Return the aggregate of a rule over the updates."""
        mixing = mixing_for(rule, (self._tensor,), self._readers, centre=Zeros(), threads=self._threads)
        sources = [*self._readers.values(), *[Zeros()] * takes_centre(rule)]
        starts = range(0, self._tensor.num_elements, RANGE)
        ranges = ((start, min(start + RANGE, self._tensor.num_elements)) for start in starts)
        return np.concatenate(
            list(self.pool.map(lambda ends: combine(self._tensor, *ends, sources, rule, mixing), ranges))
        )


def numpy_median(rows: Array, axis: int, num_malicious: int) -> Array:
    return np.asarray(np.median(rows, axis=axis))


def numpy_trimmed_mean(rows: Array, axis: int, num_malicious: int) -> Array:
    least, most = num_malicious, rows.shape[axis] - num_malicious
    parted = np.partition(rows, (least, most - 1), axis=axis)
    middle = parted[least:most] if axis == 0 else parted[:, least:most]
    return np.asarray(middle.mean(axis=axis, dtype=np.float64))


def whole(rule: Callable[..., Array], rows: Array, num_malicious: int, threads: int) -> Array:
    """Apply a rule of numpy to the rows, with a part of the elements for each thread."""
    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(rows, threads, axis=1)
        return np.concatenate(list(pool.map(lambda part: rule(part, 0, num_malicious), parts)))


def transposed(rule: Callable[..., Array], rows: Array, num_malicious: int, threads: int) -> Array:
    """Apply a rule of numpy to a copy in which the values of an element lie side by side."""
    with ThreadPoolExecutor(threads) as pool:
        parts = np.array_split(rows, threads, axis=1)
        return np.concatenate(list(pool.map(lambda part: rule(np.ascontiguousarray(part.T), 1, num_malicious), parts)))


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def best_of(actions: dict[str, Callable[[], Array]]) -> tuple[str, Callable[[], Array]]:
    """Return the name of the fastest action, and the action."""
    found = {}
    for name, action in actions.items():
        found[name] = min(seconds(action) for _ in range(3))
        say(f"  {name}: {found[name]:.3f} s")
    name = min(found, key=lambda name: found[name])
    return name, actions[name]


def in_memory(rule: Callable[..., Array], rows: Array, num_malicious: int, threads: Iterable[int]) -> Any:
    """Return the fastest way to use a rule of numpy's."""
    return best_of(
        {
            f"{rule.__name__}, {way.__name__}, {number} threads": partial(way, rule, rows, num_malicious, number)
            for number in sorted(set(threads))
            for way in (whole, transposed)
        }
    )


def by_hand(tight: TightSort, first: int, stop: int) -> Any:
    """Return the tightest loop for the values of these ranks."""
    steps = {f"{way.__name__}, {step} elements": (way, step) for step in STEPS for way in WAYS}
    return best_of({f"by hand, {name}": partial(tight, *how, first, stop) for name, how in steps.items()})


def compare(sides: dict[str, Callable[[], Array]], num_turns: int) -> dict[str, list[float]]:
    """Time all sides in turns, after one call of each, which must agree with the first."""
    first, *others = (action() for action in sides.values())
    for other in others:
        np.testing.assert_allclose(first, other, rtol=1e-6, atol=1e-6)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(num_turns):
        for name in sides if turn % 2 else reversed(sides):
            taken[name].append(seconds(sides[name]))
    return taken


def main() -> int:
    """Run the measurement and print its last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robust", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--updates", type=int, default=50, help="of one round")
    parser.add_argument("--elements", type=int, default=1_000_000, help="float32 values of each")
    parser.add_argument("--pairs", type=int, default=9, help="measurements of both sides")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    f = arguments.updates // 5
    rows = np.random.default_rng(0).standard_normal((arguments.updates, arguments.elements), np.float32)
    middle = (arguments.updates - 1) // 2, arguments.updates // 2 + 1
    coordinate: dict[str, tuple[Rule, Callable[..., Array], tuple[int, int]]] = {
        "median": (Median(), numpy_median, middle),
        "trimmed mean": (TrimmedMean(f), numpy_trimmed_mean, (f, arguments.updates - f)),
    }
    geometric: list[Rule] = [
        MultiKrum(f),
        GeometricMedian(),
        CenteredClipping(1e3),
        NearestNeighbourMixing(f, TrimmedMean(f)),
    ]
    bars, figures, others = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder, ExitStack() as stack:
        run = Ours(rows, Path(folder), arguments.threads, stack)
        tight = TightSort(run.paths, arguments.elements, RANGE, run.pool)
        stack.callback(tight.close)
        for name, (rule, other, ranks) in coordinate.items():
            setting, theirs = in_memory(other, rows, f, (1, arguments.threads))
            way, loop = by_hand(tight, *ranks)
            sides = {"ours": partial(run, rule), "by hand": loop, "numpy": theirs}
            taken = compare(sides, arguments.pairs)
            say(f"{name}: " + ", ".join(f"{side} {spread(times)} s" for side, times in taken.items()))
            ratios = [ours / by_hand for ours, by_hand in zip(taken["ours"], taken["by hand"], strict=True)]
            bars.append(Bar.at_most(f"{name} of {arguments.updates} updates [s]", median(taken["ours"]), LIMIT_S))
            bars.append(Bar.at_most(f"{name}, times the tight loop", median(ratios), LIMIT_OF_TIGHT))
            figures[name] = {**spread(taken["ours"], 4), "times_the_tight_loop": spread(ratios)}
            others[name] = {
                "by hand": {"setting": way, **spread(taken["by hand"], 4)},
                "in memory": {"setting": setting, **spread(taken["numpy"], 4)},
            }
        for rule in geometric:
            times = [seconds(partial(run, rule)) for _ in range(3)]
            say(f"{rule}: {spread(times)} s")
            figures[str(rule)] = spread(times, 4)
    shape = {key: getattr(arguments, key) for key in ("updates", "elements", "pairs", "threads")}
    ours = {**shape, "malicious": f, "from": "files in the page cache", "seconds": figures}
    return conclude("robust", bars, ours=ours, theirs={"seconds": others})


if __name__ == "__main__":
    sys.exit(main())
