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


def recompute(block: nn.Module, kind: str, name: str = "") -> None:
    """Let a block save only its inputs (`full`), or also its expensive results (`selective`).

    Its `forward` is wrapped, not the module, so that names and hooks stay as they are. The repetition begins with the
    draws and the state of the first pass (`repetition`), and leaves them as they are now.
    """
    repetition = Repetition(block, name)
    inner = repetition.watched(block.forward)
    of_kind = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else None

    def forward(*args: Any, **options: Any) -> Any:
        with repetition.whole():
            return checkpoint(
                inner, *args, use_reentrant=False, context_fn=partial(repetition.contexts, of_kind), **options
            )

    block.forward = forward


def recompute_compiled(block: nn.Module, kind: str) -> None:
    """Do the same for a block that is compiled: saved buffers do not see the repetition, and torch's draws repeat."""
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if saved_buffers(block):
        options["context_fn"] = partial(_unchanged_again, block, options.get("context_fn"))
    block.forward = partial(checkpoint, block.forward, **options)


def _unchanged_again(block: nn.Module, inner: Callable[[], Contexts] | None) -> Contexts:
    forward, again = (nullcontext(), nullcontext()) if inner is None else inner()
    return forward, _both(unchanged(block), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
