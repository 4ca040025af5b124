"""What a centralized training needs beside the task and the plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from atoll.parallel.data.order import Last, Sampling
from atoll.parallel.optimizers.make import OPTIONS
from atoll.parallel.optimizers.schedule import KINDS, RULES
from atoll.parallel.task.overrides import overridden, type_faults

CHOICES: dict[str, tuple[str | None, ...]] = {
    "optimizer": (None, *OPTIONS),
    "schedule": KINDS,
    "lr_rule": RULES,
    "sampling": get_args(Sampling),
    "last": get_args(Last),
    "goal": ("min", "max"),
}

AT_LEAST_1_OR_NONE = (
    "epochs",
    "steps",
    "batch_size",
    "base_batch",
    "eval_every",
    "eval_batch_size",
    "checkpoint_every",
    "patience",
    "noise_every",
    "threads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, with which batches, how often to look, when to stop. The rest is the task's own `local`."""

    epochs: int | None = None
    """Passes over the pooled data (>= 1); none: `local.epochs`, what one round asks of every site."""

    steps: int | None = None
    """Optimizer steps (>= 1), whatever the epochs say; none: `local.max_steps`, or those of the epochs."""

    batch_size: int | None = None
    """Examples of one step on all ranks together (>= 1); none: `local.batch_size` for each data-parallel rank."""

    optimizer: str | None = None
    """sgd, adam, adamw, lars, larc, lamb or novograd; none: `local.optimizer`. With another than `local` has, momentum
    and weight decay are the method's own."""

    schedule: str = "constant"
    """What the learning rate does after the warm-up: constant, linear, cosine, polynomial or wsd."""

    warmup_steps: int = 0
    """Steps in which it rises to its peak (>= 0)."""

    end_lr: float = 0.0
    """What it falls to at the end (>= 0), unless it is constant."""

    lr_rule: str = "none"
    """How `local.lr` grows with the batch: linear, sqrt or none."""

    base_batch: int | None = None
    """The batch that `local.lr` was chosen for (>= 1); none: `local.batch_size`."""

    sampling: str = "global"
    """global: any rank may get any example; partition: each data-parallel rank has its own part."""

    last: str = "uneven"
    """The examples that fill no batch at the end of an epoch: uneven (a smaller batch), drop or wrap."""

    prefetch: int = 2
    """Batches that are fetched ahead (>= 0)."""

    workers: int = 0
    """Processes that fetch, where reading an example takes Python long; 0: a thread does (>= 0)."""

    threads: int | None = None
    """Of each process, for the arithmetic on a CPU (>= 1); none: one for a model of fewer than a million parameters,
    whose products are too small to share, and for others as many as torch or OMP_NUM_THREADS says."""

    seed: int = 0
    """Of the initial weights, the order of the examples and what the model draws (>= 0)."""

    log_every: int = 10
    """Steps between two lines of the log (>= 1)."""

    eval_every: int | None = None
    """Steps between two evaluations (>= 1); none: once in each epoch. There is always one at the end."""

    eval_batch_size: int | None = None
    """Examples of one batch of an evaluation, on all ranks together (>= 1); none: as in training."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints (>= 1); none: once in each epoch. There is always one at the end."""

    keep: int = 3
    """Checkpoints that are kept (>= 1)."""

    asynchronous: bool = True
    """Whether the training goes on while a checkpoint is written (with a mesh; one process always waits)."""

    patience: int | None = None
    """Evaluations without a better `watch` before the training stops early (>= 1); none: it never does."""

    watch: str = "loss"
    """The metric that decides: on the sites' own test data where there is such, else on the task's."""

    goal: str = "min"
    """Whether a better `watch` is a smaller one (min) or a larger one (max)."""

    min_delta: float = 0.0
    """How much better it must be to count (>= 0)."""

    noise_every: int | None = None
    """Steps between two measurements of the gradient noise scale (>= 1), which says how large a batch would still pay;
    none: it is not measured."""

    def __post_init__(self) -> None:
        if faults := type_faults(self, "train") or _range_faults(self):
            raise ValueError("; ".join(faults))

    def with_overrides(self, overrides: Mapping[str, Any]) -> "TrainConfig":
        """A copy with other values, as from `--set train.epochs=24`; errors as `overrides.overridden`."""
        return overridden(self, "train", overrides)


def _range_faults(config: TrainConfig) -> list[str]:
    """What is out of range, given that the types are right."""
    faults = []

    def insist(is_met: bool, name: str, rule: str) -> None:
        if not is_met:
            faults.append(f"train.{name}: {rule}, got {getattr(config, name)!r}")

    for name in ("log_every", "keep"):
        insist(getattr(config, name) >= 1, name, "must be at least 1")
    for name in AT_LEAST_1_OR_NONE:
        value = getattr(config, name)
        insist(value is None or value >= 1, name, "must be at least 1, or none")
    for name in ("warmup_steps", "end_lr", "prefetch", "workers", "seed", "min_delta"):
        insist(0 <= getattr(config, name) < math.inf, name, "must be finite and not negative")
    for name, allowed in CHOICES.items():
        insist(getattr(config, name) in allowed, name, f"must be one of {', '.join(c or 'none' for c in allowed)}")
    return faults
