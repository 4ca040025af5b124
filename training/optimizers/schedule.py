"""The learning rate as a pure function of the step, and its scaling with the batch.

Legend: t the step from 0, W the warm-up steps, T all steps, D the steps of the last decay, a the rate at which the
warm-up starts, η the peak, z the end rate, p in [0, 1] the progress of the decay.

    warm-up, t < W:     a + (η - a) (t + 1) / W                      linear per step; the W-th step has η
    then, with p = (t - W) / (T - W):
    constant            η
    linear              η + (z - η) p
    cosine              z + (η - z) (1 + cos π p) / 2
    polynomial          z + (η - z) (1 - p)^power
    wsd                 η, and over the last D steps linear to z: p = (t - T + D) / D

Steps from T on have the rate of p = 1.

Sources: warm-up: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2. Polynomial: You et al. 2017 (LARS).
Cosine: Loshchilov, Hutter, "SGDR", 2017. Warm-up, stable, decay: Hu et al., "MiniCPM", 2024.
"""

import math
from dataclasses import dataclass

from atoll.ground.faults import Refused

KINDS = ("constant", "linear", "cosine", "polynomial", "wsd")
RULES = ("linear", "sqrt", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning rate for each step: `schedule(step)`."""

    lr: float
    """The peak η (> 0)."""

    steps: int
    """T, the number of steps (>= 1), including the warm-up."""

    kind: str = "constant"
    """The course after the warm-up: constant, linear, cosine, polynomial or wsd."""

    warmup_steps: int = 0
    """W, the number of warm-up steps, in 0..T."""

    warmup_from: float = 0.0
    """The rate a from which the warm-up rises (>= 0); no step has this rate itself."""

    end_lr: float = 0.0
    """The rate z at which a decay ends (>= 0)."""

    power: float = 2.0
    """The exponent of polynomial (> 0)."""

    decay_steps: int | None = None
    """D, the decay of wsd, in 1..T - W; None: a tenth of all steps."""

    def __post_init__(self) -> None:
        rules = [
            (0 < self.lr < math.inf, "lr", "must be positive and finite"),
            (self.steps >= 1, "steps", "must be at least 1"),
            (self.kind in KINDS, "kind", f"must be one of {', '.join(KINDS)}"),
            (0 <= self.warmup_steps <= self.steps, "warmup_steps", f"must be in 0..{self.steps}, the steps"),
            (0 <= self.warmup_from < math.inf, "warmup_from", "must be finite and not negative"),
            (0 <= self.end_lr < math.inf, "end_lr", "must be finite and not negative"),
            (0 < self.power < math.inf, "power", "must be positive and finite"),
            (
                self.decay_steps is None or 1 <= self.decay_steps <= self.steps - self.warmup_steps,
                "decay_steps",
                f"must be in 1..{self.steps - self.warmup_steps}, the steps after the warm-up",
            ),
            (self.decay_steps is None or self.kind == "wsd", "decay_steps", f"belongs to wsd, not to {self.kind}"),
        ]
        faults = [f"schedule.{name}: {rule}, got {getattr(self, name)!r}" for is_met, name, rule in rules if not is_met]
        if faults:
            raise Refused(*faults)

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        if step < self.warmup_steps:
            return self.warmup_from + (self.lr - self.warmup_from) * (step + 1) / self.warmup_steps
        return self.end_lr + (self.lr - self.end_lr) * self._left(step)

    def _left(self, step: int) -> float:
        """Return the remaining fraction of the way from the end rate to the peak: 1 at the peak."""
        if self.kind == "constant":
            return 1.0
        decay = self.steps - self.warmup_steps
        if self.kind == "wsd":
            decay = self.decay_steps or min(decay, max(1, self.steps // 10))
        done = 1.0 if step >= self.steps else max(0.0, 1 - (self.steps - step) / decay)
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return float((1 - done) ** (self.power if self.kind == "polynomial" else 1.0))


def scaled_lr(base_lr: float, batch: int, base_batch: int, rule: str = "linear") -> float:
    """Return the learning rate for a batch of another size.

        linear: η B / B₀        the sum of the examples' steps stays the same; for sgd, up to the critical batch size
        sqrt:   η sqrt(B / B₀)  the variance of a step stays the same; used with adam and lamb
        none:   η

    Args:
        base_lr: η, well chosen for `base_batch`.
        batch: B, examples of one step on all ranks.
        base_batch: B₀.
        rule: linear, sqrt or none.

    Raises:
        ValueError: an argument is out of its range.

    Sources:
        Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1 (linear); Hoffer et al., "Train longer,
        generalize better", 2017, section 4 (square root). Shallue et al. 2018 find that neither holds in general.
    """
    if not (0 < base_lr < math.inf and batch >= 1 and base_batch >= 1):
        raise ValueError(f"rate and batches must be positive, got {base_lr!r} for {base_batch!r}, and {batch!r}")
    if rule not in RULES:
        raise ValueError(f"the rule must be one of {', '.join(RULES)}, got {rule!r}")
    exponent = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[rule]
    return float(base_lr * (batch / base_batch) ** exponent)
