"""Trial of a custom optimizer: whether it steps shards as it steps whole tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from atoll.plugins.guard import RAISED, told
from atoll.task.errors import TaskBroken
from atoll.task.local import Local, optimizer_factory
from atoll.training.optimizers.custom_optimizer import custom_optimizer

TRIAL_SHAPES = ((6, 4), (6,))
TRIAL_REPEATS = 50
"""Number of steps with gradients in the same direction: an estimate of the distance to the optimum grows in them."""

TRIAL_SCALES = (1.0, 1e-3, 1e3, 1.0)
"""The scales of the random gradients after `TRIAL_REPEATS`: a rule may clip, or depend on a gradient's size."""

TRIAL_RATE = 1.0
"""The learning rate of a second trial: with a small rate an estimate of the distance needs more steps to grow."""

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Largest difference between two moves, as a fraction of the tensor's largest move in this step."""


KINDS_MAX = 64
"""The number of optimizers whose verdicts a process remembers."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The code and the settings of an optimizer, without the rate, which a schedule changes in each round."""

    factory: int
    """The identity of the function or class that makes it, which the verdict keeps alive in `local`."""
    made: type
    """The type of the optimizer that the factory makes."""
    settings: str
    """The values of the optimizer's groups and attributes, as text."""
    local: Local = field(compare=False)


def is_elementwise(local: Local) -> bool:
    """Return whether a custom optimizer moves each element by itself, so that it can step shards.

    A trial decides: the same steps on two tensors, and on their halves, rows or columns, each with a separate
    optimizer, must move the elements alike. With a norm of a tensor or of the gradient, a factored or orthogonalized
    moment, a step size from all gradients (D-adaptation), or noise they do not. Moves are compared, not values, in
    which a small learning rate hides them; in single precision and, if the optimizer takes it, in double.

    The process remembers the verdict for other rates of the same optimizer, if its settings are plain values.

    Raises:
        TaskBroken: as `custom_optimizer`, or its step fails; the message has the way out.
    """
    kind = _kind_of(local)
    return _has_like_trials(local) if kind is None else _remembered(kind)


@lru_cache(maxsize=KINDS_MAX)
def _remembered(kind: _Kind) -> bool:
    return _has_like_trials(kind.local)


def _has_like_trials(local: Local) -> bool:
    trials = [replace(local, lr=rate) for rate in (local.lr, TRIAL_RATE)]
    if not all(_moves_alike(trial, torch.float32) for trial in trials):
        return False
    with suppress(TaskBroken):  # it does not take double precision
        return all(_moves_alike(trial, torch.float64) for trial in trials)
    return True


def _kind_of(local: Local) -> _Kind | None:
    """Return the kind of an optimizer; None: some settings, such as tensors, have no complete text."""
    with _way_out(local):
        made = custom_optimizer(local, [torch.nn.Parameter(piece.float()) for piece in _drawn(torch.Generator())])
    groups = [{**group, "params": len(group["params"])} for group in made.param_groups]
    values = {**vars(made), "param_groups": groups, "momentum": local.momentum, "weight_decay": local.weight_decay}
    if not _is_plain(values):
        return None
    return _Kind(id(optimizer_factory(local)), type(made), repr(_without_rate(values)), local)


def _is_plain(value: Any) -> bool:
    """Return whether a value's `repr` is complete."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str)


def _without_rate(value: Any) -> Any:
    """Return a value without the entries `lr` of all dicts in it, lists and dicts alike."""
    if isinstance(value, dict):
        return {key: _without_rate(inner) for key, inner in value.items() if key != "lr"}
    return [_without_rate(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _way_out(local: Local) -> Iterator[None]:
    """Run the user's code in a trial; errors have the reason of the call, and the way out.

    Raises:
        TaskBroken: in place of any error.
    """
    try:
        yield
    except RAISED as error:
        is_told = isinstance(error, TaskBroken)
        what = str(error) if is_told else told(error, f"local.optimizer: {local.optimizer_name}")
        raise TaskBroken(
            f"{what} (in a trial at lr={local.lr:g} on small dense "
            "tensors, which tells whether it can step the shards of this mesh); allowed: an optimizer that takes them "
            "and this rate, a mesh of dp_replicate alone, or one process"
        ) from error


def _moves_alike(local: Local, dtype: torch.dtype) -> bool:
    """Return whether an optimizer makes the same moves with whole tensors and with their halves."""
    whole, *halved = (_trial(local, dtype, num_shards, axis) for num_shards, axis in ((1, 0), (2, 0), (2, -1)))
    return all(_is_alike(one, other) for paths in halved for one, other in zip(whole, paths, strict=True))


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two paths (steps + 1, elements) have the same moves, to rounding of the values."""
    moves, difference = one.diff(dim=0), one.diff(dim=0) - other.diff(dim=0)
    rounding = 4 * torch.finfo(one.dtype).eps * one.abs().amax(1)[1:]
    return bool((difference.abs().amax(1) <= TOLERANCES[one.dtype] * moves.abs().amax(1) + rounding).all())


def _trial(local: Local, dtype: torch.dtype, num_shards: int, axis: int) -> list[torch.Tensor]:
    """Return the path (steps + 1, elements) of each tensor in a trial, cut along an axis into shards.

    Each shard has a separate optimizer, over its pieces of all tensors.
    """

    def sharded(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        pieces = ([piece.to(dtype, copy=True) for piece in tensor.chunk(num_shards, axis)] for tensor in tensors)
        return list(zip(*pieces, strict=True))

    def joined() -> list[torch.Tensor]:
        return [torch.cat(of_one, axis).detach().flatten() for of_one in zip(*parameters, strict=True)]

    generator = torch.Generator().manual_seed(0)
    parameters = [[torch.nn.Parameter(piece) for piece in shard] for shard in sharded(_drawn(generator))]
    with _way_out(local):
        optimizers = [custom_optimizer(local, shard) for shard in parameters]
    paths = [joined()]
    for gradients in _gradients(generator):
        for shard, optimizer, pieces in zip(parameters, optimizers, sharded(gradients), strict=True):
            for parameter, piece in zip(shard, pieces, strict=True):
                parameter.grad = piece
            with _way_out(local):
                optimizer.step()
        paths.append(joined())
    return [torch.stack(path) for path in zip(*paths, strict=True)]


def _gradients(generator: torch.Generator) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of each step of a trial."""
    direction = _drawn(generator)
    for _ in range(TRIAL_REPEATS):
        yield [mean * (1 + 0.5 * noise) for mean, noise in zip(direction, _drawn(generator), strict=True)]
    for scale in TRIAL_SCALES:
        yield [scale * noise for noise in _drawn(generator)]


def _drawn(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in TRIAL_SHAPES]
