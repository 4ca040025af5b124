"""A guarantee of differential privacy, and the sentence that states all of it."""

from dataclasses import dataclass
from typing import Literal

from atoll.ground.printable import count_of

Unit = Literal["client", "example"]
"""What is protected: all that one client contributes, or one example at one client."""
Mechanism = Literal["gaussian", "correlated"]
NoiseBy = Literal["coordinator", "clients", "site"]

EXACT = "exact, by Balle and Wang 2018, theorem 8"
RDP = "an upper bound by Rényi differential privacy of integer orders, Mironov, Talwar and Zhang 2019"
PLD = "privacy loss distributions, by dp-accounting"

_ADJACENCY: dict[Unit, str] = {
    "client": "adjacent are runs in one of which all contributions of one client are zero; who takes part is public",
    "example": "adjacent are runs in one of which one client has one example more",
}
_MECHANISM: dict[Mechanism, str] = {
    "gaussian": "the Gaussian mechanism",
    "correlated": "Gaussian noise that is correlated over rounds (a banded inverse square root)",
}
_NOISE_BY: dict[NoiseBy, str] = {
    "coordinator": "the coordinator adds the noise, and is trusted to add it and with what it sees",
    "clients": "the clients add the noise inside their secure sums",
    "site": "each site adds the noise of its own examples",
}
_NOT_COVERED: dict[Unit, tuple[str, ...]] = {
    "client": ("who takes part, when and for how long", "the data that the first version was trained on"),
    "example": (
        "how many examples a site has, who takes part, when and for how long",
        "the data that the first version was trained on",
    ),
}


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Guarantee of what has been released, or would be.

    Attributes:
        epsilon: rounded up by its accountant.
        delta: in (0, 1).
        unit: what is protected.
        mechanism: of the noise.
        noise_multiplier: z; the noise of the sum has the standard deviation z times its sensitivity.
        clip_norm: the largest norm of one contribution.
        uses: most uses of one client's data; with a sampling rate the steps.
        accountant: the formula of epsilon, in words.
        noise_by: the party that adds the noise.
        sampling_rate: of Poisson sampling; None: every use counts in full.
        separation: of correlated noise, the least distance of two rounds with the same client.
        quantile: of the lengths of contributions, which the clip norm follows; None: it is fixed.
        honest_min: of noise by the clients, the fewest honest members of a sum, whose shares suffice.
        colluders: of noise by the clients, the members that may tell the coordinator theirs.
    """

    epsilon: float
    delta: float
    unit: Unit
    mechanism: Mechanism
    noise_multiplier: float
    clip_norm: float
    uses: int
    accountant: str
    noise_by: NoiseBy
    sampling_rate: float | None = None
    separation: int | None = None
    quantile: float | None = None
    honest_min: int = 0
    colluders: int = 0

    @property
    def sentence(self) -> str:
        """The whole guarantee."""
        return (
            f"epsilon {self.epsilon:.6g} at delta {self.delta:g} for one {self.unit}: {_ADJACENCY[self.unit]}; "
            f"{_MECHANISM[self.mechanism]} with noise multiplier {self.noise_multiplier:.6g} on contributions clipped "
            f"to {self._norm}; {self._uses}; {self._who_adds}; accountant: {self.accountant}. "
            f"Not covered: {'; '.join(_NOT_COVERED[self.unit])}."
        )

    @property
    def _norm(self) -> str:
        if self.quantile is None:
            return f"norm {self.clip_norm:g}"
        follows = (
            f"follows the quantile {self.quantile:g} of their lengths by a count with noise, which is charged, too"
        )
        return f"a norm that is {self.clip_norm:g} at first and {follows}"

    @property
    def _who_adds(self) -> str:
        """The party that adds the noise, and the adversary against which the clients' noise suffices."""
        who = _NOISE_BY[self.noise_by]
        if self.noise_by != "clients" or not self.honest_min:
            return who
        with_it = f" and {count_of(self.colluders, 'client')} that may work together with it" if self.colluders else ""
        members = count_of(self.honest_min + self.colluders, "member")
        return (
            f"{who}, so that it holds against the coordinator{with_it}: a sum has at least {members}, and the noise of "
            f"any {self.honest_min} of them suffices"
        )

    @property
    def _uses(self) -> str:
        if self.sampling_rate is not None:
            return (
                f"{count_of(self.uses, 'step')}, in each of which every example takes part with probability "
                f"{self.sampling_rate:.6g}, independently of all others"
            )
        apart = f", at least {count_of(self.separation, 'round')} apart" if self.separation is not None else ""
        return f"at most {count_of(self.uses, 'use')} of one {self.unit}{apart}, and no sampling is assumed"
