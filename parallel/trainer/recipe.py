"""From a task's `Local`, a config and the size of the pooled data to all that a training of so many ranks needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from atoll.parallel.data.order import Last, Order, Sampling
from atoll.parallel.optimizers.make import OptimizerConfig
from atoll.parallel.optimizers.schedule import Schedule, scaled_lr
from atoll.parallel.task.local import Local
from atoll.parallel.trainer.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the sequence of models: with the seed and the initial weights all of it."""

    order: Order
    """Which examples make up each step."""

    steps: int
    """Of the whole training."""

    optimizer: OptimizerConfig

    schedule: Schedule
    """Step -> learning rate."""

    clip_norm: float | None

    @property
    def described(self) -> dict[str, Any]:
        """As plain values, by the names under which an operator sets them.

        Not the number of ranks: it changes nothing. And of a constant rate not the steps, so that one may train on.
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


def make_recipe(local: Local, config: TrainConfig, *, num_examples: int, num_ranks: int, least_rows: int = 1) -> Recipe:
    """Settle everything.

    Args:
        local: of the task.
        config: of the training.
        num_examples: of the pooled training data.
        num_ranks: data-parallel ranks.
        least_rows: fewest examples of a rank in a step; 2 where BatchNorm must normalize them.

    Raises:
        ValueError: with everything that does not fit together.
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
        last_min=1 if least_rows == 1 else least_rows * num_ranks,
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
    """Examples of one step on all ranks together."""
    if config.batch_size is not None:
        return config.batch_size
    return num_examples if local.batch_size is None else local.batch_size * num_ranks


def _steps(local: Local, config: TrainConfig, of_epoch: int) -> int:
    if config.steps is not None:
        return config.steps
    if config.epochs is not None:
        return config.epochs * of_epoch
    return min(local.epochs * of_epoch, local.max_steps or local.epochs * of_epoch)


def _optimizer(local: Local, config: TrainConfig, lr: float) -> OptimizerConfig:
    """The task's own method exactly as its sites have it: there, biases and norms decay like the rest."""
    if config.optimizer in (None, local.optimizer):
        momentum = local.momentum if local.optimizer == "sgd" else None
        return OptimizerConfig(
            name=local.optimizer, lr=lr, momentum=momentum, weight_decay=local.weight_decay, skip_1d=False
        )
    return OptimizerConfig(name=config.optimizer or local.optimizer, lr=lr)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two descriptions do not agree on."""
    keys = sorted(before.keys() | now.keys())
    return [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]
