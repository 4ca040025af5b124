"""The check that a loss is the mean or the sum over its units: a batch's loss against its parts' losses."""

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from atoll.task.errors import TaskBroken
from atoll.task.task import Task
from atoll.training.data.rows import Cut, Division, Undivided, lists_in
from atoll.training.data.trees import map_tensors, tensors
from atoll.training.data.units import Units, units_in, units_of
from atoll.training.optimizers.dtensor import is_dtensor
from atoll.training.trials.contract import one_loss
from atoll.training.trials.trial import eager, undone

logger = logging.getLogger(__name__)

Loss = Callable[[Any, Any], Any]

FIRST = 3
"""The number of first calls that are all checked; later calls are checked if their number is a power of two."""

TOLERANCE = 1e-4
"""The largest relative difference that counts as rounding in single precision."""

KEPT_MAX = 16
"""The number of losses whose checks a process remembers."""


class UnitCheck:
    """Check of one loss: that it is the mean or sum over its units, on the first batches and then on ever fewer.

    Args:
        loss: the loss of the task.
        units: the units of the task.
        must_hold: keep the sentence for `found`, unless the task has defined the units; else it is logged once.
        may_list: batches may have lists with an entry for each example (`Division`).
    """

    def __init__(self, loss: Loss, units: Units, *, must_hold: bool = False, may_list: bool = True) -> None:
        self.loss, self._may_list = loss, may_list
        self._units, self._must_hold = units, must_hold and not units.is_said
        self._seen, self._is_told = 0, False
        self.found: str | None = None
        """The sentence that the guessed units are wrong, if they must hold."""
        self._last: tuple[Any, Any] | None = None

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss; check its units first, if that is due.

        Raises:
            TaskBroken: it is no single number, or lacks a required gradient.
        """
        self.see(outputs, targets)
        return one_loss(self.loss(outputs, targets), is_trained=torch.is_grad_enabled())

    def see(self, outputs: Any, targets: Any) -> None:
        """Check a batch, if it is due; two batches of single rows are checked as one."""
        self._seen += 1
        if self._is_told or not is_due(self._seen):
            return
        with torch.no_grad():
            outputs = tree_map_only(torch.Tensor, _whole, outputs)
            if _num_rows(outputs, targets) == 1:
                before, self._last = self._last, (outputs, targets)
                if before is None:
                    self._seen -= 1
                    return
                outputs, targets = _joined(before, self._last)
            found = disagreement(self.loss, self._units, outputs, targets, may_list=self._may_list)
        if found is None:
            return
        self._is_told = True
        if self._must_hold:
            self.found = found
        else:
            logger.warning("%s", found)


def is_due(number: int) -> bool:
    """Return whether the call, or the step, of this number (from 1) is checked."""
    return number <= FIRST or not number & (number - 1)


_checks: list[tuple[Loss, Any, UnitCheck]] = []


def check_of(task: Task) -> UnitCheck:
    """Return this process's check of a task's loss, for trainings that never divide a batch."""
    for loss, units, check in _checks:
        if loss is task.loss and units is task.units:
            return check
    check = UnitCheck(task.loss, units_of(task), may_list=task.collate is not None)
    _checks.append((task.loss, task.units, check))
    del _checks[:-KEPT_MAX]
    return check


def disagreement(loss: Loss, units: Units, outputs: Any, targets: Any, *, may_list: bool = True) -> str | None:
    """Return the sentence that a batch's loss contradicts its units; None if it agrees, or cannot be compared.

    It cannot if the batch has one row, it cannot be divided by its examples (`Division`), or the loss fails on a part,
    is not finite, gives another number when it is called again, or holds state that cannot be restored.
    """
    rows = _num_rows(outputs, targets)
    if rows < 2 or (division := _divided(outputs, targets, rows, may_list)) is None:
        return None
    trial = partial(_of_copies, loss)  # it may change its outputs in place, as by a temperature
    try:
        with undone(loss=loss) as before, eager():
            if not before.is_complete:
                return None
            value = trial(outputs, targets)
            whole, tolerance = float(value), _tolerance(value, outputs)
            of_parts = [_of_parts(trial, units, division, cut, rows) for cut in sorted({rows // 2, 1})]
            is_repeatable = float(trial(outputs, targets)) == whole
    except TaskBroken:
        raise
    except Exception:  # the loss needs more rows than a part has, or other rows
        return None
    if not (is_repeatable and math.isfinite(whole)):
        return None
    for number, largest in of_parts:
        if not abs(number - whole) <= tolerance * max(largest, abs(whole)):  # also NaN: a part has no units
            return _sentence(units, whole, number)
    return None


def _of_copies(loss: Loss, outputs: Any, targets: Any) -> Any:
    return loss(*(map_tensors(torch.Tensor.clone, tree) for tree in (outputs, targets)))


def _divided(outputs: Any, targets: Any, rows: int, may_list: bool) -> tuple[Cut, Cut] | None:
    """Return the divisions of outputs and targets; None if a part of them has neither rows nor entries of examples."""
    try:
        named = {"outputs": outputs, "targets": targets}
        found = [Division(rows, may_list=may_list).of(tree, name) for name, tree in named.items()]
    except Undivided:
        return None
    return (found[0], found[1]) if all(cut.is_cut and not cut.keeps for cut in found) else None


def _of_parts(loss: Loss, units: Units, division: tuple[Cut, Cut], cut: int, rows: int) -> tuple[float, float]:
    """Return the loss of the batch from its parts before and after a row, and the largest loss of a part."""
    total = weight = largest = 0.0
    for part in (slice(0, cut), slice(cut, rows)):
        outputs, targets = (tree.take(part) for tree in division)
        counted = 1 if units.is_sum else units_in(units, targets, part.stop - part.start)
        if counted:
            value = float(loss(outputs, targets))
            total, weight, largest = total + value * counted, weight + counted, max(largest, abs(value))
    return (total if units.is_sum else total / weight if weight else math.nan), largest


def _tolerance(value: Any, outputs: Any) -> float:
    """Return the relative difference that counts as rounding: at least four steps of the coarsest float."""
    floats = [tensor.dtype for tensor in tensors_of((value, outputs)) if tensor.is_floating_point()]
    return max([TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in floats)])


def _sentence(units: Units, whole: float, parts: float) -> str:
    if units.is_sum:
        return f"the loss of a batch is {whole:.6g} and the sum of its parts' losses {parts:.6g}: it is not {units}"
    return (
        f"the loss of a batch is {whole:.6g}, and the mean of its parts' losses weighted by their units {parts:.6g}: "
        f"the loss divides by something else than {units}, so its means over batches, ranks and sites would be wrong: "
        'say what it divides by with Task(units=lambda targets: ...), or units="sum" for a sum (docs/task.md, "Units")'
        + (" (of a loss that pairs the examples of a batch this is meant)" if units.is_said else "")
    )


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a tree's leaves."""
    yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _num_rows(outputs: Any, targets: Any) -> int:
    """Return the number of examples of a batch.

    They are the entries of targets that are a list with one for each row of the outputs, else the rows of the targets'
    first tensor, else of the outputs' first tensor.
    """
    first = next((tensor for tensor in tensors(outputs) if tensor.dim()), None)
    if first is not None and isinstance(targets, list | tuple) and len(targets) == len(first):
        return len(first)
    found = next(tensors(targets), first)
    return 0 if found is None or found.dim() == 0 else len(found)


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two batches of one row as one; only the second if their forms differ, or a list may have entries."""
    if any(len(part) == 1 for part in lists_in(other)):
        return other
    ours, theirs = list(tensors_of(one)), list(tensors_of(other))
    if [(t.dtype, t.shape) for t in ours] != [(t.dtype, t.shape) for t in theirs]:
        return other
    before = iter(ours)  # perhaps of a training on another device
    joined: tuple[Any, Any] = tree_map_only(
        torch.Tensor, lambda tensor: torch.cat([next(before).to(tensor.device), tensor]), other
    )
    return joined


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()
