"""The settings of a guarantee for examples, `[privacy]` with `unit = "example"`, and what does not go with it.

The sites add the noise, by DP-SGD in the built-in loop, so that most of a run's settings come after it and are free.
The coordinator does not know the number of a site's examples, and accounts without it: each example takes part in a
step with the probability `sample_rate`, and the settings give the most steps of one training.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from atoll.ground.printable import count_of
from atoll.protocol.privacy.poisson_account import PoissonAccount, most
from atoll.protocol.settings import ConfigError
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.exclusion import excluded
from atoll.server.rounds.privacy_rules import ExampleRules, SharedExampleRules
from atoll.task.local import epoch_steps
from atoll.task.overrides import OverridesRefused
from atoll.task.round_schedule import read_schedule

_fault = partial(excluded, "privacy")

OF_EXAMPLES = 'privacy.unit = "example"'

STEPS_MISSING = (
    f"local.max_steps: missing: {OF_EXAMPLES} needs it, or local.epochs, as the account counts the steps of each "
    "training"
)

_TRIES = 5
"""Most evaluations of the tight account, of seconds each, for the number of uses beyond its bound."""

_FEW = 8
"""Uses below which all are looked for: with little noise the bound may allow none where the account does."""

_LOSSES = "private trainings tell no losses"
_SEES_LOSSES = ("power_of_choice", "oort")
"""Samplers by the losses of trainings."""


@dataclass(frozen=True, slots=True)
class ExampleTerms:
    """Budget and mechanism for the examples of a run.

    Attributes:
        noise_multiplier: None: the least one for all uses.
        uses: most sums that one client's updates are in.
        steps: most steps of one training.
        batch: number by which a step's sum is divided, if the clients add the noise to the sum of their updates; 0:
            each site adds it to its steps.
    """

    epsilon: float
    delta: float
    noise_multiplier: float | None
    clip_norm: float
    sample_rate: float
    uses: int
    steps: int
    batch: float = 0.0

    @property
    def account(self) -> PoissonAccount:
        """The account of its steps."""
        return PoissonAccount(self.sample_rate, self.delta)


@lru_cache(maxsize=64)
def noise_of(terms: ExampleTerms) -> float:
    """Return the noise multiplier, the least for all uses if none is given; takes seconds.

    Raises:
        ConfigError: no noise keeps the budget.
    """
    if terms.noise_multiplier is not None:
        return terms.noise_multiplier
    try:
        return terms.account.least_noise(terms.epsilon, terms.uses * terms.steps)
    except ValueError as error:
        raise ConfigError([f"privacy.epsilon: {error}"]) from error


def bound_of_noise(terms: ExampleTerms) -> float:
    """Return the noise multiplier, or an upper bound of the least one for all uses, in milliseconds.

    Raises:
        ValueError: no noise keeps the budget.
    """
    return terms.noise_multiplier or terms.account.bound_noise(terms.epsilon, terms.uses * terms.steps)


@lru_cache(maxsize=64)
def rules_of(terms: ExampleTerms, honest_min: int = 0, colluders: int = 0) -> ExampleRules:
    """Return the rules for the run's machine; takes seconds, errors as in `noise_of`.

    Args:
        terms: budget and mechanism.
        honest_min: of noise by the clients, the fewest honest members of a sum.
        colluders: of noise by the clients, members that may tell the coordinator their shares.
    """
    z, account = noise_of(terms), terms.account
    uses = most(lambda uses: account.bound_of(z, uses * terms.steps) <= terms.epsilon, terms.uses + 1)
    above, is_growing = min(terms.uses + 1, max(2 * uses, _FEW)), True
    if terms.noise_multiplier is None:  # it is for all of them
        above = terms.uses + 1
    for _ in range(_TRIES):
        if above - uses <= 1:
            break
        tried = above - 1 if is_growing else (uses + above) // 2
        if account.epsilon_of(z, tried * terms.steps) > terms.epsilon:
            above, is_growing = tried, False
            continue
        uses = tried
        if is_growing:  # the account allows more than twice what the bound does
            above = min(2 * above, terms.uses + 1)
    kind: Any = partial(SharedExampleRules, honest_min=honest_min, colluders=colluders) if terms.batch else ExampleRules
    rules: ExampleRules = kind(
        epsilon=terms.epsilon,
        delta=terms.delta,
        noise_multiplier=z,
        clip_norm=terms.clip_norm,
        participations_max=terms.uses,
        spent_max=float(uses * terms.steps),
        sample_rate=terms.sample_rate,
        steps=terms.steps,
        epsilon_last=account.epsilon_of(z, uses * terms.steps) if uses else 0.0,
    )
    return rules


def given_of(terms: ExampleTerms, bits: int) -> dict[str, Any]:
    """Return what a site must know and approve of the terms, by the names of the settings.

    `bits`: of the words of a secure sum, into which an update is rounded.
    """
    return {
        "unit": "example",
        "sample_rate": terms.sample_rate,
        "clip_norm": terms.clip_norm,
        "noise_multiplier": noise_of(terms),
        "epsilon": terms.epsilon,
        "delta": terms.delta,
        "participations_max": terms.uses,
        **({"noise_by": "clients", "batch": terms.batch, "bits": bits} if terms.batch else {}),
    }


def faults_of_budget(terms: ExampleTerms) -> Iterator[str]:
    """Yield the fault of a budget that does not allow a single training."""
    z, account = terms.noise_multiplier, terms.account
    if z is None:
        try:
            account.bound_noise(terms.epsilon, terms.uses * terms.steps)
        except ValueError as error:
            yield f"privacy.epsilon: {error}: allowed is a larger epsilon or delta, or fewer steps"
    elif account.bound_of(z, terms.steps) <= terms.epsilon:  # quick
        return
    elif (one := account.epsilon_of(z, terms.steps)) > terms.epsilon:
        why = f"one training of {count_of(terms.steps, 'step')} costs epsilon {one:.6g}"
        yield _fault("privacy.noise_multiplier", z, why, "more, a larger epsilon, or fewer steps (local.max_steps)")


# ---------------------------------------------------------------- steps


def steps_of(local: Mapping[str, Any], sample_rate: float, rounds: int) -> int | None:
    """Return the most steps of one training in any round: epochs of 1 / q steps, and at most `max_steps`.

    Args:
        local: values of the run for the task's `Local`, with tables for schedules (`task.given`).
        sample_rate: q.
        rounds: of the run.

    Returns:
        None: the values name neither, or no whole numbers above 0.
    """
    epochs, limit = (_most_of(name, local.get(name), rounds) for name in ("epochs", "max_steps"))
    every = None if epochs is None else epochs * epoch_steps(sample_rate)
    return min((steps for steps in (every, limit) if steps is not None), default=None)


def _most_of(name: str, value: Any, rounds: int) -> int | None:
    """Return the largest value of a setting in the rounds of a run; None: it has none that counts steps."""
    values: list[Any] = [value]
    if isinstance(value, Mapping):
        try:
            schedule = read_schedule(f"schedule.local.{name}", value)
            values = [schedule.at(turn) for turn in sorted({1, rounds}.union(schedule.turns(rounds)))]
        except (OverridesRefused, ValueError):  # its faults are told where schedules are checked
            return None
    found = [round(each) for each in values if type(each) in (int, float)]
    return max(found) if len(found) == len(values) and min(found) >= 1 else None


# ---------------------------------------------------------------- other tables


def faults_of_program(main: str, *, is_app: bool) -> Iterator[str]:
    """Yield the fault of a task without the built-in loop."""
    if main:
        yield _fault("program.main", main, "the program releases what it makes of single replies", "a run of rounds")
    elif is_app:
        what = "a Flower app trains by its own code, which has no gradients of single examples"
        yield f'task: is a Flower app, and with {OF_EXAMPLES} {what}: allowed is a Task, or unit = "client"'


def faults_of_aggregation(aggregation: AggregationConfig) -> Iterator[str]:
    """Yield the settings of an aggregation that a guarantee for examples excludes."""
    if aggregation.algorithm not in ("fedavg", "fedprox"):
        what = "its corrections are made of gradients without noise"
        yield _fault("aggregation.algorithm", aggregation.algorithm, what, '"fedavg", "fedprox"')
    if aggregation.rule == "concatenate":
        yield _fault("aggregation.rule", aggregation.rule, "rows that a site appends have no noise", 'such as "mean"')
    if aggregation.partial:
        yield _fault("aggregation.partial", True, "what an update leaves out would be released", "false")


def faults_of_rounds(late: str) -> Iterator[str]:
    """Yield the fault of late updates, whose clients may be in a second sum before the first one is charged."""
    if late != "discard":
        yield _fault("round.late", late, "an update counts in the round that is charged for it", '"discard"')


def faults_of_sampler(sampler: str) -> Iterator[str]:
    """Yield the fault of a sampler by what private trainings do not tell."""
    if sampler in _SEES_LOSSES:
        yield _fault("cohort.sampler", sampler, _LOSSES, '"uniform", "stratified", "weighted", or a custom one')


OF_A_STEP = ("max_steps", "epochs", "batch_size", "shuffle")
"""Local settings that a step with shared noise has, or on which it does not depend."""


def faults_of_step(local: Collection[str], max_steps: Any) -> Iterator[str]:
    """Yield the local settings that do not go with noise by the clients, of which a training is one step.

    Args:
        local: names of the run's values for the task's `Local`.
        max_steps: their number of steps.
    """
    if max_steps not in (None, 1):  # a missing number has its fault by itself
        what = "the clients share the noise of one step, so that a round is one"
        yield _fault("local.max_steps", max_steps, what, "1")
    if "keep" in local:
        what = "the layers that a site keeps have no noise, and its next sums would tell of them"
        yield f"local.keep: got a value, and with {OF_EXAMPLES} and noise by the clients {what}: allowed is none"
    for name in sorted({*local}.difference(OF_A_STEP, ("keep",))):
        yield (
            f"local.{name}: got a value, and with {OF_EXAMPLES} and noise by the clients an update is the gradient of "
            "one step: allowed are the settings of the server's step, [optimizer]"
        )
