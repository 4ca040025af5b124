"""The frozen tensors of a model on a mesh, which every site has and none sends (`training.model.frozen`).

Each rank reads its boxes of them from the files of the base; those that no file has are drawn by the seed of the run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FSDPModule

from atoll.parallel.checkpoint.ranks import Ranks, patient_ranks
from atoll.parallel.checkpoint.state import first_names, local_state
from atoll.parallel.engine.sharding import whole
from atoll.parallel.engine.step import Engine
from atoll.parallel.exchange.shares import Share
from atoll.parallel.mesh_client.together import together
from atoll.task.context import context_of
from atoll.task.errors import TaskMismatch
from atoll.task.task import Task
from atoll.training.base.base_files import BaseRefused
from atoll.training.base.digests import digest_of, line_of
from atoll.training.base.loading import Matched
from atoll.training.model.frozen import match_base


def base_of(task: Task, model: nn.Module, seed: int) -> Matched | None:
    """Return the files of a model's frozen tensors, which may be on meta; None: the task has no base.

    Raises:
        BaseRefused: they do not fit the model.
        TaskBroken: an adapter of the model needs the base's values when it is made.
    """
    return None if task.base is None else match_base(model, task.base, context_of(task, seed=seed))


def drawn_of(frozen: frozenset[str], tied: Sequence[Sequence[str]], base: Matched | None) -> frozenset[str]:
    """Return the first names of the frozen tensors that no file of the base has.

    Args:
        frozen: all names of the frozen tensors.
        tied: the names of each tied weight.
        base: the files; None: there are none.
    """
    first = first_names(tied)
    return frozenset(first.get(name, name) for name in frozen) - (base.sources.keys() if base is not None else set())


def read_base(base: Matched | None, shares: Sequence[Share], names: frozenset[str]) -> None:
    """Load the base files' values into this rank's shards of the named tensors.

    Raises:
        BaseRefused: the files have two values of a tied tensor.
        OSError: they cannot be read.
    """
    if base is None:
        return
    mine = [share for share in shares if share.name in names]
    if faults := [fault for share in mine for fault in base.read(share.name, share.slices, share.local)]:
        raise BaseRefused(*faults)


class FrozenTensors:
    """The frozen tensors of a model on its mesh.

    Args:
        engine: the engine of the model, with their values; it takes no mean of their buffers.
        names: all of their names.
        tied: the names of each tied weight of the whole model.
        base: the files of their values; None: there are none.
    """

    def __init__(
        self, engine: Engine, names: frozenset[str], tied: Sequence[Sequence[str]], base: Matched | None
    ) -> None:
        self._parts, self._names, self._tied, self._base = engine.parts, names, tied, base
        self._drawn, self._digest = drawn_of(names, tied, base), ""
        engine.fixed = [tensor for _, tensor in self.here() if not isinstance(tensor, nn.Parameter)]

    def here(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen tensors of this rank, once for each of their names."""
        for part in self._parts if self._names else ():
            _give_up_gathered(part)
            named = (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False))
            for wrapped, tensor in named:
                (name,) = _get_fqns(part, wrapped)
                if name in self._names:
                    yield name, tensor

    def digest(self, ranks: Ranks, is_first_here: bool, cache: Path | None) -> str:
        """Return the digest of all frozen tensors (`training.model.frozen.frozen_digest`); every rank must call it.

        The first rank of each machine reads its files of the base, which may be a copy. A drawn tensor is gathered for
        a moment, one after another.

        Args:
            ranks: the ranks of the mesh.
            is_first_here: this rank is the first of its machine.
            cache: the file of what is known of the base's files (`kept_lines`).

        Raises:
            TaskMismatch: ranks have different values.
            OSError: a file cannot be read.
        """
        if self._names and not self._digest:
            lines = {name: line_of(whole(tensor)) for name, tensor in self._drawn_here()}
            base = self._base if is_first_here else None
            with patient_ranks() as patient:
                lines |= together(patient, lambda: {} if base is None else base.lines(self._names, cache))
            self._digest = digest_of(_agreed(ranks.gather(lines)))
        return self._digest

    def _drawn_here(self) -> list[tuple[str, torch.Tensor]]:
        local = local_state(self._parts, (), first_names(self._tied))
        return [(name, tensor) for name, tensor in local.tensors if name in self._drawn]


def _give_up_gathered(part: nn.Module) -> None:
    """Free the whole parameters that an evaluation under ZeRO 1 and 2 leaves in place of a part's shards."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _agreed(found: Sequence[dict[str, str]]) -> dict[str, str]:
    """Merge the digest lines of all ranks.

    Raises:
        TaskMismatch: two ranks have different ones of a tensor.
    """
    lines: dict[str, str] = {}
    for rank, of_rank in enumerate(found):
        for name, line in of_rank.items():
            if lines.setdefault(name, line) != line:
                raise TaskMismatch(
                    f"{name}, which is not exchanged, has other values at rank {rank} than at a rank before it: give "
                    "all machines of the mesh the same files and the same versions of packages"
                )
    return lines
