"""Layers that never leave their site: batch norms (FedBN), a local head, or any others that a run's settings name.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021. The
authors look for `bn` in names; here the type of the module decides.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from atoll.parallel.local_training.parameters import state_of
from atoll.parallel.task.errors import TaskBroken

BATCHNORM = "batchnorm"
"""The word for every tensor of every batch norm: scale, shift, running statistics, counter."""


def names_that_stay(model: torch.nn.Module, keep: str | None) -> frozenset[str]:
    """Return the names of a model's tensors that stay at the site.

    Args:
        model: the task's model.
        keep: as in `Local.keep`: `batchnorm`, or names with wildcards (`*`, `?`, `[...]`), separated by commas.

    Raises:
        TaskBroken: a word fits no tensor, or no tensor is left to travel.
    """
    if keep is None:
        return frozenset()
    names, normalized = list(state_of(model)), set(_of_batch_norms(model))
    stays: set[str] = set()
    for word in map(str.strip, keep.split(",")):
        found = [name for name in names if (name in normalized if word == BATCHNORM else fnmatchcase(name, word))]
        if not found:
            raise TaskBroken(f"local.keep: {word!r} fits no tensor of the model (its tensors: {', '.join(names)})")
        stays.update(found)
    if len(stays) == len(names):
        raise TaskBroken(f"local.keep: {keep!r} keeps the whole model, so no tensor is left to train together")
    return frozenset(stays)


def _of_batch_norms(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield from (f"{prefix}.{name}".lstrip(".") for name in module.state_dict())
