"""The memory of the ranks of a large client: a model is built, loaded and written by shares, beside a whole build.

    python -m benchmarks.large_client [--layers N] [--ranks 2,4]

Each rank of a sharded mesh builds the model, reads its boxes of a version's file and writes its part of an update. The
peak is that of its own memory (RssAnon) over the start of the phase, as a multiple of M/r: the model's bytes over the
ranks. The other side builds the whole model on each rank, as a plain construction does.
"""

import argparse
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Bar, conclude, say

if TYPE_CHECKING:
    from torch import nn

POLL_S = 0.002
EXCHANGE_MAX = 1.3
"""The bar of building, loading and writing, in M/r."""


class Peak:
    """The peak of this process's own memory over its start [bytes]."""

    def __init__(self) -> None:
        self.over_start = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Watch this process's own memory in a block."""
    found, start, is_over = Peak(), anonymous(), threading.Event()

    def look() -> None:
        while not is_over.wait(POLL_S):
            found.over_start = max(found.over_start, anonymous() - start)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.over_start = max(found.over_start, anonymous() - start)


def anonymous() -> int:
    """Return the resident memory of this process that no file backs [bytes]."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def make(layers: int) -> "nn.Module":
    """Return a decoder of about 15 MB a layer."""
    import torch

    from atoll.parallel.models.decoder import Decoder, DecoderConfig

    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab=8192, dim=512, layers=layers, heads=8, sequence=16))


def on_a_rank(folder: str, layers: int, ranks: int, way: str) -> dict[str, int]:
    """Return the peaks of the phases on this rank."""
    import torch
    import torch.distributed as dist

    from atoll.parallel.engine.assemble import assemble
    from atoll.parallel.engine.axes import Axes
    from atoll.parallel.engine.blank import give_memory
    from atoll.parallel.engine.mesh import Mesh
    from atoll.parallel.engine.optimization import Optimization
    from atoll.parallel.engine.plan import Plan
    from atoll.parallel.engine.ties import tied_names
    from atoll.parallel.exchange.initial import blank_of, fill
    from atoll.parallel.exchange.load import load_shares
    from atoll.parallel.exchange.shares import owned, shares_of
    from atoll.parallel.exchange.write import write_part

    plan = Plan(mesh=Mesh(dp_shard=ranks))
    axes = Axes(plan.mesh, "cpu")
    step = Optimization(
        loss=torch.nn.functional.cross_entropy,
        make_optimizer=lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.01),
    )
    dist.barrier()
    peaks: dict[str, int] = {}
    version = Path(folder) / "version.safetensors"
    with watched() as peak:
        blank = blank_of(lambda: make(layers)) if way == "shares" else None
        model = make(layers) if blank is None else blank.model
        tied = tied_names(model)
        engine = assemble(model, plan, step, axes=axes)
        if blank is not None:
            give_memory(engine.parts, "cpu")
            fill(shares_of(engine.parts, axes, tied), engine.parts, blank, lambda: make(layers))
        del model
    peaks["build"] = peak.over_start
    dist.barrier()
    shares = shares_of(engine.parts, axes, tied)
    names = sorted({share.name for share in shares})
    with watched() as peak:
        load_shares(shares, version)
    peaks["load"] = peak.over_start
    with watched() as peak:
        write_part(owned(shares, names), version, Path(folder) / f"part.{dist.get_rank()}")
    peaks["write"] = peak.over_start
    return peaks


def measure(folder: str, layers: int, ranks: int, way: str) -> dict[str, int]:
    """Return the largest peak of each phase over all ranks [bytes]."""
    from atoll.parallel.engine.forked import run_ranks

    found = run_ranks(on_a_rank, ranks, folder, layers, ranks, way, timeout_s=400)
    return {phase: max(of_rank[phase] for of_rank in found) for phase in found[0]}


def main() -> None:
    """Measure both sides, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--ranks", default="2,4")
    options = parser.parse_args()
    from atoll.aggregation.tensors import safetensors_file
    from atoll.parallel.local_training.parameters import parameters_of

    bars: list[Bar] = []
    ours: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="atoll-large-") as folder:
        arrays = parameters_of(make(options.layers))
        safetensors_file.write(Path(folder) / "version.safetensors", arrays, durable=False)
        model_bytes = sum(array.nbytes for array in arrays.values())
        del arrays
        say(f"a model of {model_bytes / 2**20:.0f} MiB")
        for ranks in map(int, options.ranks.split(",")):
            share = model_bytes / ranks
            for way in ("shares", "whole"):
                peaks = {phase: peak / share for phase, peak in measure(folder, options.layers, ranks, way).items()}
                ours[f"{way}, {ranks} ranks"] = peaks
                say(f"{ranks} ranks, {way}: " + ", ".join(f"{phase} {peak:.2f} M/r" for phase, peak in peaks.items()))
            by_shares, whole = ours[f"shares, {ranks} ranks"], ours[f"whole, {ranks} ranks"]
            bars.append(Bar.at_most(f"{ranks} ranks: peak of any phase [M/r]", max(by_shares.values()), EXCHANGE_MAX))
            bars.append(
                Bar.at_least(f"{ranks} ranks: a whole build fails that bar [M/r]", whole["build"], EXCHANGE_MAX)
            )
    theirs = {name: peaks for name, peaks in ours.items() if name.startswith("whole")}
    mine = {name: peaks for name, peaks in ours.items() if name not in theirs} | {"model_bytes": model_bytes}
    conclude("large_client", bars, ours=mine, theirs=theirs)


if __name__ == "__main__":
    main()
