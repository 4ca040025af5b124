"""The declarative straggler policy of a run: DESIGN section 4, every field of its table. Pure.

The string under a field is its documentation; `docs/configuration.md` is held against these strings by a test.
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Seconds = Annotated[float, Field(gt=0, le=366 * 86400, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]


class StragglerPolicy(BaseModel):
    """What a round waits for, for how long, and what happens to those who are late."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)

    cohort_size: int = Field(default=2, ge=1, le=1_000_000)
    """How many updates a round wants from its own cohort; it closes when they are in."""

    over_selection: float = Field(default=1.0, ge=1.0, le=10.0)
    """`ceil(cohort_size * over_selection)` clients are invited (1.3 in Bonawitz et al. 2019, section 9)."""

    quorum: int | float = 1.0
    """Fewest accepted updates that may commit a round: a count (integer >= 1), or a fraction of `cohort_size` (a
    number with a decimal point in (0, 1]). A late update carried in from an earlier round counts; one client counts
    once."""

    deadline: Seconds | Literal["adaptive"] = 600.0
    """Seconds from the invitation to the end of collecting; or "adaptive": `adaptive_margin` times the time that the
    slowest client that is needed is expected to take, from its measured download, training and upload times."""

    adaptive_margin: float = Field(default=1.5, ge=1.0, le=100.0)
    """Factor between the expected time and an adaptive deadline."""

    deadline_min: Seconds = 5.0
    """An adaptive deadline is never shorter [s]."""

    deadline_max: Seconds = 3600.0
    """An adaptive deadline is never longer [s]; it is also what holds while nothing has been measured."""

    linger: SecondsOrNone | None = None
    """Seconds to wait for more once the round's own cohort has made the quorum; absent: until `cohort_size` updates are
    in, or the deadline."""

    grace: SecondsOrNone = 0.0
    """Seconds after the deadline for uploads that were begun before it."""

    late: Literal["discard", "next_round"] = "discard"
    """What happens to an update that arrives after its round has closed: refused, or counted in the next round that
    commits, with its weight discounted by its staleness. "next_round" also carries over the accepted updates of an
    abandoned round, but not of one whose aggregation failed."""

    max_staleness: int = Field(default=1, ge=0, le=1000)
    """With late = "next_round": an update may be at most this many model versions old in the commit that uses it."""

    staleness_exponent: float = Field(default=0.5, ge=0.0, le=10.0)
    """The discount of a late update is `(1 + staleness) ** -staleness_exponent`, in numerator and denominator
    (the polynomial rule of Xie et al. 2019)."""

    partial_work: Literal["refuse", "accept", "scaled"] = "accept"
    """An update whose client stopped before it had done all requested steps: refused; accepted with weight
    `num_examples`; or accepted with weight `num_examples * work`."""

    retry: int = Field(default=3, ge=0, le=1_000_000)
    """Rounds in a row that may be abandoned and tried again with a new cohort; one more, and the run stops as
    failed."""

    outage_max: SecondsOrNone = 3600.0
    """An open round is extended by the time that the coordinator was down, up to this many seconds in all."""

    min_available: int = Field(default=0, ge=0, le=1_000_000)
    """Clients that must be connected before a cohort is drawn; 0: as many as are invited."""

    selection_timeout: Seconds = 300.0
    """Seconds to wait for `min_available` clients. Then the round is drawn from those who are there if they can make
    the quorum, and abandoned otherwise."""

    max_examples: int = Field(default=1_000_000_000, ge=1, le=2**40)
    """An update that claims more examples than this is refused."""

    @field_validator("quorum")
    @classmethod
    def _quorum_is_count_or_fraction(cls, quorum: int | float) -> int | float:
        if isinstance(quorum, float) and not (0 < quorum <= 1):
            raise ValueError("a fraction must be in (0, 1]; write a count as an integer")
        if isinstance(quorum, int) and quorum < 1:
            raise ValueError("a count must be at least 1")
        return quorum

    @model_validator(mode="after")
    def _consistent(self) -> "StragglerPolicy":
        faults = []
        if self.quorum_count > self.cohort_size:
            faults.append(f"quorum {self.quorum} is more than cohort_size ({self.cohort_size})")
        if self.deadline_min > self.deadline_max:
            faults.append(f"deadline_min {self.deadline_min} is more than deadline_max ({self.deadline_max})")
        if self.min_available and self.min_available < self.quorum_count:
            faults.append(f"min_available {self.min_available} is less than the quorum ({self.quorum_count})")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def num_invited(self) -> int:
        """`ceil(cohort_size * over_selection)`; exact for factors such as 1.1 that binary floats overshoot."""
        return math.ceil(round(self.cohort_size * self.over_selection, 9))

    @property
    def quorum_count(self) -> int:
        """The quorum as a number of updates."""
        if isinstance(self.quorum, int):
            return self.quorum
        return max(1, math.ceil(round(self.quorum * self.cohort_size, 9)))

    @property
    def num_needed_to_draw(self) -> int:
        """Available clients at which a cohort is drawn without waiting."""
        return self.min_available or self.num_invited
