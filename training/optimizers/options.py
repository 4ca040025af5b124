"""The optimizers of a training by name, their options, and the options' ranges."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.ground.faults import Refused

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "lars": {"momentum": 0.9, "weight_decay": 5e-4, "trust": 0.001, "lr_in_momentum": True},
    "larc": {"momentum": 0.9, "weight_decay": 0.0, "trust": 0.02},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True, "bounds": None},
    "novograd": {"betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.001, "averaging": False},
}
"""The options of each method, with their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """A method and its options; None leaves an option at the method's default in `OPTIONS`.

    Raises:
        ValueError: options out of their ranges, or of another method; the message lists all faults.
    """

    name: str = "sgd"
    """The method: sgd, adam, adamw, lars, larc, lamb or novograd."""

    lr: float = 0.1
    """The learning rate (> 0), until a schedule sets another."""

    momentum: float | None = None
    """The momentum of sgd, lars and larc, in [0, 1)."""

    nesterov: bool | None = None
    """Use Nesterov's momentum; sgd with a momentum."""

    betas: tuple[float, float] | None = None
    """The decays of the first and the second moment of adam, adamw, lamb and novograd, in [0, 1)."""

    eps: float | None = None
    """The summand of the square root of the second moment in adam, adamw, lamb and novograd (> 0)."""

    weight_decay: float | None = None
    """The L2 penalty of sgd, adam, lars and larc, decoupled decay of adamw, part of the step in lamb and novograd; >=
    0."""

    trust: float | None = None
    """The trust coefficient of lars and larc: a layer's rate over the quotient of its weights' and its gradient's norm
    (> 0)."""

    lr_in_momentum: bool | None = None
    """Accumulate steps in the momentum of lars, as the paper does, instead of gradients, as torch's sgd does."""

    bias_correction: bool | None = None
    """Divide the moments of lamb by 1 - β^t."""

    bounds: tuple[float, float] | None = None
    """The smallest and the largest norm with which a layer's weights count in lamb; None: any."""

    averaging: bool | None = None
    """Let the momentum of novograd be a mean instead of a sum."""

    skip_1d: bool = True
    """Exempt biases and norms (at most one dimension) from decay, and in lars, larc and lamb from trust."""

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise ValueError(f"optimizer.name: must be one of {', '.join(OPTIONS)}, got {self.name!r}")
        foreign = self._given() - OPTIONS[self.name].keys()
        faults = [
            *(self._fault(key, rule.allowed) for key, rule in RULES.items() if not rule.is_met(getattr(self, key))),
            *(self._fault(key, "belongs to " + ", ".join(_owners(key))) for key in foreign),
        ]
        if not faults and self.nesterov and not self.momentum:
            faults.append(self._fault("nesterov", "needs a momentum"))
        if faults:
            raise Refused(*sorted(faults))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method, with the given values in place of defaults."""
        return OPTIONS[self.name] | {key: getattr(self, key) for key in self._given()}

    def _given(self) -> set[str]:
        every = {key for options in OPTIONS.values() for key in options}
        return {key for key in every if getattr(self, key) is not None}

    def _fault(self, key: str, allowed: str) -> str:
        return f"optimizer.{key}: {allowed}, got {getattr(self, key)!r} for {self.name}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_decay(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


class Rule(NamedTuple):
    """The check of one field of `OptimizerConfig`."""

    accepts: Callable[[Any], bool]
    allowed: str
    """The allowed values in words."""
    is_optional: bool = True
    """Whether the field may be None."""

    def is_met(self, value: Any) -> bool:
        """Return whether the field may have this value."""
        return (self.is_optional and value is None) or self.accepts(value)


POSITIVE = Rule(_is_positive, "must be positive and finite")
FLAG = Rule(lambda value: isinstance(value, bool), "must be true or false")

RULES: dict[str, Rule] = {
    "lr": POSITIVE._replace(is_optional=False),
    "momentum": Rule(_is_decay, "must be in [0, 1)"),
    "betas": Rule(lambda pair: _are_numbers(pair) and all(map(_is_decay, pair)), "must be two numbers in [0, 1)"),
    "eps": POSITIVE,
    "weight_decay": Rule(lambda decay: _is_number(decay) and decay >= 0, "must be finite and not negative"),
    "trust": POSITIVE,
    "bounds": Rule(lambda pair: _are_numbers(pair) and 0 <= pair[0] < pair[1], "must be two numbers 0 <= low < high"),
    "nesterov": FLAG,
    "lr_in_momentum": FLAG,
    "bias_correction": FLAG,
    "averaging": FLAG,
    "skip_1d": FLAG._replace(is_optional=False),
}
"""The rule of each field, by its name."""


def _owners(key: str) -> list[str]:
    return [name for name, options in OPTIONS.items() if key in options]
