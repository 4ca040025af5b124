"""The checkpoint inside a round, from which a repeated request continues with the same bits.

    CHECKPOINT/ROUND.SEED/step-...      as `checkpoint/store` keeps them, the newest alone

A save falls on a step: on each multiple of a number of them, or on the one at which the ranks agree that the seconds
have passed. The last step of a round is saved, too, so that only the update has to be written again; after a round of
less than a minute, which is repeated as quickly, only with an interval in steps.

A save makes copies that synchronize now and then (`plan.outer`) one model. So that no number depends on a clock, a save
by time waits for a step after which they are one anyway.

Of a custom algorithm the checkpoint has what its hooks hold (`hook_values`), beside the model's tensors. A
round whose hooks hold something else is not saved, and starts over when a rank is lost.

A request with another round or seed never finds it. The folder's owner removes it when the update is safe.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.errors import listed
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.store import read_about
from atoll.parallel.communication.outer_config import parse_outer
from atoll.parallel.data.rows_read import rows_read
from atoll.parallel.engine.plan import Plan
from atoll.parallel.hooks import MeshClient
from atoll.parallel.mesh_client.building import MeshModel
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.hook_values import Form, NoForm, Reader, Writer
from atoll.parallel.trainer.outside import Outside, functions_of
from atoll.parallel.trainer.saver import Carried, Saver
from atoll.parallel.trainer.stopping import Agreement
from atoll.task.task import Task
from atoll.training.worker.bench import Json

logger = logging.getLogger(__name__)

WORTH_S = 60.0
"""Time of training from which on its end is worth a checkpoint [s]."""


@contextmanager
def checkpoints(
    request: Json,
    task: Task,
    model: MeshModel,
    dataset: Any,
    num_steps: int,
    ranks: Ranks,
    clock: Callable[[], float],
    client: MeshClient | None = None,
) -> Iterator[Callable[[], None]]:
    """Restore the newest checkpoint of a round, if there is one; every rank calls it.

    On the mesh of the checkpoint random numbers continue where they were; on another they are drawn again.

    Args:
        request: `train` (`worker/main`): `checkpoint` is the folder, `checkpoint_every` the number of steps, or
            `checkpoint_every_s` the number of seconds.
        task: the task, whose loss and metrics may keep a state.
        model: the model, with the values of the version and the optimizer of the round.
        dataset: on which the round trains.
        num_steps: the number of steps of the round.
        ranks: the ranks of the mesh.
        clock: returns the present instant [s].
        client: the client of the task's algorithm, which has begun the training; None: it has none.

    Yields:
        () -> None, to be called after each step.

    Raises:
        CheckpointMismatch: the checkpoint is of another model.
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
        held = None if client is None else Held(client, model, checkpointer, ranks)
        outside = Outside(engine.parts, functions_of(task), ranks)
        carried: dict[str, Carried] = {"tally": model.tally, "outside": outside}
        if held is not None:
            carried[HELD] = held
        rows = ranks.gather(rows_read(dataset, request["seed"]))[0]
        saver = Saver(checkpointer, {}, engine, carried, request["seed"], rows)
        if _is_sound(checkpointer, saver) and (held is None or held.is_in(checkpointer.latest())):
            saver.restore()
        due = _due(request, num_steps, ranks, clock, _copies_are_one(engine.plan))

        def after_step() -> None:
            if due(engine.steps) and (held is None or held.take()):
                reached("crew.saving")
                saver.save()
                reached("crew.saved")

        yield after_step


def _is_sound(checkpointer: Checkpointer, saver: Saver) -> bool:
    """Return whether the newest checkpoint is sound, and of the present data; else the round starts over."""
    path = checkpointer.latest()
    if path is None:
        return True
    faults = checkpointer.damage(path)
    if not faults and (found := saver.other_rows(path)):
        faults = [f"it belongs to a training {found}"]
    if faults:
        logger.warning("the round starts over, without its checkpoint: %s", listed(faults))
    return not faults


HELD = "held"
"""The key of the hook state in the values of a checkpoint."""


class Held:
    """The values that the hooks of an algorithm hold, as a part of each checkpoint. Every rank calls the methods.

    Args:
        client: the client of the training.
        model: the model that the client trains.
        checkpointer: the checkpointer that saves these tensors beside the model.
        ranks: the ranks of the mesh.
    """

    def __init__(self, client: MeshClient, model: MeshModel, checkpointer: Checkpointer, ranks: Ranks) -> None:
        self._client, self._model, self._checkpointer, self._ranks = client, model, checkpointer, ranks
        self._state: dict[str, Any] = {}
        self._tensors: list[torch.Tensor] = []
        checkpointer.beside = lambda: _by_number(self._tensors)

    def is_in(self, path: Path | None) -> bool:
        """Return whether a checkpoint has hook state, in a form that this mesh can restore."""
        about = {} if path is None else read_about(path)
        if HELD not in about.get("extra", {}):
            return False
        forms = [Form(**form) for form in about["extra"][HELD]["forms"]]
        is_on_this_mesh = about["mesh"] == self._model.engine.plan.mesh.degrees
        return is_on_this_mesh or all(form.fits(self._model.tensors()) for form in forms)

    def take(self) -> bool:
        """Serialize the client's hook state for the next checkpoint; return whether every rank can save it."""
        writer, values, fault = Writer(self._model.tensors(), self._client.start), {}, ""
        try:
            values = {name: writer.write(value, f"client.{name}") for name, value in self._client.held.items()}
        except NoForm as error:
            fault = str(error)
        self._state = {"values": values, "forms": [asdict(form) for form in writer.forms]}
        self._tensors = writer.tensors
        found = self._ranks.gather([fault, sha256(json.dumps(self._state).encode()).hexdigest()])
        if not fault and any(other != found[0] for other in found):
            fault = "ranks hold different values"
        if fault:
            logger.warning("the round is not saved, and a lost rank repeats it from its beginning: %s", fault)
        return not fault

    def state(self) -> dict[str, Any]:
        """Return the state that `take` has serialized."""
        return self._state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the client's hook state from the latest checkpoint."""
        tensors, device = self._model.tensors(), self._model.engine.device
        filled = [Form(**form).empty(tensors, device) for form in state["forms"]]
        path = self._checkpointer.latest()
        assert path is not None
        self._checkpointer.read_beside(path, _by_number(filled))
        reader = Reader(filled, tensors, self._client.start)
        self._client.hold({name: reader.read(form) for name, form in state["values"].items()})


def _by_number(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): tensor.detach() for number, tensor in enumerate(tensors)}


def _copies_are_one(plan: Plan) -> Callable[[int], bool]:
    """Return a function that tells whether the ranks' copies are equal after a number of steps, without a flush."""
    outer = parse_outer(plan.outer)
    if outer is None:
        return lambda steps: True
    if outer.method == "delayed":  # some means are always in transit, unless none is late
        return lambda steps: outer.steps == 0
    return lambda steps: steps % outer.steps == 0


def _due(
    request: Json,
    num_steps: int,
    ranks: Ranks,
    clock: Callable[[], float],
    may_save: Callable[[int], bool] = lambda steps: True,
) -> Callable[[int], bool]:
    """Return a function that tells, once for each step, whether to save a checkpoint; the same on all ranks."""
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
