"""Activation checkpointing: a block's intermediate results are computed again for the backward pass.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, section 5 (selective).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from atoll.parallel.engine.buffers import saved_buffers, unchanged
from atoll.parallel.engine.repetition import Contexts, Repetition

EXPENSIVE = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)
"""The operations whose results the selective kind saves: products, attention, and collectives."""


def recompute(block: nn.Module, kind: str, *, name: str = "", is_compiled: bool = False) -> None:
    """Make a block save only its inputs (`full`), or also its expensive results (`selective`).

    Its `forward` is wrapped, not the module, so that names and hooks stay. The repetition begins with the
    draws and the state of the first pass (`repetition`), and does not change them. Of a compiled block torch's
    draws repeat, and saved buffers do not see the repetition.

    Args:
        block: a block.
        kind: full or selective.
        name: the name of the block, for a refusal.
        is_compiled: torch compiles the block, and keeps values itself that change in place.
    """
    selective = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else None
    if is_compiled:
        options: dict[str, Any] = {"context_fn": selective} if selective is not None else {}
        if saved_buffers(block):
            options["context_fn"] = partial(_unchanged_again, block, selective)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        return
    repetition = Repetition(block, name)
    inner, contexts = repetition.watched(block.forward), None if selective is None else _Selective(selective).contexts

    def forward(*args: Any, **options: Any) -> Any:
        with repetition.whole():
            return checkpoint(
                inner, *args, use_reentrant=False, context_fn=partial(repetition.contexts, contexts), **options
            )

    block.forward = forward


class _Selective:
    """The contexts of a selective block, which saves nothing once a pass has changed an expensive result in place.

    A saved result that changes, as under `nn.ReLU(inplace=True)` behind a linear layer or in an LSTM, cannot stand for
    itself in the repetition. Its first pass shows whether a block does this: it is repeated as a whole.
    """

    def __init__(self, selective: Callable[[], Contexts]) -> None:
        self._selective = selective
        self._changes: bool | None = None

    def contexts(self) -> Contexts:
        """Return the contexts of a pass and of its repetition."""
        if self._changes:
            return nullcontext(), nullcontext()
        forward, again = self._selective()
        return (forward, again) if self._changes is False else (self._first_pass(forward), self._repetition(again))

    @contextmanager
    def _first_pass(self, forward: AbstractContextManager[Any]) -> Iterator[None]:
        results = _Results()
        with results, forward:
            yield
        self._changes = bool(self._changes) or results.have_changed

    @contextmanager
    def _repetition(self, again: AbstractContextManager[Any]) -> Iterator[None]:
        with nullcontext() if self._changes else again:
            yield


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The expensive results of a pass, which change if an operation writes into their memory.

    By the memory, not by torch's count of changes: `unsafe_chunk`, which a GRU writes into, has a separate count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, torch.Tensor] = {}
        self.have_changed = False
        """Whether an operation has written into one of the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and self._seen:
            self.have_changed = self.have_changed or any(map(self._is_seen, _written(func, args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        if func in EXPENSIVE:
            self._seen |= {_memory(each): each for each in tree_leaves(result) if isinstance(each, torch.Tensor)}
        return result

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._seen


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes into."""
    given = [*zip(func._schema.arguments, args, strict=False)]
    given += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
    values = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    address: int = local.untyped_storage()._cdata
    return address


def _unchanged_again(block: nn.Module, inner: Callable[[], Contexts] | None) -> Contexts:
    forward, again = (nullcontext(), nullcontext()) if inner is None else inner()
    return forward, _both(unchanged(block), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
