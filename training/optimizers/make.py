"""The construction of optimizers from a config: torch's or layer-wise, and the parameters that decay."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.ground.printable import count_of
from atoll.training.optimizers.dtensor import is_dtensor
from atoll.training.optimizers.lamb import LAMB
from atoll.training.optimizers.larc import LARC
from atoll.training.optimizers.lars import LARS
from atoll.training.optimizers.novograd import NovoGrad
from atoll.training.optimizers.options import OptimizerConfig

LAYERWISE: dict[str, Any] = {"lars": LARS, "larc": LARC, "lamb": LAMB, "novograd": NovoGrad}
FUSED_ON_SHARDS = ("adam", "adamw")
"""Torch's methods whose fused step also takes DTensors, which SGD's does not."""

ELEMENTWISE: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the optimizer of one model, or of one part of it, without frozen parameters.

    Torch's methods are fused on CUDA, where torch can, and process all tensors at once elsewhere, if the parameters are
    alike (all plain, or all on one mesh); a mixture is stepped one by one.

    Args:
        config: the method.
        named_parameters: after the model was sharded.

    Raises:
        ValueError: there is nothing to train.
    """
    named = list(named_parameters)
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"nothing to train: {count_of(len(named), 'parameter')}, all frozen ({', '.join(n for n, _ in named[:5])})"
        )
    if config.name in LAYERWISE:
        made: torch.optim.Optimizer = LAYERWISE[config.name](
            parameters, config.lr, skip_1d=config.skip_1d, **config.options
        )
        return made
    meshes = {parameter.device_mesh if is_dtensor(parameter) else None for parameter in parameters}
    are_alike = len(meshes) == 1
    can_fuse = all(parameter.is_cuda for parameter in parameters) and (
        meshes == {None} or config.name in FUSED_ON_SHARDS
    )
    how = {"fused": are_alike and can_fuse, "foreach": are_alike and not can_fuse}
    groups = decay_groups(parameters, spares_vectors=config.skip_1d)
    made = ELEMENTWISE[config.name](groups, config.lr, **config.options, **how)
    return made


def decay_groups(parameters: Sequence[Tensor], *, spares_vectors: bool) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters with and without decay.

    Args:
        parameters: the parameters, in their order.
        spares_vectors: exempt parameters of at most one dimension; else one group has all.
    """
    spared = [spares_vectors and parameter.ndim <= 1 for parameter in parameters]
    decayed = [parameter for parameter, is_spared in zip(parameters, spared, strict=True) if not is_spared]
    free = [parameter for parameter, is_spared in zip(parameters, spared, strict=True) if is_spared]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
