"""How a client trains in one round: the values that the task's author chose, and overrides from a run's settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.parallel.task.overrides import overridden, type_faults

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """The local training of one round."""

    epochs: int = 1
    """Passes over the site's data (E >= 1)."""

    batch_size: int | None = 32
    """Examples in one step (B >= 1); None for the whole data set at once, as FedSGD has it."""

    optimizer: str = "sgd"
    """sgd, adam or adamw; its state starts anew in every round."""

    lr: float = 0.1
    """Local learning rate (η_l > 0)."""

    momentum: float = 0.0
    """Momentum of sgd, in [0, 1)."""

    weight_decay: float = 0.0
    """L2 penalty of sgd and adam, decoupled decay of adamw (>= 0)."""

    max_steps: int | None = None
    """At most this many steps in one round (>= 1), also when the epochs have more."""

    shuffle: bool = True
    """Whether each epoch has a new order, drawn from the seed of (run, round, client)."""

    clip_norm: float | None = None
    """Largest L2 norm of a step's gradient (> 0); None for no clipping."""

    prox_mu: float = 0.0
    """Weight of FedProx's proximal term μ/2 |w - w_global|² (>= 0; Li et al. 2020, Algorithm 2)."""

    keep: str | None = None
    """Layers that stay at the site and are its own: "batchnorm" (FedBN; Li et al. 2021), names of tensors such as
    "head.*", or several with commas; None: all travel."""

    def __post_init__(self) -> None:
        if faults := type_faults(self, "local") or _range_faults(self):
            raise ValueError("; ".join(faults))

    def with_overrides(self, overrides: Mapping[str, Any]) -> "Local":
        """A copy with other values, as from `--set local.lr=0.05`; arguments and errors as `overrides.overridden`."""
        return overridden(self, "local", overrides)


def _range_faults(local: Local) -> list[str]:
    """What is out of range, given that the types are right."""
    sgd_only = local.momentum == 0 or local.optimizer == "sgd"
    rules = [
        (local.epochs >= 1, "epochs", "must be at least 1"),
        (local.batch_size is None or local.batch_size >= 1, "batch_size", "must be at least 1, or none"),
        (local.optimizer in OPTIMIZERS, "optimizer", f"must be one of {', '.join(OPTIMIZERS)}"),
        (0 < local.lr < math.inf, "lr", "must be positive and finite"),
        (0 <= local.momentum < 1, "momentum", "must be in [0, 1)"),
        (sgd_only, "momentum", f"belongs to sgd, not to {local.optimizer}"),
        (0 <= local.weight_decay < math.inf, "weight_decay", "must be finite and not negative"),
        (local.max_steps is None or local.max_steps >= 1, "max_steps", "must be at least 1, or none"),
        (
            local.clip_norm is None or 0 < local.clip_norm < math.inf,
            "clip_norm",
            "must be positive and finite, or none",
        ),
        (0 <= local.prox_mu < math.inf, "prox_mu", "must be finite and not negative"),
        (local.keep is None or all(map(str.strip, local.keep.split(","))), "keep", "must be words, or none"),
    ]
    return [f"local.{name}: {rule}, got {getattr(local, name)!r}" for is_met, name, rule in rules if not is_met]
