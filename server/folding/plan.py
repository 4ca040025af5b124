"""The plan of a fold: the weights, factors and totals of a round's updates, everything except their bytes. Pure.

The coordinator computes the plan once, from the accepted set alone. The folding process (the coordinator or an
aggregation rank) only executes it and decides nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atoll.aggregation.fold.means import Total, totals_of
from atoll.aggregation.noise.private_sum import PrivateSums, clip_to, deviation_of, exponent_of
from atoll.aggregation.rules.coordinate import clip_factors
from atoll.ground.noise.key import key_of
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.folding.method import Method
from atoll.server.journal.codec import decode, encode
from atoll.server.rounds.events import Aggregate, NoiseRow, set_digest
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.tensors.layout import BESIDE, FLOATS, Layout
from atoll.tensors.noise.discrete_gaussian import DiscreteGaussian
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.plan import Encoding
from atoll.tensors.secure.vector import share_of_noise


class Known(Protocol):
    """Metadata of an accepted update that a plan needs; `codec.StoredUpdateMeta` implements it."""

    @property
    def magnitudes(self) -> Mapping[str, float | int]:
        """The largest |element| of each tensor in the update."""

    @property
    def squared_norms(self) -> Mapping[str, float]:
        """The sum of the squared elements of each tensor."""

    @property
    def steps(self) -> tuple[float, float]:
        """FedNova's normalizer and effective steps, as the client claims them."""

    @property
    def rank(self) -> int:
        """The aggregation rank that has the update's bytes."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each part, if the parts are at several ranks."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Contribution of one update in the fold: see `means.Weighted`."""

    digest: Digest
    rank: int
    """Rank that has the update's bytes; also 0 if there are no ranks."""
    weight: int
    factor: float
    trained_factor: float
    ranks: tuple[int, ...] = ()
    """All ranks that have parts of the update, ascending; empty: only `rank` has it."""

    def lies_at(self, rank: int) -> bool:
        """Return whether the rank has bytes of the update."""
        return rank in (self.ranks or (self.rank,))


@dataclass(frozen=True, slots=True)
class PlannedAnchor:
    """Anchor of FedAsync's step, the version that its client trained from: see `step.Anchor`."""

    version: Version
    digest: Digest
    share: float


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """Session of which the sum is opened."""

    number: int
    updates: tuple[int, ...]
    """Places of its members' updates in `FoldPlan.updates`."""
    streams: tuple[tuple[str, int], ...] = field(repr=False)
    """Keys, in hexadecimal digits, and signs of the streams that are taken off the sum: secrets, in memory alone."""


@dataclass(frozen=True, slots=True)
class PlannedSums:
    """Secure sums of a round, and their encoding."""

    bits: int
    clip_norm: float
    exponents: tuple[int, ...]
    examples_max: int
    metrics: tuple[tuple[str, int], ...]
    sessions: tuple[PlannedSession, ...]
    is_private: bool = False
    share: float = 0.0
    """Standard deviation of the noise that each member has added [steps]."""
    noise: "PlannedNoise | None" = None
    """Of private sums: their divisor, and the noise to add, in steps; a deviation of 0: the members have added it."""

    @property
    def encoding(self) -> Encoding:
        """The encoding of all sessions."""
        return Encoding(
            bits=self.bits,
            clip_norm=self.clip_norm,
            exponents=self.exponents,
            examples_max=self.examples_max,
            metrics=self.metrics,
            is_private=self.is_private,
            share=self.share,
        )

    @property
    def private(self) -> PrivateSums | None:
        """What makes the sums private; None: they are not."""
        if (noise := self.noise) is None:
            return None
        return PrivateSums(
            noise.divisor, GridNoise(noise.deviation, bytes.fromhex(noise.key)) if noise.deviation else None
        )


COUNT_BITS = 10
"""Binary digits after the point of a count with noise."""


@dataclass(frozen=True, slots=True)
class PlannedNoise:
    """Noise of a private sum: see `private_sum.PrivateSum`."""

    deviation: float
    divisor: int
    key: str = field(repr=False)
    """In hexadecimal digits: a secret."""
    earlier: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    """Of correlated noise: keys of earlier noises that are added, each with its factor."""


@dataclass(frozen=True, slots=True)
class Private:
    """What a plan of a private sum needs of a run.

    Attributes:
        rules: of its privacy.
        cohort_size: the number by which its sums are divided.
        noise: key of the run's noise.
    """

    rules: PrivacyRules
    cohort_size: int
    noise: bytes = field(repr=False)

    def clip_factors(self, norms: Sequence[float], layout: Layout, clip_norm: float = 0.0) -> Sequence[float]:
        """Return the factor of each update that keeps it within the clip norm, after it is rounded to the grid.

        Args:
            norms: of the updates.
            layout: of the model.
            clip_norm: of the round; 0: the one of the settings.
        """
        values = sum(tensor.num_elements for tensor in layout if tensor.dtype in FLOATS)
        clip_norm = clip_norm or self.rules.clip_norm
        return clip_factors(norms, clip_to(clip_norm, exponent_of(self._deviation(layout, clip_norm)), values))

    def planned(self, effect: Aggregate, base: Digest, layout: Layout) -> PlannedNoise:
        """Return the noise of a set of updates: the same when its fold is repeated, another one for another set."""
        mechanism = "correlated" if self.rules.earlier else "gaussian"
        deviation = self._deviation(layout, effect.clip_norm or self.rules.clip_norm)
        earlier = tuple(
            (self._key_of(row, mechanism).hex(), factor)
            for row, factor in zip(effect.earlier, self.rules.earlier, strict=False)  # the first versions have fewer
        )
        return PlannedNoise(deviation, self.cohort_size, self._key_of_set(effect, base, mechanism).hex(), earlier)

    def _deviation(self, layout: Layout, clip_norm: float) -> float:
        values = sum(tensor.num_elements for tensor in layout if tensor.dtype in FLOATS)
        return deviation_of(
            self.rules.sum_multiplier * clip_norm, self.rules.noise_multiplier, values, self.rules.rounding
        )

    def next_clip_norm(self, effect: Aggregate, base: Digest, norms: Sequence[float]) -> float:
        """Return the clip norm of the round after a set of updates, by a count with noise; 0: it is fixed.

        The noise is the same when the fold is repeated, and another one for another set.
        """
        adaptive = self.rules.adaptive
        if adaptive is None:
            return 0.0
        clip_norm = effect.clip_norm or self.rules.clip_norm
        halves = sum(1 if norm <= clip_norm else -1 for norm in norms)
        deviation = math.ldexp(adaptive.sigma, COUNT_BITS)
        (noise,) = DiscreteGaussian(deviation).sample(self._key_of_set(effect, base, "count"), 1).tolist()
        return adaptive.next_norm(clip_norm, math.ldexp((halves << (COUNT_BITS - 1)) + noise, -COUNT_BITS))

    def planned_of_sums(self, effect: Aggregate, base: Digest, bits: int) -> PlannedNoise:
        """Return the noise to add to opened sums, in steps; none if their members have added it."""
        if self.rules.noise_by == "clients":
            return PlannedNoise(0.0, self.cohort_size, "")
        deviation = share_of_noise(bits, self.rules.noise_multiplier, 1)
        return PlannedNoise(deviation, self.cohort_size, self._key_of_set(effect, base).hex())

    def _key_of_set(self, effect: Aggregate, base: Digest, mechanism: str = "gaussian") -> bytes:
        of_set = set_digest(contribution.digest for contribution in effect.contributions)
        return self._key_of(NoiseRow(effect.round_id, base, of_set), mechanism)

    def _key_of(self, row: NoiseRow, mechanism: str) -> bytes:
        return key_of(self.noise, "private sum", row.round_id, row.base, row.updates, mechanism)


@dataclass(frozen=True, slots=True)
class FoldPlan:
    """Plan of one fold, the same for all ranks. One of secure or private sums is secret: never logged, nor written."""

    base_version: Version
    base_digest: Digest
    updates: tuple[Planned, ...]
    """The updates, sorted by client id."""
    totals: Mapping[str, Total]
    """Totals of each tensor, which determine the grid of its sum."""
    omitted: Mapping[str, tuple[int, ...]]
    """Tensors that some updates omit, each with the indices of these updates in `updates`."""
    scale: float
    """Factor of the mean: see `step.Step.scale`."""
    anchor: "PlannedAnchor | None"
    """Version that FedAsync's client trained from, if it is not the base."""
    buffers: tuple[str, ...]
    """Float tensors of the model that no optimizer trains."""
    aggregation: AggregationConfig
    optimizer: OptimizerConfig
    round_id: int = 0
    """Round whose updates are folded, for a custom rule."""
    sums: PlannedSums | None = None
    """Secure sums; None: the updates are plain."""
    noise: PlannedNoise | None = None
    """Noise of the sum; None: it is not private."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each update in the exact mean: scale w_k f_k / sum w, f_k the factor of FedNova."""
        factors = [each.trained_factor for each in self.updates]
        return shares_of([each.weight for each in self.updates], factors, self.scale)

    def encode(self) -> bytes:
        """Encode the plan as it is sent to a rank."""
        return encode(self).encode()

    def trained(self, layout: Layout) -> frozenset[str]:
        """Return the names of the model's tensors that the optimizer updates."""
        return trained_of(layout, self.buffers)

    @classmethod
    def decode(cls, data: bytes) -> "FoldPlan":
        """Decode a plan from `encode`.

        Raises:
            StoreCorrupted: the bytes are not a plan.
        """
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
    private: Private | None = None,
) -> FoldPlan:
    """Plan the fold of a round.

    Args:
        effect: the contributions to fold.
        base: the manifest of the version that the updates are added to.
        metas: the metadata of each contribution.
        method: the method of the run, built from `settings`.
        digest_of_version: the digest of the base or of an older version.
        buffers: the float tensors that no optimizer trains.
        settings: the settings of the run.
        private: of a run with differential privacy; None: no noise is added.
    """
    of_updates = [metas[contribution.digest] for contribution in effect.contributions]
    norms = [_float_norm(meta, base.layout) for meta in of_updates]
    bounds = method.factors(norms) if private is None else private.clip_factors(norms, base.layout, effect.clip_norm)
    base_digest = digest_of_version(effect.base_version)
    weights, factors = weights_and_factors(effect, method, bounds)
    nova = method.normalized(weights, (meta.steps for meta in of_updates))
    planned = tuple(
        Planned(contribution.digest, meta.rank, weight, factor, trained_factor, tuple(sorted(set(meta.ranks))))
        for contribution, meta, weight, factor, trained_factor in zip(
            effect.contributions, of_updates, weights, factors, nova.factors, strict=True
        )
    )
    return FoldPlan(
        base_version=effect.base_version,
        base_digest=base_digest,
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
        round_id=effect.round_id,
        noise=None if private is None else private.planned(effect, base_digest, base.layout),
    )


def next_clip_norm(
    effect: Aggregate, base: VersionManifest, base_digest: Digest, metas: Mapping[Digest, Known], private: Private
) -> float:
    """Return the clip norm of the round after this one; 0: it is fixed. Arguments as of `plan_of`."""
    norms = [_float_norm(metas[contribution.digest], base.layout) for contribution in effect.contributions]
    return private.next_clip_norm(effect, base_digest, norms)


def weights_and_factors(
    effect: Aggregate, method: Method, factors: Sequence[float]
) -> tuple[Sequence[int], Sequence[float]]:
    """Return the weight w_k and the factor f_k of each contribution.

        mean = sum_k w_k f_k u_k / sum_k w_k

    In a synchronous run the discount s_k is part of w_k = n_k s_k, so of numerator and denominator. In an asynchronous
    run w_k = 1 and the discount is part of f_k, so that the divisor is the number of updates K and not the sum of the
    s_k.

    Args:
        effect: the contributions to fold.
        method: the method of the run.
        factors: the factors of the norm bound, one for each contribution.
    """
    contributions = effect.contributions
    if effect.mode == "sync":
        return method.weights(contributions), factors
    return [1] * len(contributions), [f * c.scale for f, c in zip(factors, contributions, strict=True)]


def shares_of(weights: Sequence[int], trained_factors: Sequence[float], scale: float) -> tuple[float, ...]:
    """Return p_k of mean = sum_k p_k u_k, over the trained floats of updates u_k within their norm bounds."""
    total = sum(weights)
    return tuple(scale * (weight / total) * factor for weight, factor in zip(weights, trained_factors, strict=True))


def _anchor(effect: Aggregate, digest_of_version: Callable[[Version], Digest]) -> PlannedAnchor | None:
    if effect.mode != "fedasync":
        return None
    [only] = effect.contributions
    if only.base_version == effect.base_version:
        return None
    assert only.base_version is not None
    return PlannedAnchor(only.base_version, digest_of_version(only.base_version), only.scale)


def trained_of(layout: Layout, buffers: Iterable[str]) -> frozenset[str]:
    """Return the names of the tensors that the optimizer updates: all except buffers and tensors beside the model.

    Integer tensors are included, without effect.
    """
    return frozenset(tensor.name for tensor in layout if not tensor.name.startswith(BESIDE)).difference(buffers)


def _omitted(layout: Layout, metas: Sequence[Known]) -> dict[str, tuple[int, ...]]:
    left_out = {
        tensor.name: tuple(place for place, meta in enumerate(metas) if tensor.name not in meta.magnitudes)
        for tensor in layout
    }
    return {name: places for name, places in left_out.items() if places}


def _float_norm(meta: Known, layout: Layout) -> float:
    """Return the Euclidean norm of an update's float tensors."""
    floats = {tensor.name for tensor in layout if tensor.dtype in FLOATS}
    return math.sqrt(math.fsum(square for name, square in meta.squared_norms.items() if name in floats))
