"""The settings of example-level privacy, `[privacy]` with `unit = "example"`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.ground.faults import Refused
from atoll.task.overrides import overridden, type_faults

EXAMPLE, NONE = "example", "none"

NOT_A_TASK = (
    'with privacy.unit = "example" a task needs gradients of single examples, which a custom training (an ArrayTask, a '
    'Flower app) does not give: allowed is a Task with the built-in loop, or privacy.unit = "client"'
)
"""The fault of a task that trains by other code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyConfig:
    """The mechanism of a private training (DP-SGD), and its budget."""

    unit: str = NONE
    """The unit of protection: example (one row of the training data, added or removed), or none."""

    sample_rate: float | None = None
    """Probability with which each example takes part in a step, independently of all others (above 0, at most 1). The
    expected batch is this share of the examples; `batch_size` only bounds the rows that are computed at once."""

    clip_norm: float | None = None
    """Largest norm of one example's gradient (above 0), to which a longer one is shortened."""

    noise_multiplier: float | None = None
    """Standard deviation of the noise of a step's sum, in clip norms (above 0); none: the least that keeps `epsilon`
    over all steps."""

    epsilon: float | None = None
    """The budget (above 0): the training ends before the step that would exceed it; none: there is none, and the
    guarantee follows from `noise_multiplier`."""

    delta: float | None = None
    """The probability with which epsilon may fail: above 0 and below 1 / number of examples."""

    def __post_init__(self) -> None:
        if faults := type_faults(self, "privacy") or _faults(self):
            raise Refused(*faults)

    @property
    def is_on(self) -> bool:
        """Whether the training is private."""
        return self.unit != NONE

    def with_overrides(self, overrides: Mapping[str, Any]) -> "PrivacyConfig":
        """Return a copy with other values, as from `--set privacy.epsilon=8`; errors as in `overrides.overridden`."""
        return overridden(self, "privacy", overrides)


def _faults(config: PrivacyConfig) -> list[str]:
    """List what is missing and out of range, given that the types are right."""
    names = ("sample_rate", "clip_norm", "noise_multiplier", "epsilon", "delta")
    given = {name: value for name in names if (value := getattr(config, name)) is not None}
    if config.unit == "client":
        return ['privacy.unit: got "client", which is for a federation (run.toml): allowed here are example, none']
    if config.unit not in (EXAMPLE, NONE):
        return [f"privacy.unit: got {config.unit!r}: allowed are example, none"]
    if not config.is_on:
        without = 'without privacy.unit = "example" it has no effect: set that, or leave this out'
        return [f"privacy.{name}: got {value!r}: {without}" for name, value in given.items()]
    faults = []
    for name in ("sample_rate", "clip_norm", "delta"):
        if name not in given:
            faults.append(f'privacy.{name}: missing: privacy.unit = "example" needs it')
    if "noise_multiplier" not in given and "epsilon" not in given:
        faults.append("privacy.epsilon, privacy.noise_multiplier: both are missing: one gives the other")
    for name, value in given.items():
        most = 1.0 if name == "sample_rate" else math.nextafter(1.0, 0.0) if name == "delta" else 1e9
        if not 0.0 < value <= most:
            allowed = "below 1" if name == "delta" else f"at most {most:g}"
            faults.append(f"privacy.{name}: got {value!r}: allowed is above 0, {allowed}")
    return faults
