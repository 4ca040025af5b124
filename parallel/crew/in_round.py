"""The checkpoint inside a round, from which a repeated request goes on with the same bits.

    CHECKPOINT/ROUND.SEED/step-...      as `checkpoint/store` keeps them, the newest alone

A save falls on a step: on each multiple of a number of them, or on the one at which the ranks agree that the seconds
have passed. The last step of a round is saved, too, so that only the update has to be written again; after a round of
less than a minute, which is repeated as quickly, only with an interval in steps.

A save makes copies that synchronize now and then (`plan.outer`) one model. So that no number depends on a clock, a save
by time waits for a step after which they are one anyway.

A request with another round or seed never finds it. The folder's owner removes it when the update is safe.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.communication.outer_config import parse_outer
from atoll.parallel.crew.building import MeshModel
from atoll.parallel.crew.crash_points import reached
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.saver import Saver
from atoll.parallel.trainer.stopping import Agreement
from atoll.parallel.worker.bench import Json

WORTH_S = 60.0
"""Time of training from which on its end is worth a checkpoint [s]."""


@contextmanager
def checkpoints(
    request: Json, model: MeshModel, num_steps: int, ranks: Ranks, clock: Callable[[], float]
) -> Iterator[Callable[[], None]]:
    """Restore the newest checkpoint of a round, if there is one; every rank calls it.

    On the mesh of the checkpoint random numbers go on where they were; on another they are drawn anew.

    Args:
        request: `train` (`worker/main`): `checkpoint` is the folder, `checkpoint_every` the number of steps, or
            `checkpoint_every_s` that of seconds.
        model: with the values of the version and the optimizer of the round.
        num_steps: of the round.
        ranks: of the mesh.
        clock: returns the present instant [s].

    Yields:
        () -> None, to be called after each step.

    Raises:
        CheckpointMismatch, CheckpointBroken: the checkpoint is of another model, or cannot be read.
        CheckpointFailed: one could not be written.
    """
    if not request.get("checkpoint"):
        yield lambda: None
        return
    engine = model.engine
    has_copies = engine.axes is not None and engine.plan.outer != "none"
    folder = Path(request["checkpoint"]) / f"{request.get('round_id') or 0}.{request['seed']}"
    with Checkpointer(
        folder,
        keep=1,
        mesh=engine.plan.mesh.degrees,
        tied=model.outline.tied,
        replica=engine.axes.coordinates["dp_replicate"] if has_copies and engine.axes is not None else 0,
        seed=request["seed"],
    ) as checkpointer:
        checkpointer.without = model.outline.frozen
        saver = Saver(checkpointer, {}, engine, {"tally": model.tally}, request["seed"])
        saver.restore()
        due = _due(request, num_steps, ranks, clock, _copies_are_one(engine.plan))

        def after_step() -> None:
            if due(engine.steps):
                reached("crew.saving")
                saver.save()
                reached("crew.saved")

        yield after_step


def _copies_are_one(plan: Plan) -> Callable[[int], bool]:
    """Return a function of the number of steps that says whether the copies are one model after them, unflushed."""
    outer = parse_outer(plan.outer)
    if outer is None:
        return lambda steps: True
    if outer.method == "delayed":  # some means are always on their way, unless none is late
        return lambda steps: outer.steps == 0
    return lambda steps: steps % outer.steps == 0


def _due(
    request: Json,
    num_steps: int,
    ranks: Ranks,
    clock: Callable[[], float],
    may_save: Callable[[int], bool] = lambda steps: True,
) -> Callable[[int], bool]:
    """Return a function of the number of steps that says whether to save, the same on all ranks; called once a step."""
    every, every_s = request.get("checkpoint_every") or 0, request.get("checkpoint_every_s") or math.inf
    if every:
        return lambda steps: steps == num_steps or steps % every == 0
    began = saved_at = clock()
    has_passed = Agreement(lambda: clock() - saved_at >= every_s, clock, ranks.group)
    is_wanted = False

    def is_due(steps: int) -> bool:
        nonlocal saved_at, is_wanted
        if steps == num_steps:
            return any(ranks.gather(clock() - began >= min(every_s, WORTH_S)))
        is_wanted = has_passed.should_stop() or is_wanted
        if not is_wanted or not may_save(steps):
            return False
        saved_at, is_wanted = clock(), False
        return True

    return is_due
