"""The settings of a centralized training, beside the task and the plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from atoll.ground.faults import Refused
from atoll.parallel.data.division import Last, Sampling
from atoll.task.overrides import overridden, type_faults
from atoll.training.optimizers.options import OPTIONS
from atoll.training.optimizers.schedule import KINDS, RULES

CHOICES: dict[str, tuple[str | None, ...]] = {
    "optimizer": (None, *OPTIONS),
    "schedule": KINDS,
    "lr_rule": RULES,
    "sampling": get_args(Sampling),
    "last": get_args(Last),
    "goal": ("min", "max"),
}
"""The allowed values of each field with a fixed set of them."""

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
"""The fields whose value is a number of at least 1, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The length, batches, evaluations, checkpoints and early stopping of a training."""

    epochs: int | None = None
    """Passes over the pooled data (>= 1); none: `local.epochs`, the epochs of every site in one round."""

    steps: int | None = None
    """Optimizer steps (>= 1), whatever the number of epochs; none: `local.max_steps`, or the epochs' steps."""

    batch_size: int | None = None
    """Examples of one step on all ranks together (>= 1); none: `local.batch_size` for each data-parallel rank."""

    optimizer: str | None = None
    """The optimizer: sgd, adam, adamw, lars, larc, lamb or novograd; none: `local.optimizer`. If it differs from that
    of `local`, momentum and weight decay are its defaults."""

    start: str | None = None
    """The safetensors file from which the model starts, such as one that `atoll model export` writes, or
    "run:NAME[@VERSION]", a version of a deployed run, which is exported first; a tied tensor may have any of its names.
    A training that continues from its checkpoint does not read it; none: the task's model."""

    strict: bool = True
    """Refuse a `start` that lacks a tensor of the model, or has others; false: what does not fit keeps the task's
    values, and is listed."""

    schedule: str = "constant"
    """The learning rate after the warm-up: constant, linear, cosine, polynomial or wsd."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises to its peak (>= 0)."""

    end_lr: float = 0.0
    """The learning rate at the end (>= 0), unless it is constant."""

    lr_rule: str = "none"
    """The rule by which `local.lr` grows with the batch: linear, sqrt or none."""

    base_batch: int | None = None
    """The batch for which `local.lr` was chosen (>= 1); none: `local.batch_size`."""

    sampling: str = "global"
    """The assignment of examples. global: any rank may get any example; partition: each data-parallel rank has a fixed
    part."""

    last: str = "uneven"
    """The examples that fill no batch at the end of an epoch: uneven (a smaller batch), drop or wrap."""

    prefetch: int = 2
    """Batches that are fetched ahead (>= 0)."""

    workers: int = 0
    """Processes that fetch, for data sets whose examples take Python long to read; 0: a thread does (>= 0)."""

    threads: int | None = None
    """Threads of each process for the arithmetic on a CPU (>= 1); none: one for a model of fewer than a million
    parameters, whose products are too small to share, and for others the number of torch or of OMP_NUM_THREADS."""

    seed: int = 0
    """The seed of the initial weights, of the order of the examples, and of the model's randomness (>= 0)."""

    log_every: int = 10
    """Steps between two lines of the log (>= 1)."""

    eval_every: int | None = None
    """Steps between two evaluations (>= 1); none: once in each epoch. The last step is always evaluated."""

    eval_batch_size: int | None = None
    """Examples of one batch of an evaluation, on all ranks together (>= 1); none: as in training."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints (>= 1); none: once in each epoch. The last step always has one."""

    keep: int = 3
    """Checkpoints that are kept (>= 1)."""

    asynchronous: bool = True
    """Continue the training while a checkpoint is written (with a mesh; one process always waits)."""

    patience: int | None = None
    """Evaluations without a better `watch` after which the training stops early (>= 1); none: it never does."""

    watch: str = "loss"
    """The metric for early stopping: on the sites' test data if they have any, else on the task's."""

    goal: str = "min"
    """The direction of a better `watch`: smaller (min) or larger (max)."""

    min_delta: float = 0.0
    """The smallest difference that counts as better (>= 0)."""

    noise_every: int | None = None
    """Steps between two measurements of the gradient noise scale (>= 1), the batch size up to which larger batches pay;
    none: it is not measured."""

    def __post_init__(self) -> None:
        if faults := type_faults(self, "train") or _range_faults(self):
            raise Refused(*faults)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "TrainConfig":
        """Return a copy with other values, as from `--set train.epochs=24`; errors as in `overrides.overridden`."""
        return overridden(self, "train", overrides)


def _range_faults(config: TrainConfig) -> list[str]:
    """List the values out of their ranges, given that the types are right."""
    faults = []

    def check(is_met: bool, name: str, rule: str) -> None:
        if not is_met:
            faults.append(f"train.{name}: {rule}, got {getattr(config, name)!r}")

    for name in ("log_every", "keep"):
        check(getattr(config, name) >= 1, name, "must be at least 1")
    for name in AT_LEAST_1_OR_NONE:
        value = getattr(config, name)
        check(value is None or value >= 1, name, "must be at least 1, or none")
    for name in ("warmup_steps", "end_lr", "prefetch", "workers", "seed", "min_delta"):
        check(0 <= getattr(config, name) < math.inf, name, "must be finite and not negative")
    for name, allowed in CHOICES.items():
        check(getattr(config, name) in allowed, name, f"must be one of {', '.join(c or 'none' for c in allowed)}")
    return faults
