"""The units of a loss: the divisor of a batch's mean, by which means of parts add up to the mean of the whole.

    L(batch) = sum_p u_p L(part p) / sum_p u_p        for every division of the examples into parts

u is the number of examples, of tokens that count, a sum of class weights: any number >= 0, of which only ratios matter.
A task defines it by `Task.units`; else it is guessed from the targets (`count_units`).
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.task.task import Task
from atoll.tensors.updates.weight import as_weight
from atoll.training.data.trees import tensors

IGNORED = -100
"""The target that the loss leaves out: `ignore_index` of `torch.nn.functional.cross_entropy`."""

SUM = "sum"
"""The value of `Task.units` for a loss that is a sum over the examples."""


def count_units(targets: Any) -> int:
    """Return the number of units over which a mean loss averages, as guessed from the targets.

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
    """Return the loss units of some rows; if they are guessed and the targets are no single tensor, the number of rows.

    So a batch of any other form has its examples as units: a list of boxes, whose first tensor belongs to one example,
    or texts.

    Args:
        count: targets -> units, by the task or guessed.
        targets: the targets of these rows.
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
    """The units of a task's loss, by the task or guessed.

    Args:
        said: the value of `Task.units`.
    """

    def __init__(self, said: Callable[[Any], Any] | str | None = None) -> None:
        self._said = said

    @property
    def is_said(self) -> bool:
        """Whether the task has defined the units (`Task.units`)."""
        return self._said is not None

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over the examples."""
        return self._said == SUM

    @property
    def function(self) -> Callable[[Any], Any] | None:
        """The task's function targets -> units, if it has one."""
        return self._said if callable(self._said) else None

    def __str__(self) -> str:
        if self.is_sum:
            return 'a sum over the examples (units="sum")'
        if self.is_said:
            return "the units that the task says"
        return "the units that Atoll guesses (the entries of whole-number targets that are not -100, else the examples)"

    def __call__(self, targets: Any) -> float:
        """Return the units of some rows; 1 for a sum, since its parts are added unweighted.

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
        """Return the factor of a batch's loss in the sum over batches, and its summand of that sum's divisor.

        That is (units, units) for a mean, and (1, rows) for a sum, whose value is then the mean of the examples.

        Args:
            targets: the targets of the batch.
            rows: the number of its examples, as in `units_in`.
        """
        if self.is_sum:
            return 1, rows
        units = units_in(self, targets, rows)
        return units, units

    def sums(self, loss: float, targets: Any, rows: int) -> tuple[float, float]:
        """Return each batch's summand of the loss over many batches; a batch without units adds nothing."""
        factor, count = self.factors(targets, rows)
        return (loss * factor, count) if count else (0.0, 0.0)

    def weight(self, of_steps: Sequence[float], sizes: Sequence[int], num_examples: int) -> int | float:
        """Return the weight of an update in FedAvg, n_k > 0: the units of the site's data, else its examples.

        They are the units of the first epoch's batches, scaled up by the examples if fewer were trained on. A
        fractional sum is not rounded, so that multiples of all units change no ratio of weights.

        Args:
            of_steps: units of each step, as `__call__` counts them.
            sizes: examples of each batch of one epoch.
            num_examples: the number of examples of the site's data.

        Raises:
            TaskBroken: the trained examples have no units, as if every target is ignored: no update can weigh 0; or the
                weight is out of the wire's range.
        """
        if self.function is None:
            return num_examples
        epoch = of_steps[: len(sizes)]
        seen = sum(sizes[: len(epoch)])
        if seen and not math.fsum(epoch):
            raise TaskBroken(
                f"the targets of {count_of(seen, 'trained example')} have no units (task.units gives 0), so there is "
                "nothing to train on and the update would weigh nothing: leave the site out, or check its targets"
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
