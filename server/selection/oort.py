"""The Oort sampler: it prefers clients of high utility and short round time, and explores new ones. Pure.

    U_i      = |B_i| sqrt(mean of squared losses)        utility of client i's newest update (`oort_utility`)
    score_i  = (U'_i + sqrt(0.1 ln R / L_i)) (T / t_i)^(alpha [t_i > T])

Legend: U', U clipped at its 95 % quantile and scaled to [0, 1]; R, this round; L_i, the newest round with an update of
the client; t_i, its measured seconds for a round; T, the quantile `patience` of all t_i; alpha, the penalty.

Of `count` places, the share max(exploration_min, exploration * decay^(R - 1)) goes to clients without a loss. The
others are drawn in proportion to their score, from the clients whose score is at least 0.95 of the last place's.

Three choices are ours, because a coordinator knows less than a simulator. An update carries the sum of its losses and
not of their squares: unless the task has a metric `loss_squared`, the mean loss stands for the root mean square. The
two rank clients the same if their losses vary equally. The speed of a new client is unknown: new clients are drawn
uniformly, and each invitation without an update halves a client's chances. A client whose updates were all late has no
measured time, and counts as the slowest.

Source:
    Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, sections 4.2 to 4.4,
    Algorithm 1; the normalization and T as a quantile follow the authors' code.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.members.member import Candidate
from atoll.server.selection.weighted_draws import in_proportion

CLIP = 0.95
"""Quantile at which utilities are clipped, so that a client with a huge claimed loss is not always chosen."""

CUT_OFF = 0.95
"""Least score that takes part in the draw, as a fraction of the last place's score."""

IN_VAIN_MAX = 60
"""Number of invitations without an update after which a client's chances no longer fall."""

_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Oort:
    """Oort sampler; the defaults are the paper's."""

    exploration: float = 0.9
    exploration_decay: float = 0.98
    exploration_min: float = 0.2
    penalty: float = 2.0
    patience: float = 0.3
    patience_step: float = 0.05

    def at(
        self, round_id: RoundId, relaxed: int
    ) -> Callable[[Sequence[Candidate], int, random.Random], list[ClientId]]:
        """Return the sampler of a round; `relaxed` is the number of times that the pacer has raised the patience."""
        return partial(self._draw, round_id, min(1.0, self.patience + self.patience_step * relaxed))

    def _draw(
        self, round_id: RoundId, patience: float, candidates: Sequence[Candidate], count: int, rng: random.Random
    ) -> list[ClientId]:
        known = [candidate for candidate in candidates if candidate.loss is not None]
        new = [candidate for candidate in candidates if candidate.loss is None]
        chances = [0.5 ** min(candidate.times_chosen, IN_VAIN_MAX) for candidate in new]
        share = max(self.exploration_min, self.exploration * self.exploration_decay ** (round_id - 1))
        explored = min(round(count * share), math.ceil(math.fsum(chances)))
        exploited = min(count - explored, len(known))
        best = self._best(known, exploited, round_id, patience, rng) if exploited else []
        drawn = best + in_proportion(count - exploited, chances, new, rng)
        return [candidate.client_id for candidate in drawn]

    def _best(
        self, known: Sequence[Candidate], count: int, round_id: RoundId, patience: float, rng: random.Random
    ) -> list[Candidate]:
        scores = self.scores(known, round_id, patience)
        cut_off = CUT_OFF * sorted(scores, reverse=True)[count - 1]
        near = [(score, candidate) for score, candidate in zip(scores, known, strict=True) if score >= cut_off]
        weights = [max(score, _LEAST) for score, _ in near]
        return in_proportion(count, weights, [candidate for _, candidate in near], rng)

    def scores(self, known: Sequence[Candidate], round_id: RoundId, patience: float) -> list[float]:
        """Return the scores of clients that have a loss.

        T is the quantile `patience` in (0, 1] of their times; at 1 there is no T, and no client counts as slow.
        """
        gains = normalized([candidate.utility for candidate in known])
        measured = [candidate.seconds for candidate in known if candidate.seconds is not None]
        slowest = max(measured, default=0.0)
        enough = quantile(measured, patience) if patience < 1 and measured else math.inf
        return [
            (gain + temporal_uncertainty(round_id, candidate.last_round))
            * slowness(slowest if candidate.seconds is None else candidate.seconds, enough, self.penalty)
            for gain, candidate in zip(gains, known, strict=True)
        ]


def slowness(seconds: float, enough: float, penalty: float) -> float:
    """Return the factor (T / t)^alpha of a client that takes longer than T, otherwise 1."""
    return (enough / seconds) ** penalty if seconds > enough else 1.0


def temporal_uncertainty(round_id: int, last_round: int) -> float:
    """Return sqrt(0.1 ln R / L): the utility of an old update says little about the client now."""
    return math.sqrt(0.1 * math.log(max(1, round_id)) / max(1, last_round))


def normalized(utilities: Sequence[float]) -> list[float]:
    """Return utilities clipped at the quantile `CLIP` and scaled to [0, 1]; 1 for each when all are equal."""
    least, most = min(utilities), quantile(utilities, CLIP)
    if most <= least:
        return [1.0] * len(utilities)
    return [(min(utility, most) - least) / (most - least) for utility in utilities]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at the position `share` in [0, 1) of the sorted values."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
