"""The terms of a private training, and the plans and settings that it refuses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from atoll.parallel.engine.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Mechanism and budget of a private training."""

    sample_rate: float
    """Probability of an example in a step."""
    noise_multiplier: float
    """Standard deviation of the noise of a sum, in clip norms."""
    clip_norm: float
    """Largest norm of an example's gradient."""
    delta: float
    steps: int
    """Steps of the whole training, as they were planned; the budget allows them."""
    allowed: Callable[[int], int]
    """Steps that are wanted in all, each counted as often as it is done -> the most of them within the budget."""
    guarantee: Callable[[int], dict[str, Any]]
    """Steps -> the guarantee in plain values, with its `sentence`."""

    @property
    def std(self) -> float:
        """Standard deviation of the noise of a step's sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def described(self) -> dict[str, Any]:
        """What a continued training must have again, by the names under which an operator sets it."""
        return {
            "privacy.unit": "example",
            "privacy.sample_rate": self.sample_rate,
            "privacy.clip_norm": self.clip_norm,
            "privacy.noise_multiplier": self.noise_multiplier,
            "privacy.delta": self.delta,
        }


def plan_faults(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each part of a plan without private steps."""
    on = 'with privacy.unit = "example"'
    if plan.mesh.pp > 1:
        yield f"--mesh: got {plan.mesh}: a pipeline knows no norm of a whole gradient before its last stage, {on} pp=1"
    if plan.recompute == "selective":
        why = "the repetition of a block for the gradients of its outputs alone may not find what was saved"
        yield f"plan.recompute: got 'selective': allowed {on} are 'none', 'full': {why}"
    for name, needed, why in _NEEDED:
        if (found := getattr(plan, name)) != needed:
            yield f"plan.{name}: got {found!r}: allowed {on} is {needed!r}: {why}"


_NEEDED: tuple[tuple[str, object, str], ...] = (
    ("compile", False, "what each layer takes and gives back is not seen in compiled blocks"),
    ("offload", False, "sums and noise are where the parameters are"),
    ("loss_parallel", False, "the loss is called on each row"),
    ("compression", "none", "sums are rounded once, with their noise"),
    ("reduce_dtype", "fp32", "sums are rounded once, with their noise"),
    ("outer", "none", "each step is one of all copies, with one noise"),
    ("batchnorm", "local", "batch norms in training mode have no gradient of one row"),
)


def needs_captured(plan: Plan) -> bool:
    """Return whether gradients of rows must come from what each layer takes and gives back (`mesh_gradients`)."""
    return plan.mesh.size > 1 or plan.is_sharded or plan.precision != "fp32" or plan.recompute != "none"
