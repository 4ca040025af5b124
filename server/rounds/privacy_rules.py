"""The rules of differential privacy in a run: its noise, its budget, a client's participations. Pure values."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from atoll.ground.printable import count_of
from atoll.protocol.privacy import correlated
from atoll.protocol.privacy.adaptive_clip import AdaptiveClip
from atoll.protocol.privacy.gaussian import epsilon_of
from atoll.protocol.privacy.guarantee import EXACT, PLD, RDP, Guarantee, NoiseBy
from atoll.protocol.privacy.poisson_account import PoissonAccount
from atoll.server.rounds.record import ChargeRecord


@dataclass(frozen=True, slots=True)
class PrivacyRules:
    """Rules of a run with a guarantee for clients, from its `[privacy]` table."""

    epsilon: float
    delta: float
    noise_multiplier: float
    clip_norm: float
    participations_max: int
    """Most sums that one client's updates are in."""
    spent_max: float
    """Largest sum over a client's uses of 1 / z^2 that keeps epsilon and delta."""
    adaptive: AdaptiveClip | None = field(default=None, kw_only=True)
    """Rule by which the clip norm, at first `clip_norm`, follows the updates; None: it is fixed."""

    @property
    def sum_multiplier(self) -> float:
        """Noise multiplier of the sum: with an adaptive clip norm above z, as the count has its part of the cost."""
        return self.noise_multiplier if self.adaptive is None else self.adaptive.sum_multiplier(self.noise_multiplier)

    @property
    def sum_min(self) -> int:
        """Fewest members of a secure sum for its noise; 0: any number has it."""
        return 0

    @property
    def noise_by(self) -> NoiseBy:
        """The party that adds the noise."""
        return "coordinator"

    @property
    def hides_clients(self) -> bool:
        """Whether no value of a single client may decide what is released."""
        return True

    @property
    def cost(self) -> float:
        """What one use costs a client: 1 / z^2."""
        return self.noise_multiplier**-2

    @property
    def separation(self) -> int:
        """Least distance of two versions with a client's update, in versions; 1: every one may have it."""
        return 1

    @property
    def earlier(self) -> tuple[float, ...]:
        """Factors of the noises of earlier rounds in the noise of a round, the last one first; empty: independent."""
        return ()

    @property
    def rounding(self) -> tuple[int, float]:
        """What rounding to the grid costs: see `private_sum.deviation_of`; (0, 0.0): no noise is rounded."""
        return 0, 0.0

    def spent_after(self, spent: float, uses: int, number: int = 1) -> float:
        """Return what a client has spent after `number` further uses."""
        return spent + number * self.cost

    def allows(self, spent: float, uses: int) -> bool:
        """Return whether a client may be used once more."""
        return uses < self.participations_max and self.spent_after(spent, uses) <= self.spent_max

    def epsilon_of(self, spent: float) -> float:
        """Return epsilon of a client that has spent this."""
        return epsilon_of(math.sqrt(spent), self.delta)

    def charged(self, clients: int, spent: float, uses: int, *, charges: int = 0) -> ChargeRecord:
        """Return the record of a charge of `clients`, after which the most used one has spent this in `uses` sums.

        `charges`: one for each client and attempt, if the clients add the noise.
        """
        return ChargeRecord(clients, uses, self.epsilon_of(spent), self.epsilon, self.delta, charges)

    def guarantee(self, spent: float, uses: int) -> Guarantee:
        """Return the guarantee of a run whose most used client has spent this in `uses` sums."""
        return Guarantee(
            epsilon=self.epsilon_of(spent),
            delta=self.delta,
            unit="client",
            mechanism="gaussian",
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            uses=uses,
            accountant=EXACT,
            noise_by=self.noise_by,
            quantile=None if self.adaptive is None else self.adaptive.quantile,
        )

    def cause_of_end(self, spent: float, rounds: int) -> str:
        """Return why the run ends before the round that would exceed the budget."""
        of = f"epsilon {self.epsilon_of(spent):.6g} of {self.epsilon:g} at delta {self.delta:g}"
        return f"the privacy budget is spent: {of} after {count_of(rounds, 'round')}"


@dataclass(frozen=True, slots=True)
class SharedRules(PrivacyRules):
    """Rules of a run with a guarantee for clients that add the noise themselves, each a share in its secure sum."""

    honest_min: int
    """Fewest honest members of a sum, whose shares of the noise suffice."""
    colluders: int
    """Members of a sum that may tell the coordinator their shares."""

    @property
    def noise_by(self) -> NoiseBy:
        """The party that adds the noise."""
        return "clients"

    @property
    def sum_min(self) -> int:
        """Fewest members of a secure sum for its noise."""
        return self.honest_min + self.colluders

    def guarantee(self, spent: float, uses: int) -> Guarantee:
        """Return the guarantee of a run whose most used client has spent this in `uses` sums."""
        central = PrivacyRules.guarantee(self, spent, uses)
        return replace(central, honest_min=self.honest_min, colluders=self.colluders)


@dataclass(frozen=True, slots=True)
class CorrelatedRules(PrivacyRules):
    """Rules of a run with a guarantee for clients, whose rounds take off again a part of what earlier ones added.

    All rounds together are one use of the Gaussian mechanism with the multiplier z. A client in fewer sums than it may
    be in has spent the share of the squared sensitivity that its uses have.
    """

    rounds: int
    """All rounds of the run, by which the noise is computed."""
    apart: int
    """Least distance of two versions with a client's update, in versions."""
    bands: int
    """Rounds whose noise is in the noise of a round."""

    @property
    def sum_multiplier(self) -> float:
        """Standard deviation of the noise of a round that is independent of the others', in clip norms."""
        return self.noise_multiplier * math.sqrt(self._squares[-1])

    @property
    def separation(self) -> int:
        """Least distance of two versions with a client's update, in versions."""
        return self.apart

    @property
    def earlier(self) -> tuple[float, ...]:
        """Factors of the noises of earlier rounds in the noise of a round, the last one first."""
        return correlated.inverse_square_root(self.bands)[1:]

    @property
    def rounding(self) -> tuple[int, float]:
        """The rounds, and |c|_1 s_K / s_1, by which rounding to the grid costs: see `private_sum.deviation_of`."""
        total = math.fsum(correlated.inverse_of(correlated.inverse_square_root(self.bands), self.rounds))
        return self.rounds, total * math.sqrt(self._squares[-1] / self._squares[0])

    @property
    def _squares(self) -> tuple[float, ...]:
        """The squared sensitivity of 1 to all uses of a client."""
        return _squares(self.rounds, self.apart, self.participations_max, self.bands)

    def spent_after(self, spent: float, uses: int, number: int = 1) -> float:
        """Return what a client has spent after `number` further uses."""
        return self.cost * self._squares[min(uses + number, self.participations_max) - 1] / self._squares[-1]

    def guarantee(self, spent: float, uses: int) -> Guarantee:
        """Return the guarantee of a run whose most used client has spent this in `uses` sums."""
        independent = PrivacyRules.guarantee(self, spent, uses)
        return replace(independent, mechanism="correlated", separation=self.apart)


@lru_cache(maxsize=64)
def _squares(rounds: int, separation: int, most: int, bands: int) -> tuple[float, ...]:
    """Return the squared sensitivity of 1 to `most` uses of a client."""
    c = correlated.inverse_of(correlated.inverse_square_root(bands), rounds)
    return correlated.squares_by_uses(c, rounds, separation, most)


@dataclass(frozen=True, slots=True)
class ExampleRules(PrivacyRules):
    """Rules of a run with a guarantee for examples, whose sites train by DP-SGD; what a client spends are steps.

    A client is charged for the most steps that a training may have, also if it does fewer.
    """

    sample_rate: float
    """Probability with which an example takes part in a step."""
    steps: int
    """Most steps of one training."""
    epsilon_last: float
    """Epsilon of a client that has spent `spent_max`, by the tightest accountant of the host that made the rules."""

    @property
    def noise_by(self) -> NoiseBy:
        """The party that adds the noise."""
        return "site"

    @property
    def hides_clients(self) -> bool:
        """Whether no value of a single client may decide what is released."""
        return False

    @property
    def cost(self) -> float:
        """What one use costs a client: its steps."""
        return self.steps

    def epsilon_of(self, spent: float) -> float:
        """Return an upper bound of epsilon of a client that has spent this: in microseconds, the same on each host."""
        return self._bounded(spent)[0]

    def guarantee(self, spent: float, uses: int) -> Guarantee:
        """Return the guarantee of a run whose most used client has spent this in `uses` sums."""
        of_uses, steps = PrivacyRules.guarantee(self, spent, uses), round(spent)
        accountant = self._bounded(spent)[1]
        return replace(of_uses, unit="example", uses=steps, accountant=accountant, sampling_rate=self.sample_rate)

    def _bounded(self, spent: float) -> tuple[float, str]:
        if not spent:
            return 0.0, EXACT if self.sample_rate == 1.0 else RDP
        bound = PoissonAccount(self.sample_rate, self.delta).bound_of(self.noise_multiplier, round(spent))
        if spent <= self.spent_max and self.epsilon_last < bound:
            return self.epsilon_last, PLD
        return bound, EXACT if self.sample_rate == 1.0 else RDP


@dataclass(frozen=True, slots=True)
class SharedExampleRules(ExampleRules):
    """Rules of a run with a guarantee for examples, whose sites make one step a round and share its noise in their sum.

    A client is charged for each sum whose boxes leave the coordinator.
    """

    honest_min: int
    """Fewest honest members of a sum, whose shares of the noise suffice."""
    colluders: int
    """Members of a sum that may tell the coordinator their shares."""

    @property
    def noise_by(self) -> NoiseBy:
        """The party that adds the noise."""
        return "clients"

    @property
    def sum_min(self) -> int:
        """Fewest members of a secure sum for its noise."""
        return self.honest_min + self.colluders

    def guarantee(self, spent: float, uses: int) -> Guarantee:
        """Return the guarantee of a run whose most used client has spent this in `uses` sums."""
        of_steps = ExampleRules.guarantee(self, spent, uses)
        return replace(of_steps, honest_min=self.honest_min, colluders=self.colluders)
