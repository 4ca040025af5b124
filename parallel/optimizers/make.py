"""From a config to an optimizer: which methods there are, what each may be told, and which parameters decay."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.parallel.optimizers.lamb import LAMB
from atoll.parallel.optimizers.larc import LARC
from atoll.parallel.optimizers.lars import LARS
from atoll.parallel.optimizers.novograd import NovoGrad

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "lars": {"momentum": 0.9, "weight_decay": 5e-4, "trust": 0.001, "lr_in_momentum": True},
    "larc": {"momentum": 0.9, "weight_decay": 0.0, "trust": 0.02},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True, "bounds": None},
    "novograd": {"betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.001, "averaging": False},
}
"""Of each method, its options and what they are unless they are given."""

LAYERWISE: dict[str, Any] = {"lars": LARS, "larc": LARC, "lamb": LAMB, "novograd": NovoGrad}
ELEMENTWISE: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """A method and its options; None leaves an option to the method, as `OPTIONS` has it."""

    name: str = "sgd"
    """sgd, adam, adamw, lars, larc, lamb or novograd."""

    lr: float = 0.1
    """Learning rate (> 0), until a schedule sets another."""

    momentum: float | None = None
    """Of sgd, lars and larc, in [0, 1)."""

    nesterov: bool | None = None
    """Of sgd, with a momentum: look ahead."""

    betas: tuple[float, float] | None = None
    """Of adam, adamw, lamb and novograd: how much of the first and the second moment stays in a step, in [0, 1)."""

    eps: float | None = None
    """Of adam, adamw, lamb and novograd: what is added to the square root of the second moment (> 0)."""

    weight_decay: float | None = None
    """L2 penalty of sgd, adam, lars and larc, decoupled decay of adamw, part of the step in lamb and novograd; >= 0."""

    trust: float | None = None
    """Of lars and larc: a layer's rate is this much of its weights' norm over its gradient's (> 0)."""

    lr_in_momentum: bool | None = None
    """Of lars: whether the momentum remembers steps, as in the paper, or gradients, as torch's sgd does."""

    bias_correction: bool | None = None
    """Of lamb: whether the moments are divided by what is missing in them at first."""

    bounds: tuple[float, float] | None = None
    """Of lamb: the smallest and the largest norm that a layer's weights count with; None: any."""

    averaging: bool | None = None
    """Of novograd: whether its momentum is a mean instead of a sum."""

    skip_1d: bool = True
    """Whether biases and norms (at most one dimension) go without decay, and in lars, larc and lamb without trust."""

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise ValueError(f"optimizer.name: must be one of {', '.join(OPTIONS)}, got {self.name!r}")
        faults = [
            *(self._fault(key, allowed) for key, is_met, allowed in _rules() if not is_met(getattr(self, key))),
            *(
                self._fault(key, "belongs to " + ", ".join(_owners(key)))
                for key in self._given() - OPTIONS[self.name].keys()
            ),
        ]
        if not faults and self.nesterov and not self.momentum:
            faults.append(self._fault("nesterov", "needs a momentum"))
        if faults:
            raise ValueError("; ".join(sorted(faults)))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method, with those that were given."""
        return OPTIONS[self.name] | {key: getattr(self, key) for key in self._given()}

    def _given(self) -> set[str]:
        every = {key for options in OPTIONS.values() for key in options}
        return {key for key in every if getattr(self, key) is not None}

    def _fault(self, key: str, allowed: str) -> str:
        return f"optimizer.{key}: {allowed}, got {getattr(self, key)!r} for {self.name}"


def _rules() -> list[tuple[str, Any, str]]:
    """Of each field: when it is well, and what is allowed."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

    def pair(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and all(map(number, value))

    def flag(value: Any) -> bool:
        return value is None or isinstance(value, bool)

    return [
        ("lr", lambda v: number(v) and v > 0, "must be positive and finite"),
        ("momentum", lambda v: v is None or (number(v) and 0 <= v < 1), "must be in [0, 1)"),
        ("betas", lambda v: v is None or (pair(v) and min(v) >= 0 and max(v) < 1), "must be two numbers in [0, 1)"),
        ("eps", lambda v: v is None or (number(v) and v > 0), "must be positive and finite"),
        ("weight_decay", lambda v: v is None or (number(v) and v >= 0), "must be finite and not negative"),
        ("trust", lambda v: v is None or (number(v) and v > 0), "must be positive and finite"),
        ("bounds", lambda v: v is None or (pair(v) and 0 <= v[0] < v[1]), "must be two numbers 0 <= low < high"),
        *(
            (key, flag, "must be true or false")
            for key in ("nesterov", "lr_in_momentum", "bias_correction", "averaging")
        ),
        ("skip_1d", lambda v: isinstance(v, bool), "must be true or false"),
    ]


def _owners(key: str) -> list[str]:
    return [name for name, options in OPTIONS.items() if key in options]


def make_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """The optimizer of one model, or of one part of it; frozen parameters are left out.

    Torch's own methods are fused on CUDA and go over all tensors at once elsewhere, as long as the parameters are alike
    (all plain, or all on one mesh); a mixture is stepped one by one.

    Args:
        config: the method.
        named_parameters: after the model was sharded.

    Raises:
        ValueError: there is nothing to train.
    """
    named = list(named_parameters)
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"nothing to train: {len(named)} parameters, all frozen ({', '.join(n for n, _ in named[:5])})"
        )
    if config.name in LAYERWISE:
        made: torch.optim.Optimizer = LAYERWISE[config.name](
            parameters, config.lr, skip_1d=config.skip_1d, **config.options
        )
        return made
    are_alike = (
        len({parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in parameters}) == 1
    )
    on_cuda = all(parameter.is_cuda for parameter in parameters)
    how = {"fused": are_alike and on_cuda, "foreach": are_alike and not on_cuda}
    made = ELEMENTWISE[config.name](_groups(config, parameters), config.lr, **config.options, **how)
    return made


def _groups(config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """What decays, and what does not."""
    free: list[Tensor] = [p for p in parameters if config.skip_1d and p.ndim <= 1]
    decayed: list[Tensor] = [p for p in parameters if not (config.skip_1d and p.ndim <= 1)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
