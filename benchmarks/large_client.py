"""The ranks of a large client: their memory, beside that of a whole build, and their steps, beside `atoll train`'s.

    python -m benchmarks.large_client [--layers N] [--ranks 2,4]

Each rank of a sharded mesh builds the model, reads its boxes of a version's file and writes its part of an update. The
peak is that of its own memory (RssAnon) over the start of the phase, as a multiple of M/r: the model's bytes over the
ranks. The other side builds the whole model on each rank, as a plain construction does. Then the local training of a
round and `atoll train` take steps in the same ranks, in turns; the bar is the median over the turns of the ratio of
their processor times, which other processes of the machine hardly change.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Bar, conclude, say

if TYPE_CHECKING:
    import torch
    from torch import nn

    from atoll import Task

POLL_S = 0.002
EXCHANGE_MAX = 1.3
"""The bar of building, loading and writing, in M/r."""

STEP_MIN = 0.97
"""The bar of a step of `atoll train` over one of the local training on the same mesh."""

STEPS, WARM_UP, TURNS = 32, 8, 7
STEP_LAYERS = 1


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


def task_of(layers: int) -> "Task":
    """Return a task of that decoder on random tokens."""
    import torch
    from torch.utils.data import TensorDataset

    from atoll import Local, Task

    tokens = torch.randint(0, 8192, (64, 17), generator=torch.Generator().manual_seed(0))
    return Task(
        model=partial(make, layers),
        data=lambda site, split: TensorDataset(tokens[:, :-1], tokens[:, 1:]) if split == "train" else None,
        loss=Timed(),
        sites=["here"],
        local=Local(batch_size=8, epochs=STEPS // 8, lr=0.01),
    )


class Timed:
    """The loss, with the instants of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def __call__(self, outputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
        """Return the mean loss of a batch, and remember the instant."""
        from torch.nn.functional import cross_entropy

        self.calls.append((time.monotonic(), time.process_time()))
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def median_step(self) -> tuple[float, float]:
        """Return the median time between two calls, and that of this process alone [s]; forget the calls."""
        steps = list(pairwise(self.calls[WARM_UP:]))
        self.calls.clear()
        wall, own = (statistics.median(later[k] - earlier[k] for earlier, later in steps) for k in (0, 1))
        return wall, own


def request_in(folder: Path) -> dict[str, Any]:
    """Return a request to train from the version in a folder."""
    files = {"model": "version.safetensors", "out": "out", "own_out": "own"}
    return {"seed": 1, **{name: str(folder / file) for name, file in files.items()}}


def on_a_rank(folder: str, layers: int, ranks: int, way: str) -> dict[str, int]:
    """Return the peaks of the phases on this rank: those of a round, or of a whole build."""
    import torch
    import torch.distributed as dist

    from atoll.parallel.checkpoint.ranks import Ranks
    from atoll.parallel.engine.axes import Axes
    from atoll.parallel.engine.mesh import Mesh
    from atoll.parallel.engine.plan import Plan
    from atoll.parallel.mesh_client.building import Here, build
    from atoll.parallel.mesh_client.update import Files

    plan = Plan(mesh=Mesh(dp_shard=ranks))
    axes, together, task = Axes(plan.mesh, "cpu"), Ranks(), task_of(layers)
    request = request_in(Path(folder))
    dist.barrier()
    peaks: dict[str, int] = {}
    if way == "whole":
        with watched() as peak:
            model = make(layers)
        assert any(True for _ in model.parameters())  # it is in memory until here
        return {"build": peak.over_start}
    with watched() as peak:
        mesh_model = build(task, Here(plan, axes, torch.device("cpu"), together), seed=0)
    peaks["build"] = peak.over_start
    dist.barrier()
    with watched() as peak:
        mesh_model.load(Path(request["model"]))
    peaks["load"] = peak.over_start
    with watched() as peak:
        Files(mesh_model, task.local, "fedavg", request, together).write()
    peaks["write"] = peak.over_start
    return peaks


def steps_on_a_rank(folder: str, layers: int, ranks: int) -> list[list[tuple[float, float]]]:
    """Return, by turn, the median step of the local training on a mesh and that of `atoll train` on its plan [s].

    A first turn, which pays for the memory of a new process, is left out.
    """
    from atoll.parallel.engine.mesh import Mesh
    from atoll.parallel.engine.plan import Plan
    from atoll.parallel.mesh_client.bench import MeshBench
    from atoll.parallel.trainer.config import TrainConfig
    from atoll.parallel.trainer.job import Job
    from atoll.parallel.trainer.run import Surroundings, train
    from atoll.parallel.world import read_world

    task, world, plan = task_of(layers), read_world(), Plan(mesh=Mesh(dp_shard=ranks))
    loss: Any = task.loss
    request = request_in(Path(folder))
    never = 10**6
    config = TrainConfig(steps=STEPS, batch_size=8, log_every=never, eval_every=never, checkpoint_every=never)
    bench, found = MeshBench(task, {"site": "here"}, plan, world, time.monotonic), []

    def train_alone(turn: int) -> None:
        here = Surroundings(
            world=world,
            device="cpu",
            folder=Path(folder) / f"train.{turn}",
            clock=time.monotonic,
            is_told_to_stop=lambda: False,
            report=lambda event: None,
        )
        here.folder.mkdir(exist_ok=True)
        train(Job(name="large:task", task=task, config=config, plan=plan), here)

    for turn in range(1 + TURNS):
        sides: list[Callable[[], object]] = [
            lambda: bench.train(request, lambda: False),
            partial(train_alone, turn),
        ]
        of_turn = [(0.0, 0.0), (0.0, 0.0)]
        for side in (0, 1) if turn % 2 else (1, 0):
            sides[side]()
            of_turn[side] = loss.median_step()
        found.append(of_turn)
    return found[1:]


def compare_steps(folder: str, layers: int, ranks: int) -> dict[str, float]:
    """Return the median step of each side over the turns, its time in the process, and the ratios of the sides."""
    from tests.parallel.forked import run_ranks

    turns = [
        turn for of_rank in run_ranks(steps_on_a_rank, ranks, folder, layers, ranks, timeout_s=900) for turn in of_rank
    ]
    median = statistics.median
    figures = {}
    for k, kind in enumerate(("wall", "processor")):
        for side, name in enumerate(("local_training", "atoll_train")):
            figures[f"{name}_{kind}_s"] = median(turn[side][k] for turn in turns)
        figures[f"{kind}_ratio"] = median(trainer[k] / crew[k] for crew, trainer in turns)
    return figures


def measure(folder: str, layers: int, ranks: int, way: str) -> dict[str, int]:
    """Return the largest peak of each phase over all ranks [bytes]."""
    from tests.parallel.forked import run_ranks

    found = run_ranks(on_a_rank, ranks, folder, layers, ranks, way, timeout_s=400)
    return {phase: max(of_rank[phase] for of_rank in found) for phase in found[0]}


def main() -> None:
    """Measure both sides, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True, help="compare the steps, too")
    options = parser.parse_args()
    from atoll.tensors import safetensors_file
    from atoll.training.model.parameters import parameters_of

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
        if options.steps:
            arrays = parameters_of(make(STEP_LAYERS))
            safetensors_file.write(Path(folder) / "version.safetensors", arrays, durable=False)
            steps = compare_steps(folder, STEP_LAYERS, 2)
    theirs: dict[str, Any] = {name: peaks for name, peaks in ours.items() if name.startswith("whole")}
    mine: dict[str, Any] = {name: peaks for name, peaks in ours.items() if name not in theirs}
    mine["model_bytes"] = model_bytes
    if options.steps:
        say("2 ranks, a step: " + ", ".join(f"{name} {value:.4f}" for name, value in steps.items()))
        what = "2 ranks: a step of atoll train over one of the local training [processor time]"
        bars.append(Bar.at_least(what, steps["processor_ratio"], STEP_MIN))
        mine["steps"] = {name: value for name, value in steps.items() if not name.startswith("atoll_train")}
        theirs["atoll train"] = {name: value for name, value in steps.items() if name.startswith("atoll_train")}
    conclude("large_client", bars, ours=mine, theirs=theirs)


if __name__ == "__main__":
    main()
