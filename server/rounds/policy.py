"""The declarative policy of a run's rounds: DESIGN section 4, every field of its table; the asynchronous modes. Pure.

The string under a field is its documentation; `docs/configuration.md` is held against these strings by a test.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atoll.aggregation.fold.weights import hinge_discount, staleness_discount

Seconds = Annotated[float, Field(gt=0, le=366 * 86400, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]

Mode = Literal["sync", "fedbuff", "fedasync"]

MODES_OF: Mapping[str, tuple[Mode, ...]] = {
    **dict.fromkeys(
        ("cohort_size", "over_selection", "linger", "grace", "late", "min_available", "selection_timeout"), ("sync",)
    ),
    **dict.fromkeys(("concurrency", "fill_timeout"), ("fedbuff", "fedasync")),
    "buffer_size": ("fedbuff",),
    "alpha": ("fedasync",),
}
"""The fields that only some modes have; the others are of all."""

DISCOUNT_OF = {"staleness_exponent": "polynomial", "hinge_slope": "hinge", "hinge_delay": "hinge"}
"""The fields that only one discount has."""

STALENESS_MAX_ASYNC = 20


class StragglerPolicy(BaseModel):
    """What a round waits for, for how long, and what happens to those who are late."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)

    cohort_size: int = Field(default=2, ge=1, le=1_000_000)
    """How many updates a round wants from its own cohort; it closes when they are in."""

    over_selection: float = Field(default=1.0, ge=1.0, le=10.0)
    """`ceil(cohort_size * over_selection)` clients are invited (1.3 in Bonawitz et al. 2019, section 9)."""

    quorum: int | float = 1.0
    """Fewest accepted updates that may commit a round: a count (integer >= 1), or a fraction of `cohort_size`, in the
    asynchronous modes of `buffer_size` (a number with a decimal point in (0, 1]). A late update carried in from an
    earlier round counts; one client counts once."""

    deadline: Seconds | Literal["adaptive"] = 600.0
    """Seconds from the invitation to the end of collecting; or "adaptive": `adaptive_margin` times the time that the
    slowest client that is needed is expected to take, from its measured download, training and upload times. In the
    asynchronous modes each invitation has its own; a client that is late is told to stop and hand in what it has."""

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
    """With late = "next_round", and in the asynchronous modes: an update may be at most this many model versions old in
    the commit that uses it; so many versions stay on disk. Absent: 1, in an asynchronous mode 20."""

    staleness: Literal["polynomial", "constant", "hinge"] = "polynomial"
    """How an update that is t versions old is discounted (Xie et al. 2019): by `(1 + t) ** -staleness_exponent`; not at
    all; or not up to `hinge_delay`, then by `1 / (1 + hinge_slope * (t - hinge_delay))`. With late = "next_round" the
    discount is in numerator and denominator, in the asynchronous modes in the numerator alone."""

    staleness_exponent: float = Field(default=0.5, ge=0.0, le=10.0)
    """Of the polynomial discount."""

    hinge_slope: float = Field(default=10.0, gt=0.0, le=1e6)
    """Of the hinge discount."""

    hinge_delay: int = Field(default=4, ge=0, le=1000)
    """Of the hinge discount, in versions."""

    mode: Mode = "sync"
    """"sync": round by round, with a cohort each. "fedbuff" (Nguyen et al. 2022): clients train all the time, each from
    the version that was newest when it was invited, and every `buffer_size` accepted updates make the next version.
    "fedasync" (Xie et al. 2019): so does every single one."""

    buffer_size: int = Field(default=10, ge=1, le=1_000_000)
    """Of "fedbuff": how many accepted updates make a version: the sum of the discounted updates over their number,
    whatever the size of the clients' data."""

    alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    """Of "fedasync": the share of the client's model in the next version, before the discount."""

    concurrency: int = Field(default=10, ge=1, le=1_000_000)
    """Of the asynchronous modes: how many clients train at once. When one's update is in, or it failed, was lost or ran
    out of its time, another is invited, with the newest version; each at most once for one version."""

    fill_timeout: Seconds = 3600.0
    """Of the asynchronous modes: seconds that a buffer may take to fill. Then what is in becomes a version if it makes
    the quorum; if it does not, nobody else is invited, and the buffer ends as soon as it does, or with the last client
    that trains: abandoned, and what is in waits for the next."""

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

    @model_validator(mode="before")
    @classmethod
    def _older_updates_where_nobody_waits(cls, fields: Any) -> Any:
        """What is left out has the mode's own default."""
        if isinstance(fields, dict) and fields.get("mode") in ("fedbuff", "fedasync"):
            return {"max_staleness": STALENESS_MAX_ASYNC, **fields}
        return fields

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
        faults = [*self._fields_of_other_modes()]
        if self.quorum_count > self.num_wanted:
            what = {"sync": "cohort_size", "fedbuff": "buffer_size", "fedasync": "the updates of a fedasync version"}
            faults.append(f"quorum {self.quorum} is more than {what[self.mode]} ({self.num_wanted})")
        if self.deadline_min > self.deadline_max:
            faults.append(f"deadline_min {self.deadline_min} is more than deadline_max ({self.deadline_max})")
        if self.min_available and self.min_available < self.quorum_count:
            faults.append(f"min_available {self.min_available} is less than the quorum ({self.quorum_count})")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _fields_of_other_modes(self) -> Iterator[str]:
        """What was set although it means nothing here. Settings are stored whole: what has its default was not set."""
        fields = type(self).model_fields
        set_ = [name for name in (*MODES_OF, *DISCOUNT_OF) if getattr(self, name) != fields[name].default]
        for name in set_:
            if self.mode not in (modes := MODES_OF.get(name, (self.mode,))):
                yield f"{name} is of mode {' and '.join(modes)}, and mode is {self.mode}"
            if self.staleness != (discount := DISCOUNT_OF.get(name, self.staleness)):
                yield f"{name} is of the {discount} discount, and staleness is {self.staleness}"

    @property
    def is_asynchronous(self) -> bool:
        """Whether clients train all the time, and rounds are the fills of a buffer."""
        return self.mode != "sync"

    @property
    def takes_stale(self) -> bool:
        """Whether an update may count in a commit that its base is not the newest version of."""
        return self.is_asynchronous or self.late == "next_round"

    @property
    def num_wanted(self) -> int:
        """How many accepted updates close a round."""
        return {"sync": self.cohort_size, "fedbuff": self.buffer_size, "fedasync": 1}[self.mode]

    def discount(self, staleness: int) -> float:
        """The scale of an update that is so many versions old, in (0, 1]."""
        match self.staleness:
            case "polynomial":
                return staleness_discount(staleness, exponent=self.staleness_exponent)
            case "hinge":
                return hinge_discount(staleness, slope=self.hinge_slope, delay=self.hinge_delay)
            case "constant":
                return 1.0

    @property
    def num_invited(self) -> int:
        """`ceil(cohort_size * over_selection)`; exact for factors such as 1.1 that binary floats overshoot."""
        return math.ceil(round(self.cohort_size * self.over_selection, 9))

    @property
    def quorum_count(self) -> int:
        """The quorum as a number of updates."""
        if isinstance(self.quorum, int):
            return self.quorum
        return max(1, math.ceil(round(self.quorum * self.num_wanted, 9)))

    @property
    def num_needed_to_draw(self) -> int:
        """Available clients at which a cohort is drawn without waiting."""
        return self.min_available or self.num_invited
