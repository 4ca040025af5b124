"""What a fold needs to know of a round besides the updates' bytes: weights, factors, totals. Pure.

It is computed once, where the journal is, from the accepted set alone; whoever folds (this process or aggregation
ranks) is told, and decides nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.aggregation.fold.means import Total, totals_of
from atoll.aggregation.tensors.layout import CONTROL, FLOATS, Layout
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.folding.method import Method
from atoll.server.journal.codec import decode, encode
from atoll.server.rounds.events import Aggregate


class Known(Protocol):
    """What is known of an accepted update besides its bytes; `codec.StoredUpdateMeta` has it."""

    @property
    def magnitudes(self) -> Mapping[str, float | int]:
        """Largest |element| of each tensor that it carries."""

    @property
    def squared_norms(self) -> Mapping[str, float]:
        """Sum of the squared elements of each tensor."""

    @property
    def steps(self) -> tuple[float, float]:
        """FedNova's normalizer and effective steps, as the client claims them."""

    @property
    def rank(self) -> int:
        """Of the aggregation, at which its bytes lie."""


@dataclass(frozen=True, slots=True)
class Planned:
    """How one update takes part: see `means.Weighted`."""

    digest: Digest
    rank: int
    """Where its bytes lie; 0 when the coordinator has them itself."""
    weight: int
    factor: float
    trained_factor: float


@dataclass(frozen=True, slots=True)
class PlannedAnchor:
    """See `step.Anchor`."""

    version: Version
    digest: Digest
    share: float


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """One fold, the same for all who take part in it."""

    base_version: Version
    base_digest: Digest
    updates: tuple[Planned, ...]
    """In the order of their client ids."""
    totals: Mapping[str, Total]
    omitted: Mapping[str, tuple[int, ...]]
    """Of tensors that some updates leave out: their places in `updates`."""
    scale: float
    """`step.Step.scale`."""
    anchor: "PlannedAnchor | None"
    """The version that FedAsync's client trained from, when it is not the base itself."""
    buffers: tuple[str, ...]
    """Float tensors of the model that no optimizer trains."""
    aggregation: AggregationConfig
    optimizer: OptimizerConfig

    def encode(self) -> bytes:
        """As it travels to a rank."""
        return encode(self).encode()

    def trained(self, layout: Layout) -> frozenset[str]:
        """What the optimizer moves of the model's tensors."""
        return trained_of(layout, self.buffers)

    @classmethod
    def decode(cls, data: bytes) -> "FoldPlan":
        """What `encode` wrote; StoreCorrupted when it is something else."""
        return decode(cls, data.decode(), where="the plan of a fold")


def plan_of(
    effect: Aggregate,
    base: VersionManifest,
    metas: Mapping[Digest, Known],
    *,
    method: Method,
    digest_of_version: Callable[[Version], Digest],
    buffers: frozenset[str],
    settings: tuple[AggregationConfig, OptimizerConfig],
) -> FoldPlan:
    """Plan the fold of a round.

    Args:
        effect: what is folded.
        base: the version that the updates are added to.
        metas: what is known of each contribution.
        method: the run's, built from `settings`.
        digest_of_version: the identity of the base, or of an older version.
        buffers: see `FoldPlan`.
        settings: of the run.
    """
    of_updates = [metas[contribution.digest] for contribution in effect.contributions]
    bounds = method.factors([_float_norm(meta, base.layout) for meta in of_updates])
    weights, factors = weights_and_factors(effect, method, bounds)
    nova = method.normalized(weights, (meta.steps for meta in of_updates))
    planned = tuple(
        Planned(contribution.digest, meta.rank, weight, factor, trained_factor)
        for contribution, meta, weight, factor, trained_factor in zip(
            effect.contributions, of_updates, weights, factors, nova.factors, strict=True
        )
    )
    return FoldPlan(
        base_version=effect.base_version,
        base_digest=digest_of_version(effect.base_version),
        updates=planned,
        totals=totals_of(
            base.layout,
            ((item, meta.magnitudes) for item, meta in zip(planned, of_updates, strict=True)),
            trained_of(base.layout, buffers),
        ),
        omitted=_omitted(base.layout, of_updates),
        scale=nova.scale,
        anchor=_anchor(effect, digest_of_version),
        buffers=tuple(sorted(buffers)),
        aggregation=settings[0],
        optimizer=settings[1],
    )


def weights_and_factors(
    effect: Aggregate, method: Method, factors: Sequence[float]
) -> tuple[Sequence[int], Sequence[float]]:
    """What the fold is told of each contribution besides its bytes.

    With mean = sum_k w_k f_k u_k / sum_k w_k: the discount s_k is in w_k = n_k s_k, in numerator and denominator; of an
    asynchronous run w_k = 1 and it is in f_k, so that the divisor is the number of updates K, not the sum of the s_k.

    Args:
        effect: what is to be aggregated.
        method: the run's.
        factors: of the norm bound, one for each contribution.
    """
    contributions = effect.contributions
    if effect.mode == "sync":
        return method.weights(contributions), factors
    return [1] * len(contributions), [f * c.scale for f, c in zip(factors, contributions, strict=True)]


def _anchor(effect: Aggregate, digest_of_version: Callable[[Version], Digest]) -> PlannedAnchor | None:
    if effect.mode != "fedasync":
        return None
    [only] = effect.contributions
    if only.base_version == effect.base_version:
        return None
    assert only.base_version is not None
    return PlannedAnchor(only.base_version, digest_of_version(only.base_version), only.scale)


def trained_of(layout: Layout, buffers: Iterable[str]) -> frozenset[str]:
    """Names of what the optimizer moves: all but buffers and control variates; integers do not matter."""
    return frozenset(tensor.name for tensor in layout if not tensor.name.startswith(CONTROL)).difference(buffers)


def _omitted(layout: Layout, metas: Sequence[Known]) -> dict[str, tuple[int, ...]]:
    left_out = {
        tensor.name: tuple(place for place, meta in enumerate(metas) if tensor.name not in meta.magnitudes)
        for tensor in layout
    }
    return {name: places for name, places in left_out.items() if places}


def _float_norm(meta: Known, layout: Layout) -> float:
    """Euclidean length of an update's float tensors."""
    floats = {tensor.name for tensor in layout if tensor.dtype in FLOATS}
    return math.sqrt(math.fsum(square for name, square in meta.squared_norms.items() if name in floats))
