"""The recipe of a training, from a task's `Local`, a config and the size of the pooled data, for a number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from atoll.parallel.data.division import Last, Sampling
from atoll.parallel.data.order import Order
from atoll.parallel.trainer.config import TrainConfig
from atoll.task.local import Local
from atoll.training.optimizers.options import OPTIONS, OptimizerConfig
from atoll.training.optimizers.schedule import Schedule, scaled_lr


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that, with the seed and the initial weights, determine the sequence of models."""

    order: Order
    """The examples of each step."""

    steps: int
    """The number of steps of the whole training."""

    optimizer: OptimizerConfig

    schedule: Schedule
    """Step -> learning rate."""

    clip_norm: float | None

    @property
    def described(self) -> dict[str, Any]:
        """The recipe as plain values, by the names under which an operator sets them.

        Without the number of ranks, which changes nothing; and, for a constant rate, without the number of steps, so
        that a training can be prolonged.
        """
        order, schedule = self.order, self.schedule
        is_constant = schedule.kind == "constant"
        return {
            "pooled examples": order.num_examples,
            "train.batch_size": order.batch_size,
            "train.sampling": order.sampling,
            "train.last": order.last,
            "train.seed": order.seed,
            "train.optimizer": self.optimizer.name,
            "train.schedule": schedule.kind,
            "train.steps": None if is_constant else self.steps,
            "train.warmup_steps": schedule.warmup_steps,
            "train.end_lr": schedule.end_lr,
            "local.lr": schedule.lr,
            "local.shuffle": order.shuffle,
            "local.clip_norm": self.clip_norm,
            **{f"local.{name}": value for name, value in self.optimizer.options.items()},
        }


def make_recipe(local: Local, config: TrainConfig, *, num_examples: int, num_ranks: int, last_min: int = 1) -> Recipe:
    """Compute the recipe of a training: optimizer, schedule, order of examples, number of steps.

    Args:
        local: the task's `Local`.
        config: the config of the training.
        num_examples: the number of examples of the pooled training data.
        num_ranks: data-parallel ranks.
        last_min: fewest examples of a step on all ranks together; 2 for each part that BatchNorm normalizes by itself.

    Raises:
        ValueError: settings conflict; the message lists all conflicts.
    """
    batch = batch_size_of(local, config, num_examples, num_ranks)
    order = Order(
        num_examples=num_examples,
        batch_size=batch,
        num_ranks=num_ranks,
        sampling=cast(Sampling, config.sampling),
        shuffle=local.shuffle,
        seed=config.seed,
        last=cast(Last, config.last),
        last_min=last_min,
    )
    steps = _steps(local, config, order.num_steps)
    lr = scaled_lr(local.lr, batch, config.base_batch or local.batch_size or batch, config.lr_rule)
    schedule = Schedule(
        lr=lr, steps=steps, kind=config.schedule, warmup_steps=config.warmup_steps, end_lr=config.end_lr
    )
    return Recipe(
        order=order,
        steps=steps,
        optimizer=_optimizer(local, config, lr),
        schedule=schedule,
        clip_norm=local.clip_norm,
    )


def batch_size_of(local: Local, config: TrainConfig, num_examples: int, num_ranks: int) -> int:
    """Return the examples of one step on all ranks together."""
    if config.batch_size is not None:
        return config.batch_size
    return num_examples if local.batch_size is None else local.batch_size * num_ranks


def _steps(local: Local, config: TrainConfig, steps_per_epoch: int) -> int:
    if config.steps is not None:
        return config.steps
    if config.epochs is not None:
        return config.epochs * steps_per_epoch
    return min(local.epochs * steps_per_epoch, local.max_steps or local.epochs * steps_per_epoch)


def _optimizer(local: Local, config: TrainConfig, lr: float) -> OptimizerConfig:
    """Return the config of the optimizer: the task's local one, as its sites use it, or the training's."""
    if config.optimizer is None and local.has_custom_optimizer:
        raise ValueError(
            f"train.optimizer: absent, and local.optimizer is {local.optimizer_name}, which this training does not "
            f"have; allowed: {', '.join(OPTIONS)}: name the one to use here"
        )
    if not local.has_custom_optimizer and config.optimizer in (None, local.optimizer):
        momentum = local.momentum if local.optimizer == "sgd" else None
        return OptimizerConfig(
            name=local.optimizer_name,
            lr=lr,
            momentum=momentum,
            weight_decay=local.weight_decay,
            skip_1d=not local.decay_vectors,
        )
    return OptimizerConfig(name=config.optimizer or local.optimizer_name, lr=lr)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List the values in which two descriptions differ."""
    keys = sorted(before.keys() | now.keys())
    return [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]
