"""Access to `FSDPParam` and its group: torch's internal records of the parameters that `fully_shard` divides."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def groups_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the `FSDPParamGroup` of each module that `fully_shard` divides: parameters that are gathered together."""
    for module in modules:
        if isinstance(module, FSDPModule):
            yield from fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]


def records_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the `FSDPParam` of each sharded parameter of the modules (internal to torch's FSDP2)."""
    for group in groups_of(modules):
        yield from group.fsdp_params
