"""The digits, trained to their known accuracy under every strategy: `python -m tests.parallel.trainer.everywhere`."""

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.config import TrainConfig
from examples import digits
from tests.parallel.engine.cases import plan
from tests.parallel.forked import run_ranks
from tests.parallel.models.cnn import CNN
from tests.parallel.trainer.training import run

KNOWN, WITHIN = 0.98, 0.01
"""Accuracy on the server's test data after 24 epochs of batches of 16."""

CONFIG = TrainConfig(epochs=24, batch_size=16, log_every=1000, eval_every=10**6, checkpoint_every=10**6)


@dataclass(frozen=True)
class Strategy:
    name: str
    plan: Plan
    is_cut: bool = False
    """The model must have a blueprint for tp, which the example's own has not."""


def strategies() -> Iterator[Strategy]:
    yield Strategy("one process", plan())
    yield Strategy("ddp 2", plan(dp_replicate=2))
    for stage in (1, 2, 3):
        yield Strategy(f"zero-{stage} 2", plan(dp_shard=2, zero=stage))
    yield Strategy("hsdp 2x2", plan(dp_replicate=2, dp_shard=2))
    yield Strategy("1f1b 2", plan(pp=2))
    yield Strategy("interleaved-1f1b 2", plan(pp=2, schedule="interleaved-1f1b", num_microbatches=4))
    yield Strategy("pp x ddp 2x2", plan(pp=2, dp_replicate=2))
    yield Strategy("cnn: one process", plan(), is_cut=True)
    yield Strategy("cnn: tp 2", plan(tp=2), is_cut=True)
    yield Strategy("cnn: fsdp x tp 2x2", plan(dp_shard=2, tp=2), is_cut=True)


def cut_model() -> nn.Module:
    return CNN([1, 32, 64], 8, hidden=256, norm=False)


def accuracy(strategy: Strategy) -> float:
    """Return the accuracy on this rank, after the whole training."""
    task = replace(digits.task, model=cut_model) if strategy.is_cut else digits.task
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found = run(place, task=task, config=CONFIG, plan=strategy.plan).metrics["test/accuracy"]
    assert found is not None
    return found


def accuracy_by_name(name: str) -> float:
    return accuracy(next(strategy for strategy in strategies() if strategy.name == name))


def main() -> None:
    """The table; those with one of the given words in their names."""
    torch.set_num_threads(1)
    missed = []
    print(f"{'strategy':<24} {'ranks':>5} {'accuracy':>9} {'s':>6}")
    for strategy in strategies():
        if sys.argv[1:] and not any(word in strategy.name for word in sys.argv[1:]):
            continue
        began, ranks = time.monotonic(), strategy.plan.mesh.size
        found = max(run_ranks(accuracy_by_name, ranks, strategy.name, timeout_s=1800))
        print(f"{strategy.name:<24} {ranks:>5} {found:>9.4f} {time.monotonic() - began:>6.1f}", flush=True)
        if abs(found - KNOWN) > WITHIN:
            missed.append(strategy.name)
    if missed:
        raise SystemExit(f"not {KNOWN} within {WITHIN}: {', '.join(missed)}")


if __name__ == "__main__":
    main()
