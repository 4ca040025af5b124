"""A local optimizer of a user's own, from the task or from an installed package."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from atoll.parallel.task.context import Context, contextual
from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local
from atoll.parallel.task.local_optimizers import load

TRIAL_SHAPES = ((6, 4), (6,))
TRIAL_SCALES = (1.0, 1e-3, 1e3, 1.0)
"""The scale of the gradients in each step of a trial: a rule may clip, or look at the size of a gradient."""


def is_elementwise(local: Local) -> bool:
    """Return whether an own optimizer moves each element by itself, so that it steps shards as it steps whole tensors.

    A trial decides: the same four steps on two tensors, and on their halves, rows or columns, each with an optimizer of
    its own, must give the same numbers to rounding. With a norm of a tensor or of the gradient, a factored moment, an
    orthogonalized one, or noise they do not.

    Raises:
        TaskBroken: as `own_optimizer`, or its step fails.
    """
    whole = [value for tensors in _after_trial(local, lambda tensor: [tensor]) for value in tensors]
    for axis in (0, -1):
        pieces = _after_trial(local, lambda tensor, axis=axis: [half.clone() for half in tensor.chunk(2, axis)])  # type: ignore[misc]
        joined = [torch.cat(of_one, axis) for of_one in zip(*pieces, strict=True)]
        if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in zip(whole, joined, strict=True)):
            return False
    return True


def _after_trial(local: Local, cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return the values of each place, an optimizer's own pieces of all tensors, after the steps of a trial."""
    generator = torch.Generator().manual_seed(0)
    values = [cut(torch.randn(shape, generator=generator)) for shape in TRIAL_SHAPES]
    places = [[torch.nn.Parameter(piece) for piece in of_place] for of_place in zip(*values, strict=True)]
    optimizers = [own_optimizer(local, parameters) for parameters in places]
    for scale in TRIAL_SCALES:
        gradients = [cut(torch.randn(shape, generator=generator) * scale) for shape in TRIAL_SHAPES]
        for place, (parameters, optimizer) in enumerate(zip(places, optimizers, strict=True)):
            for parameter, pieces in zip(parameters, gradients, strict=True):
                parameter.grad = pieces[place]
            try:
                optimizer.step()
            except Exception as error:  # the user's code runs here and may raise anything
                raise TaskBroken(f"local.optimizer: {local.optimizer_name}: {type(error).__name__}: {error}") from error
    return [[parameter.detach() for parameter in parameters] for parameters in places]


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
