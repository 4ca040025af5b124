"""The rounds of a private run as a plan shows them: whom a quorum needs, what fits into a sum, what dropouts do.

The rules are the settings' (`server.config.privacy`), whose faults are told with the names of the options.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from atoll.ground.printable import count_of
from atoll.operations.requests import PrivacyPlanRequest
from atoll.protocol.secure.session_size import MEMBERS_MIN

if TYPE_CHECKING:  # they import pydantic, which a plan without rounds does not need
    from atoll.server.config.privacy import PrivacyConfig
    from atoll.server.config.secure import SecureConfig
    from atoll.server.rounds.secure_rules import Bits

_SHOWN = 4
"""Most numbers of survivors that are shown."""

_OPTIONS = {
    "privacy.noise_multiplier": "--noise-multiplier",
    "privacy.honest_min": "--honest-min",
    "privacy.colluders": "--colluders",
    "round.cohort_size": "--cohort-size",
    "round.quorum": "--quorum",
    "secure.bits = 64": "--bits 64",
    "noise_multiplier": "--noise-multiplier",
}
"""Options by the settings that faults name, in this order."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """Sum of some updates of a cohort, divided by the whole cohort's number.

    Attributes:
        updates: in the sum.
        length: longest mean, in lengths of a clipped update: updates / cohort.
        noise: of the mean, in these lengths.
    """

    updates: int
    length: float
    noise: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of a plan.

    Attributes:
        cohort_size: n, by which each sum is divided.
        quorum: fewest updates that commit a round.
        dropouts: clients of a cohort that may be missing.
        norm_max: the longest update that stays as it is, a little below the clip norm for its rounding; None: the
            number of values is not given.
        by_survivors: the mean of fewer updates, largest first; empty: the number of values is not given.
        threshold: of noise by the clients, the members of the smallest session that open its sum.
        honest_min: of noise by the clients, as in the settings, or what follows from them.
        colluders: as `honest_min`.
        whole: most rounds of whole cohorts within the budgets of all clients; None: their number, or a budget, is not
            given.
        in_quorums: the same of rounds of a quorum each.
        clients: their number.
        uses: that each has left.
        asked: rounds of the run; None: they are not given.
    """

    cohort_size: int
    quorum: int
    dropouts: int
    norm_max: float | None
    by_survivors: tuple[Survivors, ...]
    threshold: int | None = None
    honest_min: int | None = None
    colluders: int | None = None
    whole: int | None = None
    in_quorums: int | None = None
    clients: int | None = None
    uses: int | None = None
    asked: int | None = None

    @property
    def growth(self) -> float:
        """The noise of a whole cohort's sum, over the one that the guarantee needs."""
        return 1.0 if self.honest_min is None else math.sqrt(self.cohort_size / self.honest_min)

    @property
    def sentences(self) -> Iterator[str]:
        """What that means."""
        if self.honest_min is not None and self.colluders is not None:
            yield (
                f"noise by the clients: a sum is opened by {self.threshold} of its members; the shares of "
                f"{self.honest_min} honest ones suffice, beside {count_of(self.colluders, 'colluder')}, and each "
                "attempt at a sum is a use; "
                f"the noise of a whole cohort's sum is the needed one, multiplied by {self.growth:.3g}"
            )
        yield (
            f"a round needs {self.quorum} of {count_of(self.cohort_size, 'update')}: "
            f"{count_of(self.dropouts, 'client')} may drop out"
        )
        if self.norm_max is not None:
            yield f"an update of norm {self.norm_max:.8g} or less stays as it is, a longer one is scaled down to it"
        if self.whole is not None and self.uses is not None and self.clients is not None:
            yield (
                f"{count_of(self.clients, 'client')} with {count_of(self.uses, 'use')} each: at most "
                f"{count_of(self.whole, 'round')} of whole cohorts, or {self.in_quorums} of a quorum each; a run ends "
                f"when fewer than {self.quorum} have a use left"
            )
        if (needed := self.clients_needed) is not None:
            yield f"{count_of(self.asked or 0, 'round')} of a quorum each need at least {count_of(needed, 'client')}"

    @property
    def clients_needed(self) -> int | None:
        """The fewest clients whose budgets allow the rounds that are asked for; None: those that there are do."""
        if self.asked is None or self.in_quorums is None or not self.uses or self.asked <= self.in_quorums:
            return None
        return -(-self.asked * self.quorum // self.uses)


def rounds_of(asked: PrivacyPlanRequest, z: float, uses: int | None) -> Rounds | None:
    """Return the rounds of a plan for clients; None: the cohort's size is not given.

    Args:
        asked: the request, whose values have no fault.
        z: noise multiplier.
        uses: that each client has left within its budget; None: there is no budget.

    Raises:
        ValueError: the grid of the noise is too coarse for an update of the given number of values.
    """
    if (cohort := asked.cohort_size) is None:
        return None
    privacy, secure = _settings(asked, z)
    rules = secure.rules()
    is_shared, quorum = privacy.is_shared, asked.quorum or cohort
    honest = privacy.honest_of(rules, cohort) if is_shared else None
    values = asked.values
    return Rounds(
        cohort_size=cohort,
        quorum=quorum,
        dropouts=cohort - quorum,
        norm_max=None if values is None else _norm_max(privacy, secure, z, values),
        by_survivors=tuple(
            Survivors(updates, updates / cohort, z * math.sqrt((values or 0) * updates / (honest or updates)) / cohort)
            for updates in (() if values is None else _survivors(quorum, cohort))
        ),
        threshold=rules.threshold_of(min(rules.sizes(cohort))) if is_shared else None,
        honest_min=honest,
        colluders=privacy.colluders_assumed if is_shared else None,
        whole=_rounds(asked.clients, uses, cohort),
        in_quorums=_rounds(asked.clients, uses, quorum),
        clients=asked.clients,
        uses=uses,
        asked=asked.rounds,
    )


def faults_of_rounds(asked: PrivacyPlanRequest, z: float) -> Iterator[str]:
    """Yield the faults of a round for clients; arguments as of `rounds_of`."""
    if (cohort := asked.cohort_size) is None:
        yield from _faults_without_a_cohort(asked)
        return
    if asked.clients is not None and asked.clients < cohort:
        yield f"--clients: got {asked.clients}; allowed: at least --cohort-size ({cohort})"
    if asked.quorum is not None and asked.quorum > cohort:
        yield f"--quorum: got {asked.quorum}; allowed: at most --cohort-size ({cohort})"
        return
    if asked.noise_by == "clients":
        yield from _faults_of_sums(asked, z, cohort)
        return
    from atoll.aggregation.noise.private_sum import fault_of_sum  # it imports numpy

    if fault := fault_of_sum(cohort, z):
        yield f"--cohort-size: {fault}: allowed is more noise, or a smaller cohort"


def _faults_without_a_cohort(asked: PrivacyPlanRequest) -> Iterator[str]:
    for name, value in (("--clients", asked.clients), ("--quorum", asked.quorum)):
        if value is not None:
            yield f"{name}: got {value}; allowed with --cohort-size alone"
    if asked.noise_by == "clients":
        yield "--cohort-size: missing; noise by the clients depends on it"


def _faults_of_sums(asked: PrivacyPlanRequest, z: float, cohort: int) -> Iterator[str]:
    """Yield the faults of secure sums to which the clients add noise, as the settings of a run have them."""
    if cohort < MEMBERS_MIN:
        least = f"{MEMBERS_MIN} or more, as many as a secure sum has at least"
        yield f"--cohort-size: got {cohort}; allowed with --noise-by clients: {least}"
        return
    from atoll.server.rounds.policy import StragglerPolicy

    privacy, secure = _settings(asked, z)
    policy = StragglerPolicy(cohort_size=cohort, quorum=asked.quorum or cohort)
    for fault in privacy.faults_of_secure(secure, policy, 1):
        for setting, option in _OPTIONS.items():
            fault = fault.replace(setting, option)
        yield fault


def _settings(asked: PrivacyPlanRequest, z: float) -> "tuple[PrivacyConfig, SecureConfig]":
    """Return the tables of a run with this plan; the sums of one with noise by the coordinator are not secure."""
    from atoll.server.config.privacy import PrivacyConfig
    from atoll.server.config.secure import SecureConfig

    privacy = PrivacyConfig(
        epsilon=asked.epsilon or 1.0,
        delta=cast(float, asked.delta),
        noise_multiplier=z,
        clip_norm=float(asked.clip_norm),
        noise_by="clients" if asked.noise_by == "clients" else "coordinator",
        honest_min=asked.honest_min,
        colluders=asked.colluders,
    )
    return privacy, SecureConfig(bits=cast("Bits", asked.bits or 32), clip_norm=float(asked.clip_norm))


def _norm_max(privacy: "PrivacyConfig", secure: "SecureConfig", z: float, values: int) -> float:
    from atoll.aggregation.noise.private_sum import clip_to, exponent_of
    from atoll.tensors.secure.vector import clip_steps, rounded_clip

    clip = privacy.clip_norm
    if privacy.is_shared:
        return rounded_clip(clip, clip / clip_steps(secure.bits), values)
    return clip_to(clip, exponent_of(z * clip), values)


def _survivors(quorum: int, cohort: int) -> list[int]:
    """Return numbers of survivors from the whole cohort down to the quorum, evenly spread."""
    steps = min(_SHOWN - 1, cohort - quorum)
    return [cohort - round(step * (cohort - quorum) / steps) for step in range(steps + 1)] if steps else [cohort]


def _rounds(clients: int | None, uses: int | None, of_one: int) -> int | None:
    """Return how many rounds of `of_one` different clients each the uses of all clients allow."""
    return None if clients is None or uses is None else clients * uses // of_one
