"""Faults that only a real step shows: a parameter where its shards are not gathered, and copies that differ."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from atoll.parallel.engine.passes import first_cause

_SIGNS = ("mixed torch.Tensor and DTensor", "storage of size 0")
"""Parts of torch's messages where a pass meets the shards of a parameter, or the freed memory of a gathered one."""


class NotGathered(ValueError):
    """A forward or backward pass used a parameter where its shards are not gathered."""


_IN_PLACE = "_ToTorchTensor is a view and is being modified inplace"
"""The sign of a change in place of a layer's result under tp."""


_NO_STRATEGY = "does not have a sharding strategy registered"
"""The sign of an operator that torch cannot compute on the tensors of tp."""


@contextmanager
def pass_of_shards(tp: int) -> Iterator[None]:
    """Turn torch's errors about shards in a pass of a sharded model into one that names the way out.

    Args:
        tp: the degree of tensor parallelism.

    Raises:
        NotGathered: in place of the `RuntimeError`; no trial has met this use (`trials.watched`).
    """
    try:
        yield
    except RuntimeError as error:
        said = str(first_cause(error))
        if tp > 1 and _IN_PLACE in said:
            raise NotGathered(
                f"tp={tp}: forward changes the result of a layer in place, such as by ReLU(inplace=True), which torch "
                "cannot follow on tensors that tp hands out: use inplace=False, or tp=1"
            ) from error
        if tp > 1 and _NO_STRATEGY in said:
            raise NotGathered(f"tp={tp}: {said.rstrip('.')} in torch, so tp cannot run this model: use tp=1") from error
        if not any(sign in said for sign in _SIGNS):
            raise
        raise NotGathered(
            "the model uses a parameter outside of the call of its block, where its shards are not gathered: call the "
            f"block, or train with dp_replicate{' and tp=1' if tp > 1 else ''} or on one process "
            f"(torch: {said.partition(', need')[0]})"
        ) from error


class CopiesDiffer(ValueError):
    """The ranks' copies of a parameter differ, though their optimizers take equal steps."""


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
