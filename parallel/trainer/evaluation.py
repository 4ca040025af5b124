"""The metrics of a model on a mesh: each rank evaluates its share of the data, the sums of all give exact values."""

from collections.abc import Iterable
from typing import Any

import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.batch import Batch, map_tensors
from atoll.parallel.engine.step import Engine
from atoll.task.metrics import Statistics, add, as_statistics, of_batch, of_parts, sound, values
from atoll.task.task import Task
from atoll.training.data.units import units_of
from atoll.training.trials.contract import one_loss
from atoll.training.trials.unit_check import UnitCheck


def evaluate(
    engine: Engine, task: Task, batches: Iterable[Batch], ranks: Ranks, check: UnitCheck
) -> dict[str, float | None]:
    """Return the values of the loss and the task's metrics; the same on every rank, and for any number of ranks.

    Arguments as of `statistics`.
    """
    return values(task.metrics, statistics(engine, task, batches, ranks, check))


def statistics(engine: Engine, task: Task, batches: Iterable[Batch], ranks: Ranks, check: UnitCheck) -> Statistics:
    """Return the sums of the loss and the task's metrics; the same on every rank, and for any number of ranks.

    The loss is the mean over its units (`Task.units`). Sums are exact for counts and correctly
    rounded for the rest. Every rank must call it.

    Args:
        engine: at rest, flushed.
        task: the task, for the loss and the metrics.
        batches: the batches of this rank; the same number on every rank.
        ranks: the ranks that exchange the sums.
        check: the check of the loss's units.
    """
    sums: Statistics = {}
    units = units_of(task)

    def observe(outputs: Any, targets: Any, rows: int) -> None:
        nonlocal sums
        outputs = map_tensors(readable, outputs)
        found = of_batch(task.metrics, outputs, targets)
        if "loss" not in found:
            check.see(outputs, targets)
            found |= as_statistics({"loss": units.sums(one_loss(task.loss(outputs, targets)).item(), targets, rows)})
        sums = add(sums, found)

    for batch in batches:
        engine.evaluate(batch, observe)
    return sound(task.metrics, of_parts(ranks.gather(sums)))


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Widen a half-precision tensor to float32, in which outputs are measured."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
