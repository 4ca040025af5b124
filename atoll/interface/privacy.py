"""`atoll.privacy_plan`, and the plan that it returns."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from atoll.interface.errors import AtollError, one_error
from atoll.operations.requests import PrivacyPlanRequest

if TYPE_CHECKING:
    from atoll.task.array_task import ArrayTask
    from atoll.task.task import Task


class PrivacyPlan:
    """The plan of a private run: its guarantee, the noise, its rounds, and what the noise does to a mean.

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

    @property
    def round(self) -> dict[str, Any] | None:
        """The rounds of a cohort: quorum, dropouts, norms that fit, `by_survivors`; None: its size is not given."""
        found: dict[str, Any] | None = self.document["round"]
        return found

    @property
    def preview(self) -> dict[str, Any] | None:
        """The simulated task: `metric`, its values of the `private` and the `plain` run; None: none was asked for.

        It is no guarantee, as its `sentence` says.
        """
        found: dict[str, Any] | None = self.document["preview"]
        return found

    def __repr__(self) -> str:
        return self.sentence


@one_error()
def privacy_plan(
    *,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    unit: Literal["client", "example"] = "client",
    simulate: "Task | ArrayTask | str | None" = None,
    set: Mapping[str, Any] | None = None,
    **numbers: Any,
) -> PrivacyPlan:
    """Compute the noise for an epsilon, the epsilon of a noise, or the uses within a budget, as `atoll privacy plan`.

    Args:
        delta: the probability with which epsilon may fail; far below 1 / number of clients.
        epsilon: the budget; or None.
        noise_multiplier: the noise of a sum, in clip norms; or None: the least that keeps the budget.
        unit: what is protected.
        simulate: a task, its reference, or a run's TOML, to simulate with the plan and without privacy; or None.
        set: settings of that simulation by their keys, such as `{"round.cohort_size": 20}`.
        numbers: the other options of the command, such as `uses`, `rounds`, `cohort_size` and `values`; with the unit
            "example" `sample_rate` and `steps`.

    Raises:
        AtollError: the arguments or the simulation's settings have faults, with all of them; or the task's code fails.
    """
    from atoll.operations.faults import CommandError
    from atoll.operations.privacy import plan as operation

    given = {"delta": delta, "epsilon": epsilon, "noise_multiplier": noise_multiplier, "unit": unit, **numbers}
    allowed = [name for name in PrivacyPlanRequest.__dataclass_fields__ if name != "overrides"]
    if unknown := sorted(given.keys() - {*allowed}):
        raise AtollError(f"privacy_plan: got {', '.join(unknown)}; allowed: {', '.join(allowed)}, set")
    try:
        if simulate is None:
            if set is not None:
                raise AtollError(f"set: got {set!r}; allowed with simulate alone")
            return PrivacyPlan(operation.plan(PrivacyPlanRequest(**given)).document)
        return _with_preview(given, simulate, set)
    except CommandError as error:
        raise AtollError(*map(_in_python, error.faults), code=error.code) from error.__cause__


def _with_preview(
    given: dict[str, Any], simulate: "Task | ArrayTask | str", settings: Mapping[str, Any] | None
) -> PrivacyPlan:
    """Return a plan with its simulation, in this process."""
    from atoll.interface.overrides import overrides_of
    from atoll.interface.simulated import in_this_process
    from atoll.interface.tasks import named, refuse_within_a_load
    from atoll.interface.turns import in_turn, threads_kept
    from atoll.operations.privacy import plan as operation
    from atoll.operations.reporter import Reporter, reporting_to

    refuse_within_a_load()
    overrides, of_call = overrides_of(settings), None if isinstance(simulate, str) else named(simulate)
    if of_call is not None and of_call.is_of_a_cell:
        overrides = [*in_this_process(settings), *overrides]
    what = str(simulate) if of_call is None else of_call.reference
    request = PrivacyPlanRequest(**given, simulate=what, overrides=overrides)
    with in_turn(), reporting_to(Reporter(lambda line: None)), threads_kept():
        return PrivacyPlan(operation.plan(request, None if of_call is None else of_call.task).document)


def _in_python(fault: str) -> str:
    """Return a fault with the names of arguments in place of options."""
    return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), fault)
