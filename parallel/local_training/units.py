"""The units of a loss: what the mean of a batch divides by, so that means of parts add up to that of the whole.

    L(batch) = sum_p u_p L(part p) / sum_p u_p        for every division of the examples into parts

u is the number of examples, of tokens that count, a sum of class weights: any number >= 0, of which only ratios
matter. A task says it once, by `Task.units`; else it is guessed from the targets (`count_units`).
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from atoll.aggregation.printable import count_of
from atoll.aggregation.weight import as_weight
from atoll.parallel.local_training.trees import tensors
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.task import Task

IGNORED = -100
"""The target that the loss leaves out: `ignore_index` of `torch.nn.functional.cross_entropy`."""

SUM = "sum"
"""The word for a loss that is a sum over the examples, and no mean."""


def count_units(targets: Any) -> int:
    """Return the number of units over which a mean loss averages with these targets, as far as they show it.

    Args:
        targets: integers (classes, tokens): their entries other than -100, which `cross_entropy` ignores; anything
            else: the length of the first dimension (of a tree: of its first tensor).

    Raises:
        TaskBroken: there is no tensor among the targets.
    """
    if isinstance(targets, torch.Tensor) and are_numbered(targets):
        of_cpu = type(targets) is torch.Tensor and targets.device.type == "cpu"
        return int(np.count_nonzero(targets.numpy() != IGNORED)) if of_cpu else int((targets != IGNORED).sum())
    first = next(tensors(targets), None)
    if first is None:
        raise TaskBroken(f"no tensor among the targets to count, got {type(targets).__name__}")
    return len(first)


def units_in(count: Callable[[Any], float], targets: Any, rows: int) -> float:
    """Return the units of some rows: where they are guessed, and not as entries of one tensor, the number of rows.

    So a batch of any form has its examples as units: a list of boxes, whose first tensor is of one example, or texts.

    Args:
        count: targets -> units, as the task says them or as they are guessed.
        targets: of these rows.
        rows: their number.
    """
    is_guess = count is count_units or (isinstance(count, Units) and not count.is_said)
    if is_guess and not (isinstance(targets, torch.Tensor) and are_numbered(targets)):
        return rows
    return count(targets)


def are_numbered(targets: torch.Tensor) -> bool:
    """Return whether targets are whole numbers: classes or tokens."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


class Units:
    """The units of a task's loss, as the task says them or as they are guessed.

    Args:
        said: of `Task.units`.
    """

    def __init__(self, said: Callable[[Any], Any] | str | None = None) -> None:
        self._said = said

    @property
    def is_said(self) -> bool:
        """The answer whether the task has said them."""
        return self._said is not None

    @property
    def is_sum(self) -> bool:
        """The answer whether the loss is a sum over the examples."""
        return self._said == SUM

    @property
    def function(self) -> Callable[[Any], Any] | None:
        """The task's own function targets -> units, if it has one."""
        return self._said if callable(self._said) else None

    def __str__(self) -> str:
        if self.is_sum:
            return 'a sum over the examples (units="sum")'
        if self.is_said:
            return "the units that the task says"
        return "the units that Atoll guesses (the entries of whole-number targets that are not -100, else the examples)"

    def __call__(self, targets: Any) -> float:
        """Return the units of some rows; of a sum 1, since its parts are added unweighted.

        Raises:
            TaskBroken: there is no tensor among the targets to count, or the task's function returns no number, or a
                negative or infinite one.
        """
        if self._said is None:
            return count_units(targets)
        if not callable(self._said):
            return 1
        return as_units(self._said(targets))

    def factors(self, targets: Any, rows: int) -> tuple[float, float]:
        """Return the factor of a batch's loss in the sum over batches, and its summand of what that sum divides by.

        That is (units, units) for a mean, and (1, rows) for a sum, whose value is then the mean of the examples.

        Args:
            targets: of the batch.
            rows: its examples, as in `units_in`.
        """
        if self.is_sum:
            return 1, rows
        units = units_in(self, targets, rows)
        return units, units

    def sums(self, loss: float, targets: Any, rows: int) -> tuple[float, float]:
        """Return the summands of a loss over many batches; a batch without units has none, whatever its loss."""
        factor, count = self.factors(targets, rows)
        return (loss * factor, count) if count else (0.0, 0.0)

    def weight(self, of_steps: Sequence[float], sizes: Sequence[int], num_examples: int) -> int | float:
        """Return the weight of an update in FedAvg, n_k > 0: the units of the site's data, else its examples.

        They are those of the first epoch's batches. Where fewer were trained on, they are scaled up by the examples.
        A sum of fractions stays one, so that multiples of all units change no ratio of weights.

        Args:
            of_steps: units of each step, as `__call__` counts them.
            sizes: examples of each batch of one epoch.
            num_examples: of the site's data.

        Raises:
            TaskBroken: the trained examples have no units, as where every target is ignored: no update can weigh 0;
                or the weight is beyond those that the wire carries.
        """
        if self.function is None:
            return num_examples
        epoch = of_steps[: len(sizes)]
        seen = sum(sizes[: len(epoch)])
        if seen and not math.fsum(epoch):
            raise TaskBroken(
                f"the targets of {count_of(seen, 'trained example')} have no units (task.units gives 0), so there is "
                "nothing to train on and the update would weigh nothing: leave the site out, or mend its targets"
            )
        if not seen:
            return num_examples
        try:
            return as_weight(float(Fraction(math.fsum(epoch)) * num_examples / seen))
        except ValueError as error:
            raise TaskBroken(f"the units of the site's data are its weight: {error}: scale task.units") from error


def units_of(task: Task) -> Units:
    """Return the units of a task's loss."""
    return Units(task.units)


def as_units(found: Any) -> float:
    """Return a number, or a tensor of one, as units.

    Raises:
        TaskBroken: it is no number >= 0.
    """
    try:
        number = found.item() if isinstance(found, torch.Tensor) else found
        is_right = not isinstance(number, bool | str) and math.isfinite(number) and number >= 0
    except (TypeError, ValueError, RuntimeError):
        number, is_right = found, False
    if not is_right:
        raise TaskBroken(f"task.units must return one number >= 0 for the targets of a batch, got {number!r}")
    return int(number) if isinstance(number, int) or float(number).is_integer() else float(number)
