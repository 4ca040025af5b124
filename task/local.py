"""The settings of the local training in one round: the task author's values, and a run's overrides of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.ground.faults import Refused
from atoll.plugins.kind import Kind
from atoll.task.errors import TaskBroken
from atoll.task.overrides import overridden, type_faults

OPTIMIZERS = ("sgd", "adam", "adamw")


def _broken(fault: str) -> TaskBroken:
    return TaskBroken(fault.replace("; ", ", "))  # one fault


LOCAL_OPTIMIZER = Kind(
    name="local optimizer",
    group="atoll.local_optimizers",
    setting="local.optimizer",
    allowed="a class or function of (parameters, lr)",
    failed=_broken,
    built_in=OPTIMIZERS,
)
"""The local optimizers of installed packages. A run may name one; it sends no reference to code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """The settings of the local training in one round.

    Raises:
        ValueError: wrong types, or values out of their ranges; the message lists all faults.
    """

    epochs: int = 1
    """Passes over the site's data (E >= 1)."""

    batch_size: int | None = 32
    """Examples per step (B >= 1); None: the whole data set in one step, as in FedSGD."""

    optimizer: str | Callable[..., Any] = "sgd"
    """The optimizer: sgd, adam or adamw. Its state is reset in every round, unless `keep_optimizer`. Or a custom one:
    by the name that an installed package declares (see `atoll plugins`), or in the task a class or function of
    (parameters, lr) that makes a `torch.optim.Optimizer`."""

    lr: float = 0.1
    """The local learning rate (η_l > 0)."""

    momentum: float = 0.0
    """The momentum of sgd, in [0, 1); a custom optimizer gets it if it is not 0."""

    weight_decay: float = 0.0
    """The L2 penalty of sgd and adam, the decoupled decay of adamw (>= 0); a custom optimizer gets it if it is not
    0."""

    decay_vectors: bool = True
    """Let tensors of at most one dimension (biases, the scales of norms) decay, too, as torch's optimizers do; false
    exempts them. For sgd, adam and adamw; a custom optimizer groups its parameters itself."""

    max_steps: int | None = None
    """The largest number of steps in one round (>= 1), even if the epochs have more; None: no limit."""

    shuffle: bool = True
    """Draw a new order of the examples in each epoch, from the seed of (run, round, client)."""

    clip_norm: float | None = None
    """The largest L2 norm of a step's gradient (> 0); None: no clipping."""

    prox_mu: float = 0.0
    """The weight of FedProx's proximal term μ/2 |w - w_global|² (>= 0; Li et al. 2020, Algorithm 2)."""

    keep: str | None = None
    """Layers that stay at the site and are never sent: "batchnorm" (FedBN; Li et al. 2021), names of tensors such as
    "head.*", or several of them separated by commas; None: all layers are exchanged."""

    keep_optimizer: bool = False
    """Keep the optimizer's state at the site from the last accepted training to the next round: DiLoCo across clients,
    with server optimizer "diloco" (Douillard et al. 2023). For adam, adamw, and sgd with a momentum."""

    def __post_init__(self) -> None:
        if faults := type_faults(self, "local") or _range_faults(self):
            raise Refused(*faults)

    @property
    def has_custom_optimizer(self) -> bool:
        """Whether the optimizer is custom: the task's or a package's."""
        return callable(self.optimizer) or self.optimizer not in OPTIMIZERS

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name for messages."""
        optimizer = self.optimizer
        if not callable(optimizer):
            return optimizer
        return str(getattr(optimizer, "__qualname__", None) or type(optimizer).__name__)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "Local":
        """Return a copy with other values, as from `--set local.lr=0.05`; arguments, errors: `overrides.overridden`."""
        return overridden(self, "local", overrides)


def _range_faults(local: Local) -> list[str]:
    """List the values out of range, given that the types are right."""
    sgd_only = local.momentum == 0 or local.optimizer == "sgd" or local.has_custom_optimizer
    has_state = local.optimizer in ("adam", "adamw") or (local.optimizer == "sgd" and local.momentum > 0)
    optimizer = local.optimizer
    is_known = not local.has_custom_optimizer or callable(optimizer) or not LOCAL_OPTIMIZER.fault_of_name(optimizer)
    known = f"must be one of {', '.join(OPTIMIZERS)}, or a name that one installed package declares (`atoll plugins`)"
    rules = [
        (local.epochs >= 1, "epochs", "must be at least 1"),
        (local.batch_size is None or local.batch_size >= 1, "batch_size", "must be at least 1, or none"),
        (is_known, "optimizer", f"{known}, or in the task a class or function"),
        (0 < local.lr < math.inf, "lr", "must be positive and finite"),
        (0 <= local.momentum < 1, "momentum", "must be in [0, 1)"),
        (sgd_only, "momentum", f"belongs to sgd, not to {local.optimizer}"),
        (0 <= local.weight_decay < math.inf, "weight_decay", "must be finite and not negative"),
        (
            local.decay_vectors or not local.has_custom_optimizer,
            "decay_vectors",
            f"belongs to {', '.join(OPTIMIZERS)}, not to {local.optimizer_name}",
        ),
        (local.max_steps is None or local.max_steps >= 1, "max_steps", "must be at least 1, or none"),
        (
            local.clip_norm is None or 0 < local.clip_norm < math.inf,
            "clip_norm",
            "must be positive and finite, or none",
        ),
        (0 <= local.prox_mu < math.inf, "prox_mu", "must be finite and not negative"),
        (
            local.keep is None or all(map(str.strip, local.keep.split(","))),
            "keep",
            "must be names separated by commas, or none",
        ),
        (
            has_state or not local.keep_optimizer,
            "keep_optimizer",
            f"needs adam, adamw, or sgd with a momentum, not {local.optimizer_name}",
        ),
    ]
    return [f"local.{name}: {rule}, got {getattr(local, name)!r}" for is_met, name, rule in rules if not is_met]


def optimizer_factory(local: Local) -> Any:
    """Return the class or function that makes a custom optimizer, imported if a package has it.

    Raises:
        TaskBroken: it does not load.
    """
    return local.optimizer if callable(local.optimizer) else LOCAL_OPTIMIZER.load(local.optimizer)


def epoch_steps(sample_rate: float) -> int:
    """Return the steps of an epoch of Poisson samples, after which each example was expected once: 1 / q."""
    return max(1, round(1.0 / sample_rate))
