"""Torch's records of the parameters that `fully_shard` divides, which have no public name."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def groups_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the groups of parameters that are gathered together, of those of the modules that are divided."""
    for module in modules:
        if isinstance(module, FSDPModule):
            yield from fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]


def records_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the record of each parameter of these groups."""
    for group in groups_of(modules):
        yield from group.fsdp_params
