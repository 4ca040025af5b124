"""The checkpoints of a training: the model, and all other state on which the next step depends."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.randomness import seed_generators
from atoll.parallel.checkpoint.store import read_about
from atoll.parallel.data.rows_read import Rows, other_rows
from atoll.parallel.engine.step import Engine
from atoll.parallel.trainer.job import Job
from atoll.parallel.trainer.recipe import Recipe, differences


class RunDiffers(ValueError):
    """The folder holds a training with other settings; the message names the differences."""


class Carried(Protocol):
    """An object with a state of plain values that must survive a restart."""

    def state(self) -> dict[str, Any]:
        """Return the object's present state, for a checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the object from a checkpoint."""


def settings_of(job: Job, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that determine the sequence of models; not the mesh, under which it does not change."""
    of_plan = {f"plan.{name}": getattr(job.plan, name) for name in ("precision", "batchnorm", "outer", "compression")}
    of_privacy = {} if job.private is None else job.private.described
    plain: dict[str, Any] = json.loads(json.dumps({"task": job.name, **recipe.described, **of_plan, **of_privacy}))
    return plain


class Saver:
    """The checkpoints of one training. Every method is called by all ranks, at the same point.

    Args:
        checkpointer: the store of the checkpoints.
        settings: the result of `settings_of`; a folder whose training has other settings is refused.
        engine: the engine, whose state is saved.
        carried: further objects with a state, by name.
        seed: the seed, for random numbers on another mesh.
        rows: the summary of the rows that the training reads, the same on all ranks.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        settings: Mapping[str, Any],
        engine: Engine,
        carried: Mapping[str, Carried],
        seed: int,
        rows: Rows,
    ) -> None:
        self._rows = rows
        self._checkpointer, self._settings, self._engine = checkpointer, dict(settings), engine
        self._carried, self._seed = carried, seed
        self.newest: int | None = None
        """The step of the newest checkpoint, complete or being written."""

    @property
    def complete(self) -> int | None:
        """The step of the newest complete checkpoint of this training; on the first rank."""
        return self._checkpointer.complete

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, so that it is complete or has failed.

        Raises:
            CheckpointFailed: it was not written.
        """
        self._checkpointer.settle()

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, the same one on every rank."""
        path = self._checkpointer.latest()
        return None if path is None else int(path.name.removeprefix("step-"))

    def other_rows(self, path: Path) -> str:
        """Return the difference of the data from a checkpoint's, as the end of a sentence; empty: they are the same."""
        before = read_about(path)["extra"].get("rows")  # not in an older one
        return other_rows(before, self._rows) if before else ""

    def save(self) -> None:
        """Make the ranks' models equal and save them, unless this step is saved already."""
        engine = self._engine
        if self.newest == engine.steps:
            return
        engine.flush()
        extra = {
            "settings": self._settings,
            "rows": self._rows,
            **{name: each.state() for name, each in self._carried.items()},
        }
        slots = engine.outer.state(engine.parameters) if engine.outer is not None else {}
        residuals = engine.compression.state_dict() if engine.compression is not None else {}
        self._checkpointer.save(engine.parts, engine.optimizers, extra, engine.steps, slots=slots, rank_local=residuals)
        self.newest = engine.steps

    def restore(self) -> bool:
        """Restore the newest checkpoint; return False if there is none.

        Raises:
            RunDiffers: it is of a training with other settings, or on other data.
            CheckpointMismatch: it is of another model.
            CheckpointBroken: it is damaged.
        """
        path = self._checkpointer.latest()
        if path is None:
            return False
        self._checkpointer.check(path)
        if found := self.other_rows(path):
            raise RunDiffers(_other_data(path.parent.parent, found))
        _check_settings(path, self._settings)
        engine = self._engine
        restored = self._checkpointer.load(engine.parts, engine.optimizers, path)
        engine.steps = self.newest = restored.step
        if engine.outer is not None:
            engine.outer.load_state(restored.slots, engine.parameters)
        if engine.compression is not None and restored.rank_local:
            engine.compression.load_state_dict(restored.rank_local)
        for name, each in self._carried.items():
            if name in restored.extra:  # not in an older one
                each.load_state(restored.extra[name])
        if not restored.is_same_mesh:
            seed_generators(self._seed, restored.step, 0 if engine.axes is None else engine.axes.draw)
        return True


def _other_data(folder: Path, found: str) -> str:
    """Return the refusal to continue a training on other data; `found` is the difference."""
    model = folder / "model.safetensors"
    start = f", from this model: --set train.start={model}" if model.is_file() else ""
    return (
        f"{folder} holds a training {found}: one order of examples cannot have both; "
        f"give the task the data of its beginning again, or start over in another folder (--out){start}"
    )


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    before = read_about(path)["extra"].get("settings", {})
    if found := differences(before, settings):
        raise RunDiffers(
            f"{path.parent.parent} holds a training with other settings: {'; '.join(found)}; "
            "continue with those, or choose another folder (--out)"
        )
