"""The exact sum of a fold on a GPU, against the rate at which the same bytes reach the GPU.

    python -m benchmarks.fold_cuda [--updates K] [--elements N] [--pairs N] [--streams N]

Updates of normal float32 numbers are in pinned memory of the host. Ours copies and adds them tile by tile, as the fold
does, at the best of the printed tiles; the other side only copies them. Both alternate, and the sum must have the bits
of numpy's. Reported beside it, without a bar: the same from device memory against a copy within the device, and a whole
fold from files in the page cache to a durable new version, with and without the GPU.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from atoll.aggregation.fold.device import Device, TileSum
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.kernel import add_within_by_numpy
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece
from atoll.tensors.updates.reader import StoredUpdate
from benchmarks.report import Bar, conclude, say, spread

TILES = (1 << 18, 1 << 19, 1 << 20, 1 << 21, 1 << 22)
SHARE_OF_COPY = 0.6
SCALE = 2.0**40


def summed(device: Device, updates: list[torch.Tensor], tile: int, streams: int) -> list[np.ndarray[Any, Any]]:
    """Return the sum of all updates, tile by tile with several tiles in flight; each tile ends in host memory."""

    def one(start: int) -> np.ndarray[Any, Any]:
        with device.stream():
            total = TileSum(device, min(tile, updates[0].numel() - start))
            for update in updates:
                total.add(update[start : start + tile], SCALE)
            return total.finish()[0]

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, range(0, updates[0].numel(), tile)))


def copied(updates: list[torch.Tensor], room: torch.Tensor) -> None:
    """Copy all updates, one after the other, to the same place on the device."""
    for update in updates:
        room.copy_(update, non_blocking=True)
    torch.cuda.synchronize()


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def pairs(ours: Callable[[], object], theirs: Callable[[], object], count: int) -> dict[str, list[float]]:
    """Measure both in turns, after one call of each."""
    ours(), theirs()
    measured = [(seconds(ours), seconds(theirs)) for _ in range(count)]
    return {"ours": [pair[0] for pair in measured], "theirs": [pair[1] for pair in measured]}


def check_bits(tiles: list[np.ndarray[Any, Any]], updates: list[torch.Tensor]) -> None:
    total = np.concatenate(tiles)
    expected = np.zeros(total.size)
    for update in updates:
        add_within_by_numpy(expected, update.numpy(), np.float64(SCALE), np.inf)
    if total.tobytes() != expected.tobytes():
        raise RuntimeError("the sum has other bits than numpy's")


def from_files(device: Device, updates: list[torch.Tensor], count: int) -> dict[str, dict[str, float]]:
    """Measure whole folds, with and without the device."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder, size = Path(name), updates[0].numel()
        safetensors_file.write(folder / "base", {"w": np.zeros(size, np.float32)})
        stored = []
        for k, update in enumerate(updates):
            update.numpy().tofile(folder / f"u{k}")
            piece = Piece("w", "F32", (0,), (size,), "")
            magnitude = {"w": float(update.abs().max())}
            stored.append(Weighted(StoredUpdate(folder / f"u{k}", (piece,), magnitude), k + 1))
        threads = os.cpu_count() or 1
        folds = {
            name: partial(fold, folder / "base", stored, folder / name, execution=execution)
            for name, execution in (("cpu", Execution(threads)), ("cuda", Execution(threads, device=device)))
        }
        measured = pairs(folds["cuda"], folds["cpu"], count)
        if (folder / "cpu").read_bytes() != (folder / "cuda").read_bytes():
            raise RuntimeError("the versions differ")
    return {"cuda_s": spread(measured["ours"]), "cpu_s": spread(measured["theirs"])}


def measure(arguments: argparse.Namespace) -> int:
    """Measure on a GPU."""
    device = Device("cuda")
    shape = (arguments.updates, arguments.elements)
    rows = np.random.default_rng(0).standard_normal(shape, np.float32)
    pinned = [torch.from_numpy(row).pin_memory() for row in rows]
    del rows
    num_bytes = 4 * arguments.updates * arguments.elements
    there = [update.to(device.device) for update in pinned]
    room = torch.empty_like(there[0])
    check_bits(summed(device, pinned, TILES[0], arguments.streams), pinned)
    figures: dict[str, Any] = {}
    for place, updates in (("host", pinned), ("device", there)):
        sweep = {
            tile: min(seconds(partial(summed, device, updates, tile, arguments.streams)) for _ in range(3))
            for tile in TILES
        }
        say(
            f"  from the {place}, by tile: "
            + ", ".join(f"{tile} {num_bytes / s / 1e9:.1f}" for tile, s in sweep.items())
        )
        best = min(sweep, key=lambda tile: sweep[tile])
        ours = partial(summed, device, updates, best, arguments.streams)
        measured = pairs(ours, partial(copied, updates, room), arguments.pairs)
        speeds = {side: spread([num_bytes / s / 1e9 for s in times], 1) for side, times in measured.items()}
        share = median(measured["theirs"]) / median(measured["ours"])
        figures[place] = {"tile_elements": best, "gb_per_s": speeds, "share_of_copy": round(share, 3)}
        say(f"  from the {place}: {figures[place]}")
    figures["from_files"] = from_files(device, pinned, min(3, arguments.pairs))
    bars = [Bar.at_least("share of the copy's speed, from the host", figures["host"]["share_of_copy"], SHARE_OF_COPY)]
    our_figures = {**vars(arguments), "device": torch.cuda.get_device_name(), "torch": torch.__version__, **figures}
    their_figures = {place: figures[place]["gb_per_s"]["theirs"] for place in ("host", "device")}
    return conclude("fold_cuda", bars, ours=our_figures, theirs=their_figures)


def main() -> int:
    """Measure, or report that there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fold_cuda", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 values in each update")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--streams", type=int, default=4, help="tiles in flight at a time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        why = "no CUDA device"
        return conclude("fold_cuda", [], ours=f"not measured: {why}", theirs=None, why_not=why)
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
