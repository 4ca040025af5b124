"""The replacement of a model's layers by stacked ones, and the layers that cannot be replaced."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from atoll.simulations.engines.batched.attention import Attention
from atoll.simulations.engines.batched.batch_norm import BatchNorm
from atoll.simulations.engines.batched.recurrent import Recurrent
from atoll.simulations.engines.batched.shared import BATCH_NORMS, Shared
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.batched.stacked_layers import (
    CONVOLUTIONS,
    Convolution,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    Stacked,
)

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)

CALLED: dict[type[nn.Module], type[Stacked]] = {
    **dict.fromkeys(BATCH_NORMS, BatchNorm),
    **dict.fromkeys(RECURRENT, Recurrent),
    nn.MultiheadAttention: Attention,
}
"""Layers that are also replaced in a model mapped by torch.func, which cannot map them, or only slowly."""

STACKED: dict[type[nn.Module], type[Stacked]] = {
    nn.Linear: Linear,
    **dict.fromkeys(CONVOLUTIONS, Convolution),
    nn.GroupNorm: GroupNorm,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: LayerNorm,
    nn.Embedding: Embedding,
    **CALLED,
}


def swap(model: nn.Module, shared: Shared, *, is_mapped: bool = False) -> nn.Module:
    """Replace all trained layers of a model by stacked ones; return the model, or the layer that replaces it.

    Args:
        model: the model, which is modified.
        shared: the state of the stacked layers.
        is_mapped: whether torch.func maps the forward; only layers of `CALLED` are replaced.

    Raises:
        CannotBatch: a layer cannot be replaced; the message names the first one.
    """
    owners: dict[int, str] = {}
    for name, module in list(_replaced(model, is_mapped)):
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if reason := ", ".join(_obstacles(module)) or ("is used twice" if _is_used(owners, own, name) else ""):
            raise CannotBatch(f"{name or 'the model'} ({type(module).__name__}) {reason}")
        stacked = STACKED[type(module)](shared, module, name)
        if not name:
            return stacked
        model.set_submodule(name, stacked)
    return model


def _replaced(model: nn.Module, is_mapped: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to replace: layers with trained parameters, and batch norms, but no part of another layer."""
    inside = "\0"
    for name, module in model.named_modules(remove_duplicate=False):
        is_trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        is_ours = _is_called(module) if is_mapped else is_trained or type(module) in BATCH_NORMS
        if not is_ours or name.startswith(inside):
            continue
        if type(module) in CALLED:
            inside = f"{name}."
        yield name, module


def _is_called(module: nn.Module) -> bool:
    """Return whether torch.func has no correct rule for a layer; its rule for embeddings ignores the padding token."""
    return type(module) in CALLED or (type(module) is nn.Embedding and module.padding_idx is not None)


def _is_used(owners: dict[int, str], parameters: list[nn.Parameter], name: str) -> bool:
    is_used = any(id(parameter) in owners for parameter in parameters)
    owners.update((id(parameter), name) for parameter in parameters)
    return is_used


def _obstacles(module: Any) -> Iterator[str]:
    """Yield the reason that a layer cannot be stacked, if there is one."""
    if type(module) not in STACKED:
        yield "has custom weights that only torch.func can stack"
    elif not all(parameter.requires_grad for parameter in module.parameters()):
        yield "is frozen in part"
    elif module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        yield "has hooks"
    elif getattr(module, "padding_mode", "zeros") != "zeros":
        yield f"pads by {module.padding_mode}"
    else:
        yield from STACKED[type(module)].obstacles(module)


def obstacles_to_batching(model: nn.Module) -> Iterator[str]:
    """Yield the reasons that no kind of net supports a model, as sentences for a person."""
    for name, module in model.named_modules():
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        reasons = list(_obstacles(module)) if type(module) in (*BATCH_NORMS, *RECURRENT) else []
        if is_batch_norm and type(module) not in BATCH_NORMS:
            reasons = ["mixes the examples of a batch"]
        yield from (f"{name or 'the model'} ({type(module).__name__}) {reason}" for reason in reasons)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            yield f"{name} is {parameter.dtype}, and only float32 is stacked"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield "nothing in the model is trained"
