"""The plain loop: one process, in which a step is a loop over the passes of a plan. It imports nothing of Atoll.

Where a pass depends on its rows (batch norm, buffers that follow the data) or on random numbers, the loop does what the
documentation says of a plan: each data-parallel rank has consecutive rows, a generator and buffers of its own; its
micro-batches come one after another; the buffers that are left are the mean over the ranks.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Training:
    """The training of a model, but for its mesh."""

    optimizer: str = "sgd"
    """sgd, momentum, adam, adamw."""
    clip: float | None = None
    decays_vectors: bool = True
    """Let biases and scales decay, too; else they are a group without decay."""
    loss: str = "mean"
    """mean: the mean over the examples; ignored: classes, of which some do not count."""
    travels: str = "all"
    """all, or trained: the tensors that the exported model has."""
    rows: int = 22
    batch: int = 8
    stop: int | None = None
    """The step after which it is interrupted, and resumed from its checkpoint; None: it is not."""


def optimizer_of(training: Training, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer, in two groups if vectors and scalars do not decay."""
    groups: list[Any] = [{"params": parameters}]
    if not training.decays_vectors:
        vectors = [each for each in parameters if each.dim() < 2]
        groups = [{"params": [each for each in parameters if each.dim() > 1]}, {"params": vectors, "weight_decay": 0.0}]
    match training.optimizer:
        case "sgd":
            return torch.optim.SGD(groups, lr=0.1)
        case "momentum":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        case "adam":
            return torch.optim.Adam(groups, lr=0.01)
        case "adamw":
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    raise ValueError(training.optimizer)


@dataclass(frozen=True)
class Trace:
    """The measurements of a training."""

    losses: list[float]
    state: dict[str, np.ndarray[Any, Any]]
    trained: frozenset[str]
    """The names in it that the optimizer moves."""


def train(
    make: Callable[[], nn.Module],
    data: tuple[torch.Tensor, torch.Tensor],
    loss: Callable[[Any, Any], torch.Tensor],
    training: Training,
    *,
    ranks: int,
    micro_batches: int,
) -> Trace:
    """Train for one epoch, in the order of the rows."""
    inputs, targets = data
    torch.manual_seed(0)
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(training, trained)
    buffers = [[each.clone() for each in model.buffers()] for _ in range(ranks)]
    holding: Any = [each for each in model.modules() if hasattr(each, "of_rank")]
    held = [[each.of_rank() for each in holding] for _ in range(ranks)]
    generators = [_generators_of(rank) for rank in range(ranks)]
    losses = []
    model.train()
    for start in range(0, training.rows, training.batch):
        end = min(start + training.batch, training.rows)
        total = float((targets[start:end] != -100).sum())
        optimizer.zero_grad()
        value = 0.0
        for rank, chunks in enumerate(_passes(end - start, ranks, micro_batches)):
            _exchange(model, buffers[rank])
            _hold(holding, held[rank])
            _set_generators(generators[rank])
            for begin, stop in chunks:
                rows = slice(start + begin, start + max(stop, begin + 1))
                count = float((targets[rows] != -100).sum()) if stop > begin else 0.0
                outputs = model(inputs[rows])
                part = loss(outputs, targets[rows]) * (count / total) if count else (outputs * 0.0).sum()
                part.backward()
                value += part.item()
            generators[rank] = _generators()
            held[rank] = [each.of_rank() for each in holding]
            _exchange(model, buffers[rank])
        losses.append(value)
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(trained, training.clip)
        optimizer.step()
    for index, buffer in enumerate(model.buffers()):
        mine = [of_rank[index] for of_rank in buffers]
        buffer.data = torch.stack(mine).mean(0) if buffer.is_floating_point() else mine[0]
    names = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return Trace(losses, _state(model), names)


def _passes(rows: int, ranks: int, micro_batches: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the first and the end row of each micro-batch of each rank; one without rows passes over its first row."""
    for rank in range(ranks):
        begin, end = rows * rank // ranks, rows * (rank + 1) // ranks
        sizes = [len(part) for part in np.array_split(np.arange(end - begin), micro_batches)]
        starts = [begin + sum(sizes[:index]) for index in range(micro_batches)]
        found = zip(starts, sizes, strict=True)
        yield [(start, start + size) if size else (min(begin, rows - 1),) * 2 for start, size in found]


def _exchange(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Exchange the model's buffers and the values."""
    for index, buffer in enumerate(model.buffers()):
        values[index], buffer.data = buffer.data, values[index]


def _hold(holding: Any, held: list[Any]) -> None:
    for each, value in zip(holding, held, strict=True):
        each.take(value)


def _generators_of(rank: int) -> tuple[Any, ...]:
    """Return the states of a rank's generators: seeded from (seed, step, rank)."""
    words = np.random.SeedSequence((0, 0, rank)).generate_state(3)
    for seed, word in zip((torch.manual_seed, np.random.seed, random.seed), words, strict=True):
        seed(int(word))
    return _generators()


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: tuple[Any, ...]) -> None:
    for put, state in zip((torch.set_rng_state, np.random.set_state, random.setstate), states, strict=True):
        put(state)


def _state(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors that travel: of those with several names under the first."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(parameter), name)
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if seen.get(id(tensor), name) == name:
            found[name] = tensor.detach().double().numpy() if tensor.is_floating_point() else tensor.numpy()
    return found
