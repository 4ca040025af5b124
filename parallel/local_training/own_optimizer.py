"""A local optimizer of a user's own, from the task or from an installed package."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from atoll.parallel.task.context import Context, contextual
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.local_optimizers import load


def own_optimizer(local: Local, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer: `function(parameters, lr=...)`, with `momentum` and `weight_decay` only if they are not 0.

    Raises:
        TaskBroken: it does not load, raises, makes no optimizer of these parameters, or its step needs arguments.
    """
    name = f"local.optimizer: {local.optimizer_name}"
    given = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
    given = {key: value for key, value in given.items() if key == "lr" or value}
    try:
        found = local.optimizer if callable(local.optimizer) else load(local.optimizer)
        made: Any = contextual(found, Context())(list(parameters), **given)
    except (Exception, SystemExit) as error:  # the user's code runs here and may raise anything
        raise TaskBroken(f"{name}: {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskBroken(f"{name}: made an object of the type {type(made).__name__}; allowed: a torch.optim.Optimizer")
    ours = set(map(id, parameters))
    if any(id(parameter) not in ours for group in made.param_groups for parameter in group["params"]):
        raise TaskBroken(f"{name}: has other parameters than those that it was called with; allowed: these, or some")
    try:
        inspect.signature(made.step).bind()
    except TypeError as error:
        raise TaskBroken(f"{name}: its step takes no call without arguments ({error}); allowed: `step()`") from None
    return made
