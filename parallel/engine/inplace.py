"""The parameters that a model's forward pass changes in place, such as clamped weights and moving averages.

A rank's forward pass sees a gathered copy under `fully_shard`, and a stage of a pipeline runs passes that a plain loop
does not. So the change would be lost, or made at other times.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.parallel.engine.buffers import saved_buffers

BATCH_NORMS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
"""The operators that write to their running statistics, the fourth and the fifth argument, and do not declare it."""


class CopiesDiffer(ValueError):
    """The ranks' copies of a parameter differ, though their optimizers take equal steps."""


class _Writes(TorchDispatchMode):
    """The storages that operators have written to, also through views and `.data`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is not None and schema.name in BATCH_NORMS:
            self.storages |= {storage_of(statistic) for statistic in args[3:5] if statistic is not None}
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else given.get(argument.name)
                self.storages |= {storage_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        return func(*args, **given)


@dataclass(frozen=True, slots=True)
class Written:
    """The names of the tensors of a model that a pass changes in place, or whose data it replaces."""

    parameters: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    """The changed buffers that are state; all others are tables that a model could compute again."""


def written_in_forward(model: nn.Module, run: Callable[[], Any]) -> Written:
    """Return the tensors that a pass changes.

    Args:
        model: whose tensors are watched; on `meta` or not. The pass may change it.
        run: () -> the pass.
    """
    before = _places(model)
    writes = _Writes()
    with writes:
        run()
    after = _places(model)
    changed = [name for name, (_, place) in before.items() if place in writes.storages or _moved(after, name, place)]
    parameters = [name for name in changed if isinstance(before[name][0], nn.Parameter)]
    return Written(parameters, [name for name in changed if name not in parameters])


def _places(model: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return the parameters and the buffers that are state by name, each with the identity of its memory.

    They are read from the modules, as a hook of the state_dict may make new tensors in each call.
    """
    saved = {id(buffer) for _, _, buffer in saved_buffers(model)}
    tensors = [*model.named_parameters(), *(pair for pair in model.named_buffers() if id(pair[1]) in saved)]
    return {name: (tensor, storage_of(tensor)) for name, tensor in tensors}


def _moved(after: Mapping[str, tuple[torch.Tensor, int]], name: str, place: int) -> bool:
    return name not in after or after[name][1] != place


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the memory that a tensor is a view of, for as long as it lives."""
    place: int = tensor.untyped_storage()._cdata
    return place


@torch.no_grad()
def differing_copies(named: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> list[str]:
    """Return the names of the tensors of which the ranks have different copies; the same on every rank.

    One broadcast of each tensor. Values that are no number are left to the check of the loss. The tolerance (1e-4 of
    the value, and 1e-6) allows for unlike devices in one group.
    """
    names, flags = [], []
    for name, tensor in named:
        first = tensor.detach().clone()
        dist.broadcast(first, group_src=0, group=group)
        names.append(name)
        flags.append(~torch.isclose(tensor, first, rtol=1e-4, atol=1e-6, equal_nan=True).all())
    if not flags:
        return []
    differs = torch.stack(flags).to(torch.int32)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
    return [name for name, flag in zip(names, differs.tolist(), strict=True) if flag]
