"""Replicas that do not average their gradients in every step: the methods, and the hooks that a train loop calls.

    before_step, the inner optimizer's step, after_step;   flush before an evaluation, a checkpoint and the end

The replicas are the ranks of a group (the axis `dp_replicate`). Each has an inner optimizer of its own, whose state
never travels. Between two synchronizations the replicas' weights differ: `flush` makes them one model again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from atoll.parallel.communication.delayed import DelayedAveraging
from atoll.parallel.communication.diloco import DiLoCo
from atoll.parallel.communication.local_sgd import LocalSgd
from atoll.parallel.communication.means import Parameters

WIRES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtype of the pseudo-gradients by the value of `wire`."""

SETTINGS = {"local_sgd": (), "diloco": ("lr", "momentum", "wire"), "delayed": ("correction",)}
"""The methods, with the settings of each besides its number of steps."""


_READ: dict[str, Callable[[str], Any]] = {
    "lr": float,
    "momentum": float,
    "wire": str,
    "correction": {"true": True, "false": False}.__getitem__,
}


class Outer(Protocol):
    """A method around the inner optimizer's steps; all ranks of the group call the same in the same order."""

    def before_step(self, parameters: Parameters) -> None:
        """Prepare the inner optimizer's step, after the gradients are there."""

    def after_step(self, parameters: Parameters, step: int) -> None:
        """Follow the inner optimizer's step of this number (0-based); may change the parameters."""

    def flush(self, parameters: Parameters) -> None:
        """Make the replicas one model, with the same bits on each: apply all pending means."""

    def state(self, parameters: Parameters) -> dict[str, torch.Tensor]:
        """Return the tensors to save beside the parameters, sharded like them.

        Raises:
            RuntimeError: it is not called right after `flush`.
        """

    def load_state(self, state: Mapping[str, torch.Tensor], parameters: Parameters) -> None:
        """Continue from a checkpoint: its state, and its parameters as they have been loaded."""


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
    """The dtype in which DiLoCo's pseudo-gradients travel: fp32, fp16 or bf16."""

    correction: bool = True
    """Let each replica of delayed averaging continue with its own update and correct it later; false is the ablation,
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
            raise ValueError("; ".join(faults))


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
            faults.append(f"outer.{name}: {given!r} is no {name}")
    if faults:
        raise ValueError("; ".join(faults))
    return OuterConfig(method=method, steps=int(steps), **values)


def make_outer(config: OuterConfig, group: dist.ProcessGroup) -> Outer:
    """Return the method for the replicas of a group, whose parameters must be equal when the first step begins."""
    match config.method:
        case "local_sgd":
            return LocalSgd(group, every=config.steps)
        case "diloco":
            return DiLoCo(group, every=config.steps, lr=config.lr, momentum=config.momentum, wire=WIRES[config.wire])
        case _:
            return DelayedAveraging(group, delay=config.steps, correction=config.correction)
