"""The clipped sums of a model's example gradients on any plan, after the trial of its rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atoll.ground.faults import faults_in
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.plan import Plan
from atoll.parallel.engine.step import Engine
from atoll.parallel.private.mesh_gradients import MeshGradients
from atoll.parallel.private.passes import Sums, SumsOfOne
from atoll.parallel.private.terms import needs_captured
from atoll.task.errors import TaskBroken
from atoll.task.randomness import generators_kept
from atoll.task.task import Task
from atoll.training.private.captured_gradients import NotCaptured
from atoll.training.private.checks import Engine as Gradients
from atoll.training.private.local_steps import try_gradients
from atoll.training.private.noised_gradients import ROWS_AT_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A task whose rows a training guards.

    Attributes:
        data: its training data.
        seed: of the data's draws.
        clip_norm: C.
        delta: of the guarantee.
        at_once: most rows of one pass on a rank; None: a number of ours.
    """

    task: Task
    data: Any
    seed: int
    clip_norm: float
    delta: float
    at_once: int | None

    def tried(self, model: nn.Module, *, is_captured: bool = False) -> Gradients:
        """Return the way to the example gradients of a model; as `local_steps.try_gradients`."""
        of = {"clip_norm": self.clip_norm, "delta": self.delta}
        return try_gradients(self.task, model.train(), self.data, self.seed, **of, is_captured=is_captured)


def try_whole(
    of: Guarded,
    model: nn.Module | None,
    build: Callable[[], nn.Module],
    *,
    plan: Plan,
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Try a few rows on the whole model, before a mesh divides it; every rank must call it.

    Args:
        of: the task.
        model: the model with its values, on this rank; None: the first rank alone builds it.
        build: () -> the model with other values.
        plan: the plan; in one process in fp32 `sums_of` tries the rows.
        ranks: of the mesh.
        device: the device of this rank, to which its model moves; a model that is built here stays on the CPU.

    Raises:
        TaskBroken: rows have no gradients of their own, or delta is too large; on every rank, all faults.
    """
    if not needs_captured(plan):
        return
    faults = list[str]()
    if model is not None or ranks.is_first:
        with generators_kept():
            try:
                of.tried(build() if model is None else model.to(device), is_captured=True)
            except TaskBroken as error:
                faults.append(str(error))
    faults = list(dict.fromkeys(fault for found in ranks.gather(faults) for fault in found))
    if faults:
        raise TaskBroken(*faults)


def sums_of(engine: Engine, of: Guarded) -> Sums:
    """Return the clipped sums of an engine's model of one part.

    Raises:
        TaskBroken: a layer has no rule on this mesh; or, in one process, as in `try_whole`.
    """
    (model,), plan, size = engine.parts, engine.plan, of.at_once or ROWS_AT_ONCE
    if not needs_captured(plan):
        return SumsOfOne(of.tried(model), at_once=size, passes=plan.accumulate)
    agreement = next(iter(engine.agreements), None)
    try:
        return MeshGradients(
            model,
            of.task.loss,
            of.clip_norm,
            plan=plan,
            axes=engine.axes,
            device=engine.device,
            at_once=size,
            agreement=agreement,
        )
    except NotCaptured as error:
        raise TaskBroken(*faults_in(error)) from error
