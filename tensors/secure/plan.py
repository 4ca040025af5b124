"""The encoding of a secure sum: what all members and the coordinator agree on, and what one member adds to it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.tensors.layout import Layout
from atoll.tensors.secure.masked_layout import (
    Exact,
    exact_of,
    floats_of,
    in_metric_order,
    integers_of,
    masked_layout,
    travels,
)
from atoll.tensors.secure.positions import starts_of
from atoll.tensors.secure.vector import (
    EXPONENT_MAX,
    EXPONENT_MIN,
    PRIVATE_EXPONENT,
    VALUE_BITS,
    clip_factor,
    ranges_of,
    rounded_clip,
    step_of,
    weight_of,
)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """The encoding of a session's sum, the same for all its members."""

    bits: int
    """Of a word of a float: 32 or 64."""
    clip_norm: float
    """C, the largest norm of an update [its units]."""
    exponents: tuple[int, ...]
    """e of each float tensor, in the order of `masked_layout.floats_of`: its range is C 2^e."""
    examples_max: float = 0
    """Examples with weight 1; 0: all updates have weight 1."""
    metrics: tuple[tuple[str, int], ...] = ()
    """Metrics of the training whose sums are added, each with their number, in order."""
    is_private: bool = False
    """Whether the sum has noise for differential privacy: values are rounded to the nearest, and nothing else that
    depends on data is added."""
    share: float = 0.0
    """Standard deviation of the noise that each member adds [steps]; 0: none."""
    grid: tuple[int, ...] = ()
    """For tests: the exponent of the step of each float tensor, in place of the ranges. No update is clipped or cut,
    and values are rounded to the nearest, so that the sum has the bits of the plain fold on this grid."""

    def __post_init__(self) -> None:
        """Check what another party has told.

        Raises:
            ValueError: a number is out of its range; the message lists all of them.
        """
        if faults := [*self._faults()]:
            raise Refused(*faults)

    def _faults(self) -> Iterator[str]:
        if self.bits not in VALUE_BITS:
            yield f"bits {self.bits} are not 32 or 64"
        if not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            yield f"clip_norm {self.clip_norm} is not a finite number above 0"
        if not (math.isfinite(self.examples_max) and self.examples_max >= 0):
            yield f"examples_max {self.examples_max} is not a finite number from 0 on"
        if wrong := [each for each in self.exponents if not EXPONENT_MIN <= each <= EXPONENT_MAX]:
            yield f"the exponent {wrong[0]} of a range is not in {EXPONENT_MIN}..{EXPONENT_MAX}"
        if not (math.isfinite(self.share) and (self.share == 0.0 or (self.is_private and self.share > 0.0))):
            yield f"a share of noise is a finite number of steps above 0, in a private sum, not {self.share}"
        if self.is_private and (self.metrics or self.examples_max or any(self.exponents)):
            yield "a private sum has metrics, weights by examples or ranges that follow from data"
        try:
            if self.metrics != in_metric_order(self.metrics):
                yield "the metrics are not in the order of their names"
        except ValueError as fault:
            yield str(fault)

    @property
    def ranges(self) -> tuple[float, ...]:
        """The range of each float tensor."""
        if self.grid:
            return tuple(math.ldexp((1 << VALUE_BITS[self.bits] - 1) - 1, exponent) for exponent in self.grid)
        if self.is_private:
            return ranges_of(self.clip_norm, (PRIVATE_EXPONENT[self.bits],) * len(self.exponents))
        return ranges_of(self.clip_norm, self.exponents)

    @property
    def rounds_at_random(self) -> bool:
        """Whether values are rounded up or down at random, and not to the nearest."""
        return not (self.grid or self.is_private)

    @property
    def most(self) -> int | None:
        """The largest magnitude of a word, if it is not that of the ranges."""
        return 1 << 52 if self.grid else None

    def factor(self, weight: int, norm: float, num_values: int) -> float:
        """Return the factor of an update's floats: a C / max(norm, C), with a little less than C in a private sum.

        Args:
            weight: a [2^-52].
            norm: of the update.
            num_values: of its floats.

        Raises:
            ValueError: the norm is not finite, or the values are too fine for the grid of a private sum.
        """
        if self.grid:
            return math.ldexp(weight, -52)
        most = self.clip_norm
        if self.is_private:
            step = step_of(self.bits, math.ldexp(most, PRIVATE_EXPONENT[self.bits]))
            most = rounded_clip(most, step, num_values)
        return math.ldexp(weight, -52) * clip_factor(norm, most)

    def plan(self, num_examples: float, statistics: Mapping[str, Sequence[float]]) -> "EncodingPlan":
        """Return the encoding of one member's update; arguments as of `EncodingPlan`."""
        of_all = {each.name: getattr(self, each.name) for each in fields(Encoding)}
        return EncodingPlan(**of_all, num_examples=num_examples, statistics=statistics)


@dataclass(frozen=True, kw_only=True)
class EncodingPlan(Encoding):
    """The encoding of one member's update."""

    num_examples: float
    """n_k > 0."""
    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Sums of the metrics of its training."""

    @property
    def weight(self) -> int:
        """The weight a [2^-52]."""
        return weight_of(self.num_examples, self.examples_max)


@dataclass(frozen=True)
class Vector:
    """The vector of a secure sum: its tensors, their places and their ranges.

    Raises:
        ValueError: a tensor beside the model, another number of exponents than of float tensors, or whole numbers in a
            private sum.
    """

    layout: Layout
    """The base version's tensors that travel."""
    encoding: Encoding

    def __post_init__(self) -> None:
        travels(self.layout)
        wanted = len(self.encoding.grid or self.encoding.exponents)
        if wanted != (count := len(floats_of(self.layout))):
            raise ValueError(f"{wanted} ranges for {count_of(count, 'float tensor')}")
        if self.encoding.is_private and (integers := integers_of(self.layout)):
            raise ValueError(f"{integers[0].name}: whole numbers in a private sum, to which no noise is added")

    @cached_property
    def masked(self) -> Layout:
        """The tensors of a masked update, in the order of their positions."""
        return masked_layout(self.layout, self.encoding.bits, self.encoding.metrics)

    @cached_property
    def floats(self) -> Layout:
        """The float tensors of the model, in order."""
        return floats_of(self.layout)

    @cached_property
    def num_values(self) -> int:
        """Number of all floats."""
        return sum(tensor.num_elements for tensor in self.floats)

    @cached_property
    def ranges(self) -> Mapping[str, float]:
        """The range of each float tensor, by name."""
        return dict(zip((tensor.name for tensor in self.floats), self.encoding.ranges, strict=True))

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The position of each tensor of a masked update."""
        return starts_of(self.masked)

    @cached_property
    def exact(self) -> Exact:
        """The places of the words that are added exactly."""
        return exact_of(self.layout, self.encoding.metrics)
