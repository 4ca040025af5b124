"""The trials of a task for a mesh, in their order, and the running of them before a training."""

import logging
from collections.abc import Sequence
from typing import Any

from atoll.parallel.engine.plan import Plan
from atoll.parallel.trials.between_passes import follows_examples, repeats, repeats_at_a_site
from atoll.parallel.trials.chain import chain
from atoll.parallel.trials.mixed_rows import mixes_rows
from atoll.parallel.trials.references import references
from atoll.parallel.trials.way import MeshWay, side_effects, way_of
from atoll.task.task import Task
from atoll.training.trials.trial import Trial, refuse

logger = logging.getLogger(__name__)

Trials = Sequence[Trial[MeshWay]]

REFUSED: Trials = (references, chain, follows_examples, side_effects)
"""The trials whose faults refuse a centralized training."""

TOLD: Trials = (repeats, mixes_rows)
"""The trials whose faults are logged: such a training runs, and computes something else than one process."""

REFUSED_AT_A_SITE: Trials = (*REFUSED, repeats_at_a_site)
TOLD_AT_A_SITE: Trials = (mixes_rows,)


def needs_trials(plan: Plan) -> bool:
    """Return whether a plan may lose, repeat or not support effects of a task's code."""
    return plan.is_sharded or plan.mesh.dp > 1 or plan.mesh.pp > 1 or plan.microbatches > 1


def try_on_mesh(
    task: Task, plan: Plan, seed: int, data: Any, *, is_site: bool = False, tells: bool = True
) -> list[str]:
    """Run the trials of a task; return the blocks with a parameter that is used outside of their calls.

    A small model takes real passes, a large one passes on `meta`, without memory, if its code runs there. A pass that
    fails here is left to the first step, which reports its error.

    Args:
        task: the task with its options and settings.
        plan: the plan of the training.
        seed: the seed of the training.
        data: the training data, of which a few examples are read.
        is_site: the mesh is a client of a federation.
        tells: log the faults that refuse nothing.

    Raises:
        TaskBroken: a trial has faults; the message lists those of the first such trial.
    """
    if not needs_trials(plan):
        return []
    with way_of(task, plan, seed, data) as way:
        try:
            borrowed = way.effects.borrowed
        except Exception:  # any: of the task's data
            return []
        refuse(REFUSED_AT_A_SITE if is_site else REFUSED, way)
        for trial in (TOLD_AT_A_SITE if is_site else TOLD) if tells else ():
            for line in trial(way):
                logger.warning("%s", line)
        return borrowed
