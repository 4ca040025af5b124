"""The saving and loading of a training run: model, optimizers, random numbers, and the trainer's values.

Saving is asynchronous by default: the ranks copy their shards into memory and continue the training; a thread of each
writes them, and rank 0 renames the folder last. A failure there is raised at the next `save`, `load`
or `close`, on all ranks. The thread has a separate gloo group: no two threads ever use one group.

Source: PyTorch, "Distributed Checkpoint" (torch.distributed.checkpoint); the rule that a folder without `.metadata` is
no checkpoint is torchtitan's.
"""

import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch, listed, reason
from atoll.parallel.checkpoint.randomness import generator_state, restore_generators, seed_generators
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.checkpoint.reading import Saved
from atoll.parallel.checkpoint.state import MODEL, Loading, as_bytes, first_names, local_state, state_to_save
from atoll.parallel.checkpoint.store import Store, damage, read_about, reading
from atoll.parallel.checkpoint.writing import Writer

RANDOM = "random"
"""The key, before the rank, of the state of its random number generators, JSON as bytes."""

BESIDE = "beside"
"""The key, before the name, of a further tensor of all ranks."""

OWN = "own"
"""The key, before rank and name, of a tensor of that rank alone."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The values of a checkpoint beside model and optimizers."""

    step: int
    """The number of steps done before the checkpoint."""

    extra: dict[str, Any]
    """The trainer's values from `save`."""

    slots: dict[str, torch.Tensor]
    """The slots from `save`, for the parameters of this rank and sharded like them."""

    is_same_mesh: bool
    """Whether the number of ranks and the mesh equal the checkpoint's. If true, every rank continues with its random
    numbers; else they are seeded again, from seed, step and rank."""

    rank_local: dict[str, torch.Tensor]
    """The tensors of this rank alone from `save`, on the CPU; empty on another mesh."""


class Checkpointer:
    """The checkpoints of one run. Every method is called by all ranks, at the same point.

    Args:
        folder: the folder of the checkpoints; on storage that all ranks share.
        keep: the number of last checkpoints that stay.
        every: checkpoints of a multiple of this number of steps stay forever; None: only the last ones stay.
        asynchronous: continue the training while a checkpoint is written. Without a process group it never does.
        mesh: the degrees of the mesh, by axis: recorded; tensors of a rank alone are restored only on an equal mesh.
        tied: the names of each tied weight of the whole model (`engine.ties.tied_names`): a pipeline may separate them.
        replica: the index of the copy that this rank's optimizers train, if each copy has a separate optimizer state
            (local SGD, DiLoCo); with 0 on all ranks, one copy's state is saved and loaded everywhere.
        seed: the seed of the run, for ranks that start with new random numbers.

    Raises:
        ValueError: `keep` or `every` is less than 1.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        every: int | None = None,
        asynchronous: bool = True,
        mesh: Mapping[str, int] | None = None,
        tied: Sequence[Sequence[str]] = (),
        replica: int = 0,
        seed: int = 0,
    ) -> None:
        self._store = Store(Path(folder), keep, every)
        self._mesh, self._tied, self._replica, self._seed = dict(mesh or {}), first_names(tied), replica, seed
        self.without: Collection[str] = ()
        """The names of the model's tensors that are in no checkpoint, because the files of its base have them."""
        self.beside: Callable[[], Mapping[str, torch.Tensor]] = dict
        """Returns further tensors to save, by name: whole ones, the same on all ranks, or DTensors."""
        self._ranks = Ranks()
        self._is_asynchronous = asynchronous and self._ranks.group is not None
        self._group: Any = dist.new_group(backend="gloo") if self._ranks.group is not None else None
        self._writing: Future[None] | None = None
        self._sound: Path | None = None
        self.complete: int | None = None
        """The step of the newest checkpoint that is complete, of those that were loaded or saved here; on rank 0."""

    def save(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any],
        step: int,
        *,
        slots: Mapping[str, torch.Tensor] | None = None,
        rank_local: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Save the run after `step` steps; when this returns, parts and optimizers may change.

        Args:
            parts: the parts of this rank, with the names of the whole model.
            optimizers: one for each part.
            extra: JSON values, the same on every rank (rank 0's are saved): the loader's state, the schedule, a config.
            step: steps done; an older checkpoint of the same step is replaced.
            slots: tensors of parameters' shapes and shardings by KIND/NAME (an outer optimizer's momentum): they follow
                the parameters to another mesh.
            rank_local: tensors of this rank alone (residuals of compression): lost when the mesh changes.

        Raises:
            CheckpointFailed: this one cannot begin or was not written, or the one before was not.
        """
        self.settle()
        local = local_state(parts, optimizers, self._tied, self.without)
        state = state_to_save(local, slots or {}, self._replica)
        state |= {f"{OWN}/{self._ranks.rank}/{key}": tensor for key, tensor in (rank_local or {}).items()}
        state |= {f"{BESIDE}/{name}": tensor for name, tensor in self.beside().items()}
        state[f"{RANDOM}/{self._ranks.rank}"] = as_bytes(generator_state())
        fault, frozen = "", {}
        try:
            frozen = json.loads(json.dumps(dict(extra)))  # the trainer may change its values during the write
            if self._ranks.is_first:
                self._store.begin(step)
        except (TypeError, ValueError) as error:
            fault = f"extra: {error}"
        except OSError as error:
            fault = f"{self._store.folder}: {error}"
        self._raise_failed([*local.faults, *filter(None, [fault])])
        facts = self._ranks.gather({"tied": local.tied, "buffers": sorted(local.buffers)})
        writer = Writer(self._store.temporary(step))
        publish = partial(self._publish, step, frozen, facts, writer) if self._ranks.is_first else None
        written = self._write(state, writer)
        self._writing = Future()
        written.add_done_callback(partial(_then, publish, self._writing))
        if not self._is_asynchronous:
            self.settle()

    def latest(self) -> Path | None:
        """Return the newest checkpoint, complete or damaged since, the same one on every rank; None: there is none."""
        self.settle()
        path = self._store.latest() if self._ranks.is_first else None
        name = self._ranks.gather(path.name if path else None)[0]
        return self._store.folder / name if name else None

    def check(self, path: Path) -> None:
        """Raise the faults of a checkpoint's files.

        Raises:
            CheckpointBroken: it is not complete, or damaged: each such file is named, and the newest sound checkpoint.
        """
        if faults := self.damage(path):
            raise CheckpointBroken(listed([*faults, self._way_out(path)]))

    def damage(self, path: Path) -> list[str]:
        """Compare every file of a checkpoint with its SHA-256, and list the faults; the ranks divide the reading."""
        self.settle()
        if path == self._sound:
            return []
        ranks = self._ranks
        found = [fault for faults in ranks.gather(damage(path, ranks.rank, ranks.size)) for fault in faults]
        if not found:
            self._sound = path
        return found

    def load(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], path: Path) -> Restored:
        """Load a checkpoint into parts and optimizers, whatever mesh it was saved under.

        Args:
            parts: the parts of this rank.
            optimizers: one for each part; or none, to load the model alone.
            path: the path of the checkpoint.

        Raises:
            CheckpointBroken: as `check`, or it cannot be read; the parts are unchanged if it was damaged.
            CheckpointMismatch: it is of another model or optimizer; every difference is listed, and the parts are
                unchanged.
        """
        self.check(path)
        with ExitStack() as stack:
            loading, about = self._open(stack, parts, optimizers, path)
            self._ranks.raise_if_any(loading.prepare(), CheckpointMismatch)
            self._ranks.raise_if_any(_broken(loading.fill), CheckpointBroken)
            is_same_mesh = (about["world"], about["mesh"]) == (self._ranks.size, self._mesh)
            own: dict[str, torch.Tensor] = {}
            if is_same_mesh:
                own = self._restore_rank(loading.saved)
            else:
                seed_generators(self._seed, about["step"], self._ranks.rank)
        self.complete = about["step"]
        return Restored(about["step"], about["extra"], loading.slots, is_same_mesh, own)

    def read_beside(self, path: Path, targets: Mapping[str, torch.Tensor]) -> None:
        """Load the further tensors of a checkpoint (`beside`) into tensors of the same names.

        Raises:
            CheckpointBroken: a file cannot be read.
        """

        def read() -> None:
            with reading(path):
                Saved(path).read({f"{BESIDE}/{name}": tensor for name, tensor in targets.items()})

        self._ranks.raise_if_any(_broken(read), CheckpointBroken)

    def close(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointFailed: it was not written.
        """
        try:
            self.settle()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the checkpointer; without waiting if this rank fails, since the others may be gone."""
        if error is None:
            self.close()

    def _open(
        self, stack: ExitStack, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], path: Path
    ) -> tuple[Loading, dict[str, Any]]:
        """Open and compare a checkpoint; no rank continues if one of them finds a fault."""
        opened: list[tuple[Loading, dict[str, Any]]] = []
        differences: list[str] = []

        def look() -> None:
            stack.enter_context(reading(path))
            about = read_about(path)
            local = local_state(parts, optimizers, about["tied"] | self._tied, self.without)
            opened.append((Loading(local, Saved(path), self._replica), about))
            differences.extend(opened[0][0].check())

        self._ranks.raise_if_any(_broken(look), CheckpointBroken)
        loading, about = opened[0]
        found = self._ranks.gather({"differences": differences, "names": loading.names})
        faults = [fault for rank in found for fault in rank["differences"]]
        wanted = {name for rank in found for name in rank["names"]}
        faults += [f"{name} is unknown here" for name in loading.saved.names(MODEL) if name not in wanted]
        if faults:
            raise CheckpointMismatch(f"{path} belongs to another model: {listed(faults)}")
        return loading, about

    def _restore_rank(self, saved: Saved) -> dict[str, torch.Tensor]:
        """Restore the random numbers of this rank, and return its tensors."""
        restore_generators(*saved.read_values([f"{RANDOM}/{self._ranks.rank}"]))
        kind = f"{OWN}/{self._ranks.rank}"
        own = {key: saved.entries[f"{kind}/{key}"] for key in saved.names(kind)}
        tensors = {key: torch.empty(entry.shape, dtype=entry.dtype) for key, entry in own.items()}
        saved.read({f"{kind}/{key}": tensor for key, tensor in tensors.items()})
        return tensors

    def _way_out(self, path: Path) -> str:
        """Return the sentence about the newest sound checkpoint beside a damaged one."""
        away = [path.name]
        for step in reversed(self._ranks.gather(self._store.steps())[0]):
            other = self._store.path(step)
            if other != path and not self.damage(other):
                names = " and ".join(away)
                return (
                    f"the newest sound checkpoint is {other}: move {names} out of {self._store.folder}, and the same "
                    f"command continues from step {step}"
                )
            away += [other.name] if other != path else []
        return f"there is no sound checkpoint in {self._store.folder}: move it away, and the training starts over"

    def _write(self, state: dict[str, torch.Tensor], writer: Writer) -> Future[Any]:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        if self._is_asynchronous:
            written: Any = async_save(state, storage_writer=writer, planner=planner, process_group=self._group)
            return written  # type: ignore[no-any-return]
        done: Future[Any] = Future()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                done.set_result(save(state, storage_writer=writer, planner=planner, process_group=self._group))
            except (Exception, CheckpointException) as error:
                done.set_exception(error)
        return done

    def _publish(self, step: int, extra: dict[str, Any], facts: list[dict[str, Any]], writer: Writer) -> None:
        saved = Saved(self._store.temporary(step))
        about = {
            "model": model_digest(saved),
            "mesh": self._mesh,
            "world": self._ranks.size,
            "torch": torch.__version__,
            "tied": {name: first for rank in facts for name, first in rank["tied"].items()},
            "buffers": sorted({name for rank in facts for name in rank["buffers"]}),
            "extra": extra,
        }
        self._store.publish(step, about, writer.digests)
        self.complete = step

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and agree on whether it succeeded.

        Raises:
            CheckpointFailed: it was not written.
        """
        if self._writing is None:
            return
        error = self._writing.exception()
        self._writing = None
        self._raise_failed([_reason(error)] if error else [])

    def _raise_failed(self, faults: list[str]) -> None:
        found = [fault for rank in self._ranks.gather(faults) for fault in rank]
        if found:
            latest = self._store.latest()
            remains = f"the latest is still {latest}" if latest else "there is none yet"
            raise CheckpointFailed(f"no checkpoint was written: {listed(found)}; {remains}")


def model_digest(saved: Saved) -> str:
    """Return the SHA-256 [hex] of the model's names, dtypes and shapes, the same for all checkpoints of one model."""
    lines = [f"{name} {saved.entries[f'{MODEL}/{name}']}\n" for name in saved.names(MODEL)]
    return sha256("".join(lines).encode()).hexdigest()


def _then(publish: Callable[[], None] | None, done: Future[None], written: Future[Any]) -> None:
    """Publish on rank 0 when all ranks have written; PyTorch completes rank 0's future only after all others."""
    error = written.exception()
    if error is None and publish is not None:
        try:
            publish()
        except Exception as fault:
            error = fault
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _broken(look: Callable[[], None]) -> list[str]:
    """Call a function that reads a checkpoint, and return why that fails; empty: it does not."""
    try:
        look()
    except CheckpointBroken as error:
        return [str(error)]
    return []


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {reason(fault[0])}" for rank, fault in error.failures.items())
    return reason(error)
