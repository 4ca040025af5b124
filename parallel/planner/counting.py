"""The count of a real step: every collective, the computation that could hide it, and the bytes that are alive.

An operation is ready when all its inputs have been computed. Between the moment at which a collective's input is ready
and the first operation that reads its output, the rank computes something else, which can hide it. Both moments are
counted in floating-point operations of the step, so the answer depends on the order of dependence and not on the
machine. A collective without such computation is waited for, on any machine.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
"""Atoll's names of torch's collective operations."""


@dataclass(slots=True)
class Collective:
    """One call of a collective in a step: its axis, kind and bytes, and the computation that can hide it."""

    axis: str
    """The axis of the mesh; the group's name if it is none of the mesh's."""
    kind: str
    num_bytes: int
    """The size of the collective's largest tensor: the gathered, scattered, reduced or sent one."""
    ready: float
    """Floating-point operations of the step after which the collective's input is complete."""
    needed: float | None = None
    """Floating-point operations of the step before the collective's output is read; None: not in this step."""

    def window(self, end: float) -> float:
        """Return the operations that can hide the collective, in a step with `end` operations."""
        return max(0.0, (end if self.needed is None else self.needed) - self.ready)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts every operation on plain tensors: arithmetic, memory, collectives.

    Args:
        axis_of: the name of a process group -> the axis of the mesh along which its ranks lie.
    """

    def __init__(self, axis_of: Callable[[str], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []
        self.flops = 0.0
        """Operations so far, of products and attention."""
        self.alive = self.peak = 0
        """Bytes of all tensors alive, and their peak."""
        self._axis_of = axis_of
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._ready: dict[int, float] = {}
        self._travelling: dict[int, Collective] = {}

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor that existed before the watch began."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage)
            weakref.finalize(storage, self._release, key)
        self.alive += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        if self.alive > self.peak:
            self._recount()
            self.peak = max(self.peak, self.alive)

    def _recount(self) -> None:
        """Recount all storages: `fully_shard` frees gathered parameters by resizing them, which no operation shows."""
        for key, reference in self._storages.items():
            storage = reference()
            self._sizes[key] = 0 if storage is None else storage.nbytes()
        self.alive = sum(self._sizes.values())

    def _release(self, key: int) -> None:
        self.alive -= self._sizes.pop(key, 0)
        self._storages.pop(key, None)
        self._ready.pop(key, None)
        self._travelling.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute one operation; count its arithmetic, its memory, and its traffic if it is a collective."""
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # it comes again, on the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        before, after = list(_tensors((args, kwargs))), list(_tensors(result))
        kind = KINDS.get(func._opname) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind == "all_reduce" and not any(tensor.is_floating_point() for tensor in before):
            pass  # flags and counts of a few bytes, of which a plan says nothing
        elif kind is not None:
            self._communicate(kind, func, (args, kwargs), before, after)
        elif func._opname == "wait_tensor":
            self._arrive(before, after)
        elif func.namespace not in ("c10d", "_c10d_functional", "prim") and not func.is_view:
            self._compute(func, args, kwargs, before, after, result)
        for tensor in after:
            self.hold(tensor)
        return result

    def _communicate(
        self, kind: str, func: Any, given: Any, before: list[torch.Tensor], after: list[torch.Tensor]
    ) -> None:
        self._read(before)
        num_bytes = max(tensor.numel() * tensor.element_size() for tensor in (*before, *after))
        # the sender decides when a received tensor is ready: count from the request
        ready = self.flops if kind == "receive" else self._when(before)
        collective = Collective(self._axis(given), kind, num_bytes, ready)
        self.collectives.append(collective)
        written = after if func.namespace == "_c10d_functional" else before
        for key in (tensor.untyped_storage()._cdata for tensor in written if kind != "send"):
            self._travelling[key], self._ready[key] = collective, ready

    def _arrive(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        """Assign a collective, once it is waited for, to the tensor that `wait` returns."""
        for old, new in zip(before, after, strict=True):
            key, collective = new.untyped_storage()._cdata, self._travelling.get(old.untyped_storage()._cdata)
            if collective is not None:
                self._travelling[key], self._ready[key] = collective, collective.ready

    def _compute(
        self, func: Any, args: Any, kwargs: Any, before: list[torch.Tensor], after: list[torch.Tensor], result: Any
    ) -> None:
        self._read(before)
        when = self._when(before)
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            when = self.flops
        written = [*after, *_written(func, args, kwargs)]
        self._ready |= {tensor.untyped_storage()._cdata: when for tensor in written}

    def _read(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            collective = self._travelling.pop(tensor.untyped_storage()._cdata, None)
            if collective is not None and collective.needed is None:
                collective.needed = self.flops

    def _when(self, tensors: list[torch.Tensor]) -> float:
        return max((self._ready.get(tensor.untyped_storage()._cdata, 0.0) for tensor in tensors), default=0.0)

    def _axis(self, given: Any) -> str:
        """Return the axis of the group in an operation's arguments: an object in c10d's, a name in functional ones."""
        for leaf in torch.utils._pytree.tree_leaves(given):
            if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min"):
                return self._axis_of(leaf)
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
                return self._axis_of(dist.ProcessGroup.unbox(leaf).group_name)
        return ""


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor | AsyncCollectiveTensor):
            yield leaf


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation changes in place."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
