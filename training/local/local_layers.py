"""Layers that never leave their site: batch norms (FedBN), a local head, or others by the run's settings.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021. The
authors look for `bn` in names; here the type of the module decides.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.task.errors import TaskBroken
from atoll.training.model.memory import groups_of
from atoll.training.model.parameters import state_of

BATCHNORM = "batchnorm"
"""The word for every tensor of every batch norm: scale, shift, running statistics, counter."""


def names_that_stay(model: torch.nn.Module, keep: str | None) -> frozenset[str]:
    """Return the names, as in `state_of`, of a model's tensors that stay at the site.

    A word is compared with every name of every tensor. A tensor stays under all of its names, and with it each tensor
    that shares memory with it: with `head.weight` tied to `embed.weight`, `head.*` keeps both at the site.

    Args:
        model: the task's model.
        keep: as in `Local.keep`: `batchnorm`, or names with wildcards (`*`, `?`, `[...]`), separated by commas.

    Raises:
        TaskBroken: a word fits no exchanged tensor, or no tensor is left to exchange.
    """
    if keep is None:
        return frozenset()
    travels, normalized = state_of(model), set(_of_batch_norms(model))
    group = groups_of(_by_every_name(model))
    stays: set[str] = set()
    for word in map(str.strip, keep.split(",")):
        fits = [name for name in group if (name in normalized if word == BATCHNORM else fnmatchcase(name, word))]
        kept = {group[name] for name in fits}
        found = [name for name in travels if group[name] in kept]
        if not found:
            raise TaskBroken(f"local.keep: {word!r} fits no tensor of the model (its tensors: {', '.join(travels)})")
        stays.update(found)
    if len(stays) == len(travels):
        raise TaskBroken(
            f"local.keep: {keep!r} keeps the whole model, so no tensor is left to train together (a tensor stays under "
            "all of its names, with every view of it)"
        )
    return frozenset(stays)


def _by_every_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by all of their names, also those that its state_dict leaves out."""
    every = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return every | {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _of_batch_norms(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            yield from (f"{prefix}.{name}".lstrip(".") for name in module.state_dict())
