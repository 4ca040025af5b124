"""The loss of a local training on a mesh, and the sums that it leaves, as in one process, whatever the mesh."""

from collections.abc import Mapping
from typing import Any

import torch

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.batch import map_tensors
from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.sharding import whole
from atoll.parallel.mesh_client.crash_points import reached
from atoll.task.metrics import Statistics, add, as_statistics, of_batch, of_parts
from atoll.task.task import Task
from atoll.training.data.units import units_of
from atoll.training.trials.same_form import SameForm
from atoll.training.trials.unit_check import UnitCheck

PENDING_MAX = 64
"""The number of losses that wait on the device to be read together."""


class Tally:
    """The task's loss, as the engine calls it, and the statistics of the batches that it has seen on this rank.

    The ranks of a tensor group see the same, so only the first counts.

    Args:
        task: the task, for loss, metrics and units.
        plan: the plan of the mesh.
        axes: the axes of the mesh; None: this rank is alone.
        ranks: the ranks over which the sums are added up.
    """

    def __init__(self, task: Task, plan: Plan, axes: Axes | None, ranks: Ranks) -> None:
        may_list = task.collate is not None
        self.check = UnitCheck(task.loss, units_of(task), must_hold=plan.divides, may_list=may_list)
        self.form: SameForm | None = None
        """The form of the model, which a forward pass must leave; known when the model is built."""
        self._task, self._units, self._ranks = task, units_of(task), ranks
        self.rows = 0
        """The examples of the micro-batch that comes next: the engine sets them (`passes.CountsRows`)."""
        self._counts = axes is None or axes.coordinates["tp"] == 0
        self.begin()

    def begin(self) -> None:
        """Set all sums to zero."""
        self._sums: Statistics = {}
        self._of_first_epoch = 0.0
        self._pending: list[tuple[torch.Tensor, float, float]] = []
        self.is_first_epoch = True
        """The next batches are of the first epoch, whose units are the weight of the site."""

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss over the units of some rows of the batch.

        Raises:
            TaskBroken: it is no single number, or has no gradient; or the forward pass has changed the model's form.
        """
        if self.form is not None:
            self.form.see()
        loss: torch.Tensor = self.check(outputs, targets)
        with torch.no_grad():
            self._see(loss, outputs, targets)
        reached("crew.mid_step")
        return loss

    def _see(self, loss: torch.Tensor, outputs: Any, targets: Any) -> None:
        metrics, seen = self._task.metrics, whole(loss.detach())
        if metrics:
            statistics = of_batch(metrics, map_tensors(lambda t: whole(t.detach()), outputs), targets)
            self._sums = add(self._sums, statistics) if self._counts else {}
        if not self._counts:
            return
        if "loss" not in metrics:
            self._pending.append((seen, *self._units.factors(targets, self.rows)))
            if len(self._pending) >= PENDING_MAX:
                self._read()
        if self.is_first_epoch and self._units.is_said:
            self._of_first_epoch += self._units(targets)

    def _read(self) -> None:
        """Read the losses that wait on the device, and add them to the sums."""
        for loss, factor, counted in self._pending:
            summand = (loss.item() * factor, counted) if counted else (0.0, 0.0)
            self._sums = add(self._sums, as_statistics({"loss": summand}))
        self._pending.clear()

    def state(self) -> dict[str, Any]:
        """Return the sums of all ranks, the same on each; every rank must call it."""
        self._read()
        found = self._ranks.gather([self._sums, self._of_first_epoch])
        sums = of_parts(statistics for statistics, _ in found)
        units = sum(counted for _, counted in found)
        is_first = self._ranks.is_first  # it carries them on
        self._sums, self._of_first_epoch = (sums, units) if is_first else ({}, 0.0)
        return {"sums": sums, "units": units}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the sums of an earlier attempt."""
        self.begin()
        if self._ranks.is_first:
            self._sums = {name: tuple(numbers) for name, numbers in state["sums"].items()}
            self._of_first_epoch = state["units"]
