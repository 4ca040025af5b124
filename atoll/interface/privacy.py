"""`atoll.privacy_plan`, and the plan that it returns."""

import re
from typing import Any, Literal

from atoll.interface.errors import AtollError, one_error
from atoll.operations.requests import PrivacyPlanRequest


class PrivacyPlan:
    """The plan of a private run: its guarantee, the noise, and what the noise does to a mean.

    Args:
        document: the plan in plain values, as `atoll privacy plan --json`.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    @property
    def sentence(self) -> str:
        """The whole guarantee in words."""
        return str(self.document["sentence"])

    @property
    def epsilon(self) -> float:
        """Epsilon after all uses or steps."""
        return float(self.document["epsilon"])

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise of a sum, in sensitivities; given, or found for an epsilon."""
        return float(self.document["noise_multiplier"])

    @property
    def fits(self) -> int | None:
        """The most uses or steps within the budget; None: no epsilon is given, or the noise is correlated."""
        fits: int | None = self.document["fits"]
        return fits

    @property
    def noise_of_mean(self) -> dict[str, Any] | None:
        """The noise of the mean of `one_round` and of `all_rounds`, in lengths of a clipped update; None: not asked."""
        noise: dict[str, Any] | None = self.document["noise_of_mean"]
        return noise

    def __repr__(self) -> str:
        return self.sentence


@one_error()
def privacy_plan(
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    unit: Literal["client", "example"] = "client",
    **numbers: Any,
) -> PrivacyPlan:
    """Compute the noise for an epsilon, the epsilon of a noise, or the uses within a budget, as `atoll privacy plan`.

    Args:
        delta: the probability with which epsilon may fail; far below 1 / number of clients.
        epsilon: the budget; or None.
        noise_multiplier: the noise of a sum, in clip norms; or None: the least that keeps the budget.
        unit: what is protected.
        numbers: the other options of the command, such as `uses`, `rounds`, `cohort_size` and `values`; with the unit
            "example" `sample_rate` and `steps`.

    Raises:
        AtollError: the arguments have faults, with all of them.
    """
    from atoll.operations import privacy_plan as operation
    from atoll.operations.faults import CommandError

    given = {"delta": delta, "epsilon": epsilon, "noise_multiplier": noise_multiplier, "unit": unit, **numbers}
    allowed = PrivacyPlanRequest.__dataclass_fields__
    if unknown := sorted(given.keys() - allowed.keys()):
        raise AtollError(f"privacy_plan: got {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    try:
        return PrivacyPlan(operation.plan(PrivacyPlanRequest(**given)).document)
    except CommandError as error:
        raise AtollError(*map(_in_python, error.faults)) from None


def _in_python(fault: str) -> str:
    """Return a fault with the names of arguments in place of options."""
    return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), fault)
