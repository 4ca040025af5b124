"""A custom local optimizer, from the task or from an installed package."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from atoll.plugins.guard import called
from atoll.task.context import Context, contextual
from atoll.task.errors import TaskBroken
from atoll.task.local import Local, optimizer_factory


def custom_optimizer(local: Local, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer: `function(parameters, lr=...)`, with `momentum` and `weight_decay` only if they are not 0.

    Raises:
        TaskBroken: it does not load, raises, makes no optimizer for these parameters, or its step needs arguments.
    """
    name = f"local.optimizer: {local.optimizer_name}"
    given = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
    given = {key: value for key, value in given.items() if key == "lr" or value}
    function = contextual(optimizer_factory(local), Context())
    made: Any = called(name, function, list(parameters), failed=TaskBroken, options=given)
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskBroken(f"{name}: made an object of the type {type(made).__name__}; allowed: a torch.optim.Optimizer")
    ours = set(map(id, parameters))
    if any(id(parameter) not in ours for group in made.param_groups for parameter in group["params"]):
        raise TaskBroken(f"{name}: has other parameters than it was called with; allowed: all or some of these")
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        raise TaskBroken(f"{name}: its step cannot be called without arguments ({error}); allowed: `step()`") from None
    return made
