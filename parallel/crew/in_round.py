"""The checkpoint inside a round, from which a repeated request goes on with the same bits.

    CHECKPOINT/ROUND.SEED/step-...      as `checkpoint/store` keeps them, the newest alone

A request with another round or seed never finds it. The folder's owner removes it when the update is safe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.crew.building import MeshModel
from atoll.parallel.trainer.saver import Saver
from atoll.parallel.worker.bench import Json


@contextmanager
def checkpoints(request: Json, model: MeshModel, num_steps: int) -> Iterator[Callable[[], None]]:
    """Restore the newest checkpoint of a round, if there is one; every rank calls it.

    On the mesh of the checkpoint random numbers go on where they were; on another they are drawn anew.

    Args:
        request: `train` (`worker/main`): `checkpoint` is the folder, `checkpoint_every` the number of steps.
        model: with the values of the version and the optimizer of the round.
        num_steps: of the round; the last is saved, too, so that only the update has to be written again.

    Yields:
        () -> None, to be called after each step.

    Raises:
        CheckpointMismatch, CheckpointBroken: the checkpoint is of another model, or cannot be read.
        CheckpointFailed: one could not be written.
    """
    if not request.get("checkpoint"):
        yield lambda: None
        return
    engine, every = model.engine, request.get("checkpoint_every")
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

        def after_step() -> None:
            if engine.steps == num_steps or (every and engine.steps % every == 0):
                saver.save()

        yield after_step
