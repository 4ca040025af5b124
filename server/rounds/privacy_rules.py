"""The rules of differential privacy in a run: its noise, its budget, a client's participations. Pure values."""

import math
from dataclasses import dataclass
from typing import Literal

from atoll.ground.printable import count_of
from atoll.protocol.privacy.gaussian import epsilon_of
from atoll.protocol.privacy.guarantee import EXACT, Guarantee
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
    noise_by: Literal["coordinator", "clients"] = "coordinator"
    """The party that adds the noise."""
    honest_min: int = 0
    """Fewest honest members of a secure sum, whose shares of the noise suffice."""
    colluders: int = 0
    """Members of a sum that may tell the coordinator their shares."""

    @property
    def sum_min(self) -> int:
        """Fewest members of a secure sum for its noise; 0: any number has it."""
        return self.honest_min + self.colluders if self.noise_by == "clients" else 0

    @property
    def cost(self) -> float:
        """What one use costs a client: 1 / z^2."""
        return self.noise_multiplier**-2

    def allows(self, spent: float, uses: int) -> bool:
        """Return whether a client may be used once more."""
        return uses < self.participations_max and spent + self.cost <= self.spent_max

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
            honest_min=self.honest_min,
            colluders=self.colluders,
        )

    def cause_of_end(self, spent: float, rounds: int) -> str:
        """Return why the run ends before the round that would exceed the budget."""
        of = f"epsilon {self.epsilon_of(spent):.6g} of {self.epsilon:g} at delta {self.delta:g}"
        return f"the privacy budget is spent: {of} after {count_of(rounds, 'round')}"
