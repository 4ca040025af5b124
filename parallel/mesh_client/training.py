"""One local training on a mesh: the steps of one process, each divided over the ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atoll.ground.printable import count_of
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.data.batch import Batch, in_parts
from atoll.parallel.data.order import cut
from atoll.parallel.engine.optimization import MakeOptimizer
from atoll.parallel.hooks import MeshClient
from atoll.parallel.mesh_client.building import MeshModel
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.private import PrivateOrder
from atoll.parallel.private.passes import PrivatePasses
from atoll.parallel.trainer.same_batch import SameBatch
from atoll.parallel.trainer.stopping import Agreement
from atoll.task.collated import collate_of
from atoll.task.errors import OutOfTime, TaskBroken
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.data.draws import drawing, is_fixed
from atoll.training.data.units import units_of
from atoll.training.local.fednova import Normalizer
from atoll.training.local.local_order import LocalOrder
from atoll.training.local.training import Work
from atoll.training.optimizers.custom_optimizer import custom_optimizer
from atoll.training.optimizers.make import make_optimizer
from atoll.training.optimizers.options import OptimizerConfig
from atoll.training.private.local_steps import filled
from atoll.training.trials.unit_check import is_due


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """The training of one round; every rank calls its methods at the same point."""

    task: Task
    local: Local
    """The settings of the round."""
    order: LocalOrder | PrivateOrder
    dataset: Any
    seed: int
    model: MeshModel
    """The model, with the values of the version and the optimizer of the round."""
    ranks: Ranks
    agreement: Agreement
    """The agreement to end early."""
    client: MeshClient | None
    """The client of the task's algorithm, which has begun."""
    after_first: Callable[[], None] = lambda: None
    """() -> None, called after the first step of the round: a check of its side effects."""
    after_step: Callable[[], None] = lambda: None
    """() -> None, called after each step: the checkpoint."""
    private: PrivatePasses | None = None
    """The passes of private steps; None: they are not private."""

    def run(self) -> tuple[Work, bool]:
        """Train to the end, or until the ranks agree to stop.

        Returns:
            The work, as of one process, and whether it was ended early.

        Raises:
            OutOfTime: there was no time for a step.
            TaskBroken: the units of the loss are guessed, and wrong; or as `after_first`.
            CopiesDiffer: under DDP something beside the optimizer changes a parameter.
        """
        engine, tally, order = self.model.engine, self.model.tally, self.order
        normalizer, same_batch = Normalizer(self.local), SameBatch(engine.axes)
        for _ in range(engine.steps):
            normalizer.step()
        reached("crew.filled")
        if self.private is not None:
            self.private.step = engine.steps
        is_one = units_of(self.task).is_sum or self.private is not None
        total, is_stopped = (1.0 if is_one else None), False
        for batch in self._batches(engine.steps):
            if is_stopped := self.agreement.should_stop():
                break
            same_batch.check(batch)
            tally.is_first_epoch = engine.steps < len(order.sizes)
            engine.step(batch, total=total, report=False)
            normalizer.step()
            if self.client is not None:
                self.client.stepped()
            if engine.steps == 1:
                self.after_first()
            if is_due(engine.steps):
                self._check_task()
            reached("crew.stepped")
            self.after_step()
        if engine.steps == 0:
            raise OutOfTime(f"no time for the first of {count_of(order.steps, 'step')}")
        return self._work(normalizer), is_stopped

    def example(self) -> Any:
        """Return the inputs of the first example, as the first step drew them."""
        epoch, indices = next(self.order.batches())
        return drawing(self.dataset, self.seed)(epoch, indices[:1])[0]

    def _batches(self, first: int) -> Iterator[Batch]:
        """Yield this rank's part of each batch; without one, an example as a filler."""
        axes, units = self.model.engine.axes, units_of(self.task)
        rank, number = (0, 1) if axes is None else (axes.dp_rank, axes.mesh.dp)
        fetch, plan = drawing(self.dataset, self.seed), self.model.engine.plan
        if isinstance(self.order, PrivateOrder):
            for epoch, indices in self.order.batches(first):
                mine = indices[rank::number]
                inputs, targets = fetch(epoch, filled(mine))
                batch = Batch(inputs, targets, 1.0, rows=len(mine), is_filler=not len(mine))
                yield batch.to(self.model.engine.device)
            return
        parts = 1 if plan.mesh.pp > 1 or is_fixed(self.dataset) else plan.accumulate
        may_list = collate_of(self.dataset) is not None
        for epoch, indices in self.order.batches(first):
            mine = indices[cut(len(indices), rank, number) : cut(len(indices), rank + 1, number)]
            rows = mine if len(mine) else indices[:1]
            fetched = fetch(epoch, rows) if parts == 1 else in_parts(fetch, epoch, rows, parts)
            batch = Batch.of(fetched, units, len(rows), is_filler=not len(mine), may_list=may_list)
            yield batch.to(self.model.engine.device)

    def _check_task(self) -> None:
        found = self.model.tally.check.found or self.model.form.fault()
        self.ranks.raise_if_any([found] if found else [], TaskBroken)

    def _work(self, normalizer: Normalizer) -> Work:
        engine, order = self.model.engine, self.order
        if isinstance(order, PrivateOrder):  # of whose rows nothing is told
            return Work(order.num_examples, engine.steps / order.steps, {}, engine.steps)
        state = self.model.tally.state()
        of_steps = [state["units"], *[0.0] * (min(engine.steps, len(order.sizes)) - 1)]
        weight = units_of(self.task).weight(of_steps, order.sizes, order.num_examples)
        return Work(weight, engine.steps / order.steps, state["sums"], engine.steps, normalizer)


def optimizer_of(local: Local) -> MakeOptimizer:
    """Return the constructor of the local optimizer, the same method as `training.make_optimizer`."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        if local.has_custom_optimizer:
            return custom_optimizer(local, [parameter for _, parameter in named])
        momentum = local.momentum if local.optimizer == "sgd" else None
        config = OptimizerConfig(
            name=local.optimizer_name,
            lr=local.lr,
            momentum=momentum,
            weight_decay=local.weight_decay,
            skip_1d=not local.decay_vectors,
        )
        return make_optimizer(config, named)

    return make
