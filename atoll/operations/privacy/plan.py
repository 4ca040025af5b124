"""The plan of a private run: noise for an epsilon, epsilon for a noise, uses that are left, and the noise of a mean."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.privacy.rounds import Rounds, faults_of_rounds, rounds_of
from atoll.operations.requests import PrivacyPlanRequest
from atoll.protocol.privacy import correlated, gaussian
from atoll.protocol.privacy.guarantee import EXACT, Guarantee, Mechanism, NoiseBy
from atoll.protocol.privacy.poisson_account import PoissonAccount, most
from atoll.protocol.secure.session_size import MEMBERS_MAX

if TYPE_CHECKING:
    from atoll.operations.privacy.preview import Preview
    from atoll.task.array_task import ArrayTask
    from atoll.task.task import Task

USES_MAX = 1_000_000
_SHOWN_USES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True, slots=True)
class NoiseOfMean:
    """Noise of the mean of a round's updates, in lengths of one that is clipped.

    Attributes:
        one_round: expected norm of the noise of one round, z sens sqrt(d) / n.
        all_rounds: of the sum of all rounds, whose updates are together at most as many lengths as there are rounds;
            None: their number is not given.
        rounds: their number.
    """

    one_round: float
    all_rounds: float | None
    rounds: int | None

    @property
    def sentences(self) -> Iterator[str]:
        """What that means."""
        yield f"the noise in one round's mean, over the length of a clipped update: {self.one_round:.3g}"
        if self.all_rounds is not None and self.rounds is not None:
            share = self.all_rounds / self.rounds
            yield (
                f"over {count_of(self.rounds, 'round')} it adds up to {self.all_rounds:.3g} lengths; over the sum "
                f"of means that all have one direction and the full length: {share:.3g}"
            )
            if share > 1.0:
                yield (
                    "that is more than training can give: more clients in a round, fewer numbers in an update (LoRA, "
                    "a smaller model), a larger epsilon, or noise for examples in place of clients"
                )


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """Answer of a plan.

    Attributes:
        guarantee: with the noise multiplier that was given or found, after all uses or steps.
        epsilon_max: the budget that was given; None: none was.
        fits: the most uses or steps within the budget; None: there is no budget, or noise is correlated.
        left: those that are left after the ones that are spent; None as `fits`.
        by_uses: numbers of uses, each with its epsilon.
        noise: of the mean; None: the cohort's size or the number of values is not given.
        bands: of correlated noise; None: it is independent.
        round: the rounds of a cohort; None: its size is not given, or the plan is for examples.
        preview: the task's simulation; None: none was asked for.
    """

    guarantee: Guarantee
    epsilon_max: float | None
    fits: int | None
    left: int | None
    by_uses: tuple[tuple[int, float], ...]
    noise: NoiseOfMean | None
    bands: int | None
    round: Rounds | None = None
    preview: "Preview | None" = None

    @property
    def document(self) -> dict[str, Any]:
        """The plan in plain values."""
        return {
            **dataclasses.asdict(self.guarantee),
            "sentence": self.guarantee.sentence,
            "epsilon_max": self.epsilon_max,
            "fits": self.fits,
            "left": self.left,
            "by_uses": [{"uses": uses, "epsilon": epsilon} for uses, epsilon in self.by_uses],
            "noise_of_mean": None if self.noise is None else dataclasses.asdict(self.noise),
            "bands": self.bands,
            "round": None if self.round is None else dataclasses.asdict(self.round),
            "preview": None if self.preview is None else dataclasses.asdict(self.preview),
        }


def plan(request: PrivacyPlanRequest, task: "Task | ArrayTask | None" = None) -> PrivacyPlan:
    """Plan a mechanism, and simulate the task that the request names.

    Args:
        request: the request.
        task: the task that it names; None: it is loaded.

    Raises:
        CommandError: the request has faults, with all of them; or the simulation has failed.
        ConfigError: the settings of the simulation have faults, before anything runs.
    """
    if faults := [*_faults(request)]:
        raise CommandError(*faults)
    found = _of_clients(request) if request.unit == "client" else _of_examples(request)
    if request.simulate is None:
        return found
    from atoll.operations.privacy.preview import preview  # it imports the simulator

    return dataclasses.replace(found, preview=preview(request, settings_of(request, found), task))


def settings_of(asked: PrivacyPlanRequest, found: PrivacyPlan) -> dict[str, Any]:
    """Return the settings of a run with a plan, by their keys."""
    guarantee = found.guarantee
    settings: dict[str, Any] = {
        "privacy.epsilon": float(asked.epsilon or guarantee.epsilon * (1.0 + 1e-9)),  # of all uses, and its rounding
        "privacy.delta": guarantee.delta,
        "privacy.noise_multiplier": guarantee.noise_multiplier,
        "privacy.clip_norm": float(guarantee.clip_norm),
    }
    if asked.unit == "example":
        return settings | {"privacy.unit": "example", "privacy.sample_rate": asked.sample_rate}
    settings |= {"aggregation.weighting": "uniform", "privacy.participations_max": guarantee.uses}
    if asked.mechanism == "correlated":
        settings |= {"privacy.mechanism": "correlated", "privacy.separation_min": asked.separation}
        settings["privacy.bands"] = found.bands
    settings |= {
        key: value
        for key, value in (
            ("rounds", asked.rounds),
            ("round.cohort_size", asked.cohort_size),
            ("round.quorum", asked.quorum),
        )
        if value is not None
    }
    if asked.noise_by == "clients":
        settings |= {"privacy.noise_by": "clients", "secure.clip_norm": float(guarantee.clip_norm)}
        settings |= {"secure.bits": asked.bits or 32, "privacy.honest_min": guarantee.honest_min}
        settings |= {"privacy.colluders": guarantee.colluders}
    return settings


# ---------------------------------------------------------------- faults


_NUMBERS = {
    "--delta": "above 0, below 1",
    "--epsilon": "above 0, at most 1e9",
    "--noise-multiplier": "above 0, at most 1e9",
    "--clip-norm": "above 0, at most 1e9",
    "--sample-rate": "above 0, at most 1",
}
_COUNTS = {
    **dict.fromkeys(("--uses", "--rounds", "--separation", "--cohort-size", "--quorum", "--steps"), USES_MAX),
    "--clients": 10**9,
    "--values": 2**50,
    "--honest-min": MEMBERS_MAX,
    "--colluders": MEMBERS_MAX,
}
_FROM_ZERO = ("--spent", "--colluders")
_NUMBERS_OF_CLIENTS = ("--uses", "--rounds", "--separation", "--cohort-size", "--values", "--clients", "--quorum")
_OF_SHARES = ("--honest-min", "--colluders", "--bits")
_OF_CLIENTS = (*_NUMBERS_OF_CLIENTS, *_OF_SHARES)
_OF_EXAMPLES = ("--sample-rate", "--steps")


_CHOICES = {
    "--unit": ("client", "example"),
    "--mechanism": ("gaussian", "correlated"),
    "--noise-by": ("coordinator", "clients"),
}


def _faults(asked: PrivacyPlanRequest) -> Iterator[str]:
    values = {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(asked).items()}
    bad = [*_faults_of_values(values)]
    yield from bad
    if asked.delta is None:
        yield "--delta: missing; allowed: a number above 0 and below 1 / number of clients, such as 1e-6"
    if asked.epsilon is None and asked.noise_multiplier is None:
        yield "--epsilon, --noise-multiplier: both are missing; allowed: one, whose other is found, or both"
    if asked.values is not None and asked.cohort_size is None:
        yield "--cohort-size, --values: one is missing; the noise of a mean depends on both"
    wrong, other = (_OF_CLIENTS, "client") if asked.unit == "example" else (_OF_EXAMPLES, "example")
    for flag in wrong:
        if values[flag] is not None:
            yield f"{flag}: got {values[flag]}; allowed with --unit {other} alone"
    if not bad:
        yield from _faults_of_examples(asked) if asked.unit == "example" else _faults_of_clients(asked)


def _faults_of_values(values: dict[str, Any]) -> Iterator[str]:
    """Yield the values that are not allowed, whatever the others are."""
    for flag, names in _CHOICES.items():
        if values[flag] not in names:
            yield f"{flag}: got {values[flag]!r}; allowed: {', '.join(names)}"
    for flag, allowed in _NUMBERS.items():
        value = values[flag]
        if value is None:
            continue
        most = 1.0 if "1e9" not in allowed else 1e9
        is_within = _is_number(value) and 0.0 < value <= most and (value < most or "at most" in allowed)
        if not is_within:
            yield f"{flag}: got {_shown(value)}; allowed: {allowed}"
    if values["--bits"] not in (None, 32, 64):
        yield f"--bits: got {_shown(values['--bits'])}; allowed: 32, 64"
    for flag in (*_COUNTS, "--spent"):
        value, least, most = values[flag], int(flag not in _FROM_ZERO), _COUNTS.get(flag, USES_MAX)
        if value is not None and not (_is_number(value) and value == int(value) and least <= value <= most):
            yield f"{flag}: got {_shown(value)}; allowed: a whole number, {least} to {most}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _faults_of_examples(asked: PrivacyPlanRequest) -> Iterator[str]:
    if asked.mechanism == "correlated":
        yield "--mechanism: got correlated; allowed with --unit example: gaussian"
    if asked.noise_by == "clients":
        yield "--noise-by: got clients; with --unit example each site adds its own: leave it out"
    for flag, value in (("--sample-rate", asked.sample_rate), ("--steps", asked.steps)):
        if value is None:
            yield f"{flag}: missing; --unit example needs it"
    if asked.spent:
        yield f"--spent: got {asked.spent}; allowed with --unit client alone"


def _faults_of_clients(asked: PrivacyPlanRequest) -> Iterator[str]:
    if asked.cohort_size is not None and asked.delta is not None and asked.delta >= 1.0 / asked.cohort_size:
        why = f"1 / {asked.cohort_size} or more allows to publish one client of each round unprotected"
        yield f"--delta: got {asked.delta:g}; {why}: allowed is less, such as {_sound(asked.cohort_size):g}"
    if asked.uses is None and asked.rounds is None and asked.noise_multiplier is None:
        yield "--uses, --rounds: both are missing; the noise for an epsilon depends on the number of uses"
    if asked.uses is not None and asked.rounds is not None and asked.uses > asked.rounds:
        yield f"--uses: got {asked.uses}; allowed: at most --rounds ({asked.rounds})"
    if asked.noise_by == "coordinator":
        for flag, value in zip(_OF_SHARES, (asked.honest_min, asked.colluders, asked.bits), strict=True):
            if value is not None:
                yield f"{flag}: got {value}; allowed with --noise-by clients alone"
    if asked.mechanism == "correlated":
        yield from _faults_of_correlation(asked)
    elif asked.separation is not None:
        yield f"--separation: got {asked.separation}; allowed with --mechanism correlated alone"
    if asked.delta is not None and asked.mechanism == "gaussian" and (z := _noise_multiplier(asked)) is not None:
        yield from faults_of_rounds(asked, z)


def _sound(number: int) -> float:
    """Return a power of ten that is at most a tenth of 1 / number."""
    return float(10.0 ** -math.ceil(math.log10(number) + 1.0))


def _faults_of_correlation(asked: PrivacyPlanRequest) -> Iterator[str]:
    if asked.rounds is None or asked.separation is None:
        yield "--rounds, --separation: one is missing; correlated noise needs both"
    elif asked.rounds > correlated.ROUNDS_MAX:
        yield f"--rounds: got {asked.rounds}; allowed with correlated noise: 1 to {correlated.ROUNDS_MAX}"
    if asked.spent:
        yield f"--spent: got {asked.spent}; allowed with correlated noise: 0, as all its rounds are one use"
    given: dict[str, Any] = {"--clients": asked.clients, "--quorum": asked.quorum}
    given["--noise-by"] = None if asked.noise_by == "coordinator" else asked.noise_by
    for flag, value in given.items():
        if value is not None:
            yield f"{flag}: got {value}; allowed with independent noise (--mechanism gaussian) alone"


# ---------------------------------------------------------------- clients


def _noise_multiplier(asked: PrivacyPlanRequest) -> float | None:
    """Return the noise multiplier that is given, or the least for the budget; None: something is missing for it."""
    uses = asked.uses or asked.rounds
    if asked.noise_multiplier is not None or asked.epsilon is None or asked.delta is None or uses is None:
        return asked.noise_multiplier
    return gaussian.noise_multiplier_of(asked.epsilon, asked.delta, uses)


def _of_clients(asked: PrivacyPlanRequest) -> PrivacyPlan:
    if asked.mechanism == "correlated":
        return _of_correlated(asked)
    delta, budget, z = cast(float, asked.delta), asked.epsilon, _noise_multiplier(asked)
    assert z is not None
    uses, fits = asked.uses or asked.rounds, None
    if budget is not None:
        fits = gaussian.uses_within(budget, delta, z)
    left = None if fits is None else max(0, fits - asked.spent)
    try:
        rounds = rounds_of(asked, z, None if left is None else min(left, max(0, (uses or fits or 0) - asked.spent)))
    except ValueError as fault:
        raise CommandError(f"--values: {fault}") from None
    uses = uses or fits or 1
    guarantee = _guarantee(asked, 0.0, z, uses, EXACT)
    if rounds is not None and rounds.honest_min is not None and rounds.colluders is not None:
        guarantee = dataclasses.replace(guarantee, honest_min=rounds.honest_min, colluders=rounds.colluders)

    def epsilon(number: int) -> float:
        return gaussian.epsilon_of(gaussian.mu_of([(z, number)]), delta)

    return PrivacyPlan(
        guarantee=dataclasses.replace(guarantee, epsilon=epsilon(uses)),
        epsilon_max=budget,
        fits=fits,
        left=left,
        by_uses=_table(epsilon, uses),
        noise=_noise(asked, z * (1.0 if rounds is None else rounds.growth), lambda number: math.sqrt(number)),
        bands=None,
        round=rounds,
    )


def _of_correlated(asked: PrivacyPlanRequest) -> PrivacyPlan:
    delta, rounds, separation = cast(float, asked.delta), cast(int, asked.rounds), cast(int, asked.separation)
    most = -(-rounds // separation)
    uses = min(asked.uses or most, most)
    z = asked.noise_multiplier
    if z is None:
        assert asked.epsilon is not None
        z = gaussian.noise_multiplier_of(asked.epsilon, delta)
    bands = correlated.best_bands(rounds, separation, uses)
    noises = correlated.inverse_square_root(bands)
    scale = correlated.sensitivity(noises, rounds, separation, uses)
    of_all = correlated.prefix_deviation(noises, rounds)
    in_one = math.sqrt(math.fsum(value * value for value in noises))
    epsilon = gaussian.epsilon_of(1.0 / z, delta)
    return PrivacyPlan(
        guarantee=_guarantee(asked, epsilon, z, uses, EXACT),
        epsilon_max=asked.epsilon,
        fits=None,
        left=None,
        by_uses=(),
        noise=_noise(asked, z * scale * in_one, lambda rounds: of_all / in_one),
        bands=bands,
    )


def _noise(asked: PrivacyPlanRequest, z: float, growth: Callable[[int], float]) -> NoiseOfMean | None:
    if asked.cohort_size is None or asked.values is None:
        return None
    one = z * math.sqrt(asked.values) / asked.cohort_size
    return NoiseOfMean(one, None if asked.rounds is None else one * growth(asked.rounds), asked.rounds)


# ---------------------------------------------------------------- examples


def _of_examples(asked: PrivacyPlanRequest) -> PrivacyPlan:
    q, steps, delta = cast(float, asked.sample_rate), cast(int, asked.steps), cast(float, asked.delta)
    z, budget, account = asked.noise_multiplier, asked.epsilon, PoissonAccount(q, delta)
    try:
        if z is None:
            assert budget is not None
            z = account.least_noise(budget, steps)
    except ValueError as fault:
        raise CommandError(f"--epsilon: {fault}") from None
    fits = None if budget is None else _most_steps(account, z, budget, steps)
    epsilon, accountant = account.account_of(z, steps)
    return PrivacyPlan(
        guarantee=_guarantee(asked, epsilon, z, steps, accountant),
        epsilon_max=budget,
        fits=fits,
        left=None,
        by_uses=(),
        noise=None,
        bands=None,
    )


def _most_steps(account: PoissonAccount, z: float, budget: float, about: int) -> int:
    """Return the largest number of steps within the budget, up to `USES_MAX`."""
    within, beyond = 0, about
    while account.epsilon_of(z, beyond) <= budget:
        if beyond == USES_MAX:
            return beyond
        within, beyond = beyond, min(2 * beyond, USES_MAX)
    return most(lambda number: account.epsilon_of(z, number) <= budget, beyond, within)


# ---------------------------------------------------------------- both


def _guarantee(asked: PrivacyPlanRequest, epsilon: float, z: float, uses: int, accountant: str) -> Guarantee:
    is_client = asked.unit == "client"
    return Guarantee(
        epsilon=epsilon,
        delta=cast(float, asked.delta),
        unit="client" if is_client else "example",
        mechanism=cast(Mechanism, asked.mechanism),
        noise_multiplier=z,
        clip_norm=asked.clip_norm,
        uses=uses,
        accountant=accountant,
        noise_by=cast(NoiseBy, asked.noise_by) if is_client else "site",
        sampling_rate=asked.sample_rate,
        separation=asked.separation,
    )


def _table(epsilon: Callable[[int], float], uses: int) -> tuple[tuple[int, float], ...]:
    shown = sorted({*(number for number in _SHOWN_USES if number < uses), uses})
    return tuple((number, epsilon(number)) for number in shown)
