"""The oracle: gradient descent on whole data sets and federated averaging, as plain loops over the user's task."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from atoll import Task
from tests.odd_tasks.tasks.base import SITES

ROUNDS = 2
State = dict[str, torch.Tensor]


def fresh(task: Task) -> nn.Module:
    """Return the model as it is made for seed 0."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = task.model()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.contiguous())  # one of expanded elements cannot be loaded
    return model


def batch_of(task: Task, sites: list[str]) -> tuple[Any, Any]:
    """Return all rows of some sites as one batch."""
    rows = [data[index] for site in sites if (data := task.data(site, "train")) for index in range(len(data))]
    inputs, targets = (task.collate or default_collate)(rows)
    return inputs, targets


def descend(task: Task, model: nn.Module, batch: tuple[Any, Any]) -> None:
    """Take the steps of the task's epochs."""
    inputs, targets = batch
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=task.local.lr)
    model.train()
    for _ in range(task.local.epochs):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def central(task: Task) -> State:
    """Return the model after the epochs on the rows of all sites."""
    model = fresh(task)
    descend(task, model, batch_of(task, list(SITES)))
    return _float32(model)


def divided(task: Task, ranks: int, micro_batches: int) -> State:
    """Return the model after the epochs, where each step is several forward passes, each of consecutive rows.

    The micro-batches of a rank come one after the other; each rank begins a step with the same model and the same
    numbers on its modules, and the mean of what the ranks make of its buffers goes on.
    """
    model = fresh(task)
    inputs, targets = batch_of(task, list(SITES))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=task.local.lr)
    parts = ranks * micro_batches
    chunks = [*zip(inputs.chunk(parts), targets.chunk(parts), strict=True)]
    model.train()
    for _ in range(task.local.epochs):
        optimizer.zero_grad()
        begun = {name: buffer.clone() for name, buffer in model.named_buffers()}
        counted = [(module, _numbers(module)) for module in model.modules()]
        after: list[State] = []
        for rank in range(ranks):
            _restore(model, begun)
            for module, numbers in counted:
                vars(module).update(numbers)
            for rows, of_rows in chunks[rank * micro_batches : (rank + 1) * micro_batches]:
                (task.loss(model(rows), of_rows).sum() / parts).backward()  # type: ignore[no-untyped-call]
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        _restore(model, {name: _mean([of_rank[name] for of_rank in after]) for name in begun})
        optimizer.step()
    return _float32(model)


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _restore(model: nn.Module, values: State) -> None:
    for name, buffer in model.named_buffers():
        buffer.data = values[name].clone()


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean of floats; whole numbers are alike on all ranks."""
    return torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]


def federated(task: Task) -> State:
    """Return the model after the rounds, each the mean of what all sites make of it, weighted by their units."""
    state = _float32(fresh(task))
    for _ in range(ROUNDS):
        differences, weights = [], []
        for site in SITES:
            model = fresh(task)
            model.load_state_dict(state)
            start = _float32(model)
            batch = batch_of(task, [site])
            descend(task, model, batch)
            found = _float32(model)
            differences.append({name: (found[name].double() - start[name].double()) for name in state})
            weights.append(_weight(task, batch, len(task.data(site, "train"))))
        state = {name: _moved(value, [d[name] for d in differences], weights) for name, value in state.items()}
    return state


def _weight(task: Task, batch: tuple[Any, Any], rows: int) -> float:
    return float(task.units(batch[1])) if callable(task.units) else rows


def _moved(value: torch.Tensor, differences: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Return global + mean of the differences; of whole numbers, with the mean rounded."""
    pairs = zip(weights, differences, strict=True)
    mean = torch.stack([weight * difference for weight, difference in pairs]).sum(0) / sum(weights)
    if value.is_floating_point():
        return (value.double() + mean).to(value.dtype)
    return (value.double() + mean.round()).to(value.dtype)


def _float32(model: nn.Module) -> State:
    """Return a copy of the model's state as it travels: floats as float32."""
    return {
        name: tensor.detach().float().clone() if tensor.is_floating_point() else tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }
