"""The methods by which replicas synchronize now and then, with their settings and ranges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.ground.faults import Refused

WIRES = ("fp32", "fp16", "bf16")
"""The dtypes in which pseudo-gradients are sent."""

SETTINGS = {"local_sgd": (), "diloco": ("lr", "momentum", "wire"), "delayed": ("correction",)}
"""The methods, with the settings of each besides its number of steps."""


_READ: dict[str, Callable[[str], Any]] = {
    "lr": float,
    "momentum": float,
    "wire": str,
    "correction": {"true": True, "false": False}.__getitem__,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig:
    """The method by which replicas synchronize.

    Raises:
        ValueError: a field is out of its range; all faults at once.
    """

    method: str
    """The method: local_sgd, diloco or delayed."""

    steps: int
    """H, the inner steps between two synchronizations (>= 1); for `delayed` D, the steps that a mean is late (>= 0)."""

    lr: float = 0.7
    """DiLoCo's outer learning rate (> 0)."""

    momentum: float = 0.9
    """DiLoCo's outer Nesterov momentum, in [0, 1)."""

    wire: str = "fp32"
    """The dtype in which DiLoCo's pseudo-gradients are sent: fp32, fp16 or bf16."""

    correction: bool = True
    """Let each replica of delayed averaging continue with its update and correct it later; false is the ablation,
    which applies late means alone."""

    def __post_init__(self) -> None:
        least = 0 if self.method == "delayed" else 1
        rules = [
            (self.method in SETTINGS, "method", f"must be one of {', '.join(SETTINGS)}"),
            (self.steps >= least, "steps", f"must be at least {least}"),
            (0 < self.lr < float("inf"), "lr", "must be positive and finite"),
            (0 <= self.momentum < 1, "momentum", "must be in [0, 1)"),
            (self.wire in WIRES, "wire", f"must be one of {', '.join(WIRES)}"),
        ]
        if faults := [
            f"outer.{name}: {rule}, got {getattr(self, name)!r}" for is_met, name, rule in rules if not is_met
        ]:
            raise Refused(*faults)


def parse_outer(text: str) -> OuterConfig | None:
    """Parse the method of a setting; `none` is None.

    `local_sgd:8`, `diloco:500`, `diloco:100,lr=0.5,momentum=0.8,wire=bf16`, `delayed:4`, `delayed:4,correction=false`.

    Raises:
        ValueError: settings that are unknown, missing, of a wrong type or out of range.
    """
    if text == "none":
        return None
    head, *settings = text.split(",")
    method, _, steps = head.partition(":")
    if method not in SETTINGS:
        raise ValueError(f"outer: must be none, {', '.join(f'{name}:STEPS' for name in SETTINGS)}, got {text!r}")
    if not steps.isdecimal():
        raise ValueError(f"outer: {method} needs its number of steps, as in {method}:8, got {text!r}")
    values, faults = dict[str, Any](), list[str]()
    for setting in settings:
        name, _, given = setting.partition("=")
        if name not in SETTINGS[method]:
            allowed = ", ".join(SETTINGS[method]) or "none"
            faults.append(f"outer: {method} has no setting {name!r} (its settings: {allowed})")
            continue
        try:
            values[name] = _READ[name](given)
        except (ValueError, KeyError):
            faults.append(f"outer.{name}: {given!r} is not a {name}")
    if faults:
        raise Refused(*faults)
    return OuterConfig(method=method, steps=int(steps), **values)
