"""The overhead of `atoll train` against the tightest loop by hand.

    python -m benchmarks.step_overhead [--pairs N] [--seconds S] [--device cpu|cuda] [--only NAME ..]

Both sides train the same decoder on the same device with the same optimizer. Ours is the trainer as the command runs
it, with its loader, its log and its engine. It pauses at each line of its log, where the other side takes the same
number of steps, so that pairs are interleaved in one process. The batches of the loop by hand are ready beforehand.

    plain   one process, no wrapper
    ddp     DistributedDataParallel on both sides; 2 ranks on CPUs, 1 on a GPU
    fsdp    ours under fully_shard at one rank, the loop by hand without any wrapper

Memory is the growth of the resident set (on a GPU, of the peak allocation) since before the model was built, with each
side in its own process. A tiny model has been trained there before, so that modules that torch and the trainer import
at their first use do not count: they are no memory of a model, and which of them are imported earlier is chance. The
interval is a bootstrap of the median ratio.
"""

import argparse
import gc
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder, DecoderConfig
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import Job
from atoll.parallel.trainer.run import Surroundings, train
from atoll.parallel.world import World
from atoll.task.local import Local
from atoll.task.task import Task
from benchmarks.report import Bar, conclude, interval, say, spread
from tests.parallel.forked import run_ranks

SIZES = {
    "cpu": {"config": {"vocab": 256, "dim": 256, "layers": 8, "heads": 4, "sequence": 128}, "batch": 16},
    "cuda": {"config": {"vocab": 32_000, "dim": 1024, "layers": 12, "heads": 16, "sequence": 1024}, "batch": 16},
}
TINY = {"vocab": 16, "dim": 8, "layers": 1, "heads": 1, "sequence": 4}
BARS = {"plain": 0.97, "ddp": 0.97, "fsdp": 0.95}
LR = 1e-4
WARM_UP = 2
"""The number of first pairs that do not count."""


def decoder(device: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**SIZES[device]["config"]))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tokens(device: str, examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = DecoderConfig(**SIZES[device]["config"])
    found = torch.randint(0, config.vocab, (examples, config.sequence + 1), generator=torch.Generator().manual_seed(1))
    return found[:, :-1].contiguous(), found[:, 1:].contiguous()


def by_hand(name: str, device: str) -> Callable[[int], None]:
    """Return the loop by hand, as a function that takes some steps."""
    model: nn.Module = decoder(device).to(device)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, **_how(device))
    inputs, targets = (each.to(device) for each in tokens(device, SIZES[device]["batch"]))

    def steps(number: int) -> None:
        model.train()
        for _ in range(number):
            optimizer.zero_grad(set_to_none=True)
            loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _wait(device)

    return steps


def ours(name: str, device: str, steps: int, every: int, report: Callable[[dict[str, Any]], None]) -> None:
    """Run the trainer as `atoll train` runs it on this rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    world = World(dist.get_rank(), dist.get_rank(), ranks) if dist.is_initialized() else World()
    batch = SIZES[device]["batch"] * ranks
    task = Task(
        model=lambda: decoder(device),
        data=lambda _site, split: TensorDataset(*tokens(device, 64 * batch)) if split == "train" else None,
        sites=["all"],
        loss=loss,
        local=Local(batch_size=SIZES[device]["batch"], optimizer="adamw", lr=LR, epochs=10**6),
    )
    plan = Plan(mesh=Mesh(dp_replicate=ranks), zero=3 if name == "fsdp" else None)
    config = TrainConfig(steps=steps, log_every=every, eval_every=10**9, checkpoint_every=10**9)
    with tempfile.TemporaryDirectory() as folder:
        here = Surroundings(
            world=world,
            device=device,
            folder=Path(folder),
            clock=time.monotonic,
            is_told_to_stop=lambda: False,
            report=report,
        )
        train(Job(name="step_overhead", task=task, config=config, plan=plan), here)


def pairs(name: str, device: str, number: int, seconds: float) -> list[tuple[float, float]]:
    """Return the seconds of ours and of the loop by hand for the same steps, `number` times, on this rank."""
    torch.set_num_threads(1)
    hand = by_hand(name, device)
    hand(2)
    began = time.perf_counter()
    hand(3)
    every = _agreed(max(1, round(seconds * 3 / (time.perf_counter() - began))))
    found: list[tuple[float, float]] = []
    resumed = 0.0

    def report(event: dict[str, Any]) -> None:
        nonlocal resumed
        if event["event"] == "step":
            _wait(device)
            reached = time.perf_counter()
            hand(every)
            found.append((reached - resumed, time.perf_counter() - reached))
            _meet()
            resumed = time.perf_counter()

    ours(name, device, every * (number + WARM_UP), every, report)
    return found[WARM_UP:]


def memory(name: str, device: str, side: str) -> float:
    """Return the growth of the peak memory while one side takes ten steps [bytes]."""
    torch.set_num_threads(1)
    config, SIZES[device]["config"] = SIZES[device]["config"], TINY
    _train(name, device, side, steps=2)
    SIZES[device]["config"] = config
    gc.collect()
    before = _held(device)
    _train(name, device, side, steps=10)
    return _held(device) - before


def _train(name: str, device: str, side: str, *, steps: int) -> None:
    if side == "ours":
        ours(name, device, steps, steps, lambda _event: None)
    else:
        by_hand(name, device)(steps)


def _held(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _agreed(every: int) -> int:
    """Return the number of the first rank, on all ranks."""
    if not dist.is_initialized():
        return every
    number = torch.tensor(every)
    dist.broadcast(number, 0)
    return int(number)


def _meet() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _how(device: str) -> dict[str, bool]:
    return {"fused": True} if device == "cuda" else {"foreach": True}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate seconds of each side of a pair")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=BARS, default=list(BARS))
    given = parser.parse_args(arguments)
    config = DecoderConfig(**SIZES[given.device]["config"])
    bars, figures = [], {}
    for name in given.only:
        ranks = 2 if name == "ddp" and given.device == "cpu" else 1
        timed = run_ranks(pairs, ranks, name, given.device, given.pairs, given.seconds, timeout_s=3000)[0]
        ratios = [hand / mine for mine, hand in timed]
        low, high = interval(ratios)
        peaks = {side: run_ranks(memory, ranks, name, given.device, side)[0] for side in ("ours", "hand")}
        growth = peaks["ours"] / peaks["hand"]
        say(f"{name:<6} {median(ratios):.3f} of the loop by hand (95 %: {low:.3f} to {high:.3f}), memory {growth:.3f}")
        bars += [
            Bar.at_least(f"{name}: speed beside the loop by hand", median(ratios), BARS[name]),
            Bar.at_most(f"{name}: peak memory beside the loop by hand", growth, 1.05),
        ]
        figures[name] = {
            "ranks": ranks,
            "pairs": len(timed),
            "ours_s": spread([mine for mine, _ in timed]),
            "by_hand_s": spread([hand for _, hand in timed]),
            "interval_95": [round(low, 4), round(high, 4)],
            "memory_bytes": peaks,
        }
    ours_is = {"decoder": SIZES[given.device], "parameters": sum(p.numel() for p in decoder(given.device).parameters())}
    say(f"a decoder of {ours_is['parameters']:,} parameters, {config.sequence} tokens a sequence, on {given.device}")
    return conclude("step_overhead", bars, ours=ours_is | figures, theirs={"by hand": "the same figures, by_hand_s"})


if __name__ == "__main__":
    raise SystemExit(main())
