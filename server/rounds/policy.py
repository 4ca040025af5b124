"""The straggler policy of a run: cohort, quorum, deadlines, late updates, the asynchronous modes. Pure.

The string under a field is its documentation: `docs/configuration.md` is generated from these strings.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atoll.aggregation.fold.weights import hinge_discount, num_sites_for, staleness_discount
from atoll.ground.faults import Refused
from atoll.ground.printable import count_of

Seconds = Annotated[float, Field(gt=0, le=366 * 86400, allow_inf_nan=False)]
SecondsOrNone = Annotated[float, Field(ge=0, le=366 * 86400, allow_inf_nan=False)]

Mode = Literal["sync", "fedbuff", "fedasync"]

_OF_A_COHORT = ("cohort_size", "over_selection", "linger", "grace", "late", "min_available", "first_available")

MODES_OF: Mapping[str, tuple[Mode, ...]] = {
    **dict.fromkeys((*_OF_A_COHORT, "selection_timeout", "max_share"), ("sync",)),
    **dict.fromkeys(("concurrency", "fill_timeout"), ("fedbuff", "fedasync")),
    "buffer_size": ("fedbuff",),
    "alpha": ("fedasync",),
}
"""Fields that only some modes have; every mode has all other fields."""

DISCOUNT_OF = {"staleness_exponent": "polynomial", "hinge_slope": "hinge", "hinge_delay": "hinge"}
"""Fields that only one discount has."""

STALENESS_MAX_ASYNC = 20
"""Smallest default of `max_staleness` in an asynchronous mode."""

STALENESS_MAX = 1000

FIRST_WAIT_S = 300.0
"""Longest time for which a first round waits for `first_available` clients [s]."""


class StragglerPolicy(BaseModel):
    """Rules of a round: its size and quorum, its deadlines, the treatment of late updates."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    cohort_size: int = Field(default=2, ge=1, le=1_000_000)
    """Number of updates from its cohort that a round waits for; it closes when they have arrived."""

    over_selection: float = Field(default=1.0, ge=1.0, le=10.0)
    """`ceil(cohort_size * over_selection)` clients are invited (1.3 in Bonawitz et al. 2019, section 9)."""

    quorum: int | float = 1.0
    """Least number of accepted updates that may commit a round: a count (integer >= 1), or a fraction (a number with a
    decimal point in (0, 1]) of `cohort_size`, in the asynchronous modes of `buffer_size`. A late update carried over
    from an earlier round counts; one client counts once."""

    deadline: Seconds | Literal["adaptive"] = 600.0
    """Seconds from the invitation to the end of collecting; or "adaptive": `adaptive_margin` times the expected time of
    the slowest client that is needed, from its measured download, training and upload times. In the asynchronous modes
    each invitation has its own deadline; a late client is told to stop and to send its partial work."""

    adaptive_margin: float = Field(default=1.5, ge=1.0, le=100.0)
    """Factor between the expected time and an adaptive deadline."""

    deadline_min: Seconds = 5.0
    """Shortest adaptive deadline [s]."""

    deadline_max: Seconds = 3600.0
    """Longest adaptive deadline [s], and the deadline while there are no measurements."""

    linger: SecondsOrNone | None = None
    """Seconds to wait for more updates once the round's cohort has reached the quorum; absent: until `cohort_size`
    updates have arrived, or the deadline."""

    grace: SecondsOrNone = 0.0
    """Seconds after the deadline for uploads that began before it."""

    late: Literal["discard", "next_round"] = "discard"
    """Treatment of an update that arrives after its round has closed: "discard" refuses it; "next_round" counts it in
    the next round that commits, with its weight discounted by its staleness. "next_round" also carries over the
    accepted updates of an abandoned round, except when its aggregation failed."""

    max_staleness: int = Field(default=1, ge=0, le=STALENESS_MAX)
    """Largest age of an update, in model versions, in the commit that uses it, with late = "next_round" and in the
    asynchronous modes. The same number of versions is kept on disk. Absent: 1; in an asynchronous mode twice the
    usual age, `(concurrency - 1) / buffer_size` versions, and at least 20."""

    staleness: Literal["polynomial", "constant", "hinge"] = "polynomial"
    """Discount of an update that is t versions old (Xie et al. 2019). "polynomial": the factor
    `(1 + t) ** -staleness_exponent`; "constant": none; "hinge": none up to t = `hinge_delay`, then the factor
    `1 / (1 + hinge_slope * (t - hinge_delay))`. With late = "next_round" the factor is in numerator and denominator of
    the mean, in the asynchronous modes only in the numerator."""

    staleness_exponent: float = Field(default=0.5, ge=0.0, le=10.0)
    """Exponent of the polynomial discount."""

    hinge_slope: float = Field(default=10.0, gt=0.0, le=1e6)
    """Slope of the hinge discount."""

    hinge_delay: int = Field(default=4, ge=0, le=1000)
    """Age in versions up to which the hinge discount has no effect."""

    mode: Mode = "sync"
    """"sync": round by round, each with its cohort. "fedbuff" (Nguyen et al. 2022): clients train continuously, each
    from the version that was newest at its invitation, and every `buffer_size` accepted updates make the next version.
    "fedasync" (Xie et al. 2019): the same, but each accepted update makes a version."""

    buffer_size: int = Field(default=10, ge=1, le=1_000_000)
    """Number of accepted updates that make a version in "fedbuff": the sum of the discounted updates divided by their
    number, independent of the size of the clients' data."""

    alpha: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of the client's model in the next version in "fedasync", before the discount."""

    concurrency: int = Field(default=10, ge=1, le=1_000_000)
    """Number of clients that train at the same time in the asynchronous modes. When one has sent its update, has
    failed, was lost or has run out of time, another is invited, with the newest version; each at most once for one
    version."""

    fill_timeout: Seconds = 3600.0
    """Seconds that a buffer may take to fill in the asynchronous modes. Then its updates become a version if they make
    the quorum. Otherwise no further client is invited, and the buffer ends with the quorum or with the last training
    client; without the quorum it is abandoned, and its updates wait for the next buffer."""

    partial_work: Literal["refuse", "accept", "scaled"] = "accept"
    """Treatment of an update whose client stopped before it had done all requested steps: refused; accepted with weight
    `num_examples`; or accepted with weight `num_examples * work`."""

    retry: int = Field(default=3, ge=0, le=1_000_000)
    """Number of consecutive rounds that may be abandoned and repeated with a new cohort; after one more the run does
    what `on_failure` says. A round that lacks only clients that are away, or that wait for time or an approval, does
    not count."""

    retry_wait: SecondsOrNone = 10.0
    """Seconds before the first repetition of an abandoned round; each further repetition waits twice as long, up to
    `retry_wait_max`. The wait is shortened by a random part of at most a half, drawn from the seed. 0: a round is
    repeated at once."""

    retry_wait_max: SecondsOrNone = 600.0
    """Longest wait before a round is repeated [s]."""

    failure_rest: SecondsOrNone = 10.0
    """Seconds for which a client is not invited after it has failed (disk full, task broken, worker crash, ...);
    doubled after each consecutive failure, shortened like `retry_wait`. An accepted update resets it. The rest ends
    early if a round cannot reach its quorum otherwise within `selection_timeout`. 0: no rest."""

    failure_rest_max: SecondsOrNone = 600.0
    """Longest rest of a client that has failed [s]."""

    approval_wait: SecondsOrNone = 30 * 86400.0
    """Seconds since the last commit for which the run waits, without using `retry`, for connected clients that its
    quorum needs and that wait for their operator's approval, for their site's hours or for its next day. 0: no wait."""

    on_failure: Literal["fail", "pause"] = "fail"
    """What follows more than `retry` consecutive abandoned rounds: "fail": the run fails; "pause": it is paused and
    keeps its clients and the waiting updates, until `atoll run resume`."""

    outage_max: SecondsOrNone = 3600.0
    """Longest total time [s] by which outages of the coordinator extend an open round; the rest of an outage does not
    count."""

    min_available: int = Field(default=0, ge=0, le=1_000_000)
    """Clients that must be connected before a cohort is drawn; 0: the number that the round invites."""

    first_available: int = Field(default=0, ge=0, le=1_000_000)
    """Clients for which the first round of a run waits, at most 300 s, before `min_available` are enough: sites that
    start at the same time take part together. 0: it waits like every round."""

    selection_timeout: Seconds = 300.0
    """Seconds to wait for `min_available` clients. Then the cohort is drawn from the available clients if they can make
    the quorum, and the following rounds wait for no more than these until another one returns; otherwise the round
    keeps waiting, as the table `[wait]` says. In a simulation it is abandoned."""

    max_examples: int = Field(default=1_000_000_000, ge=1, le=2**40)
    """Largest number of examples, or units, that an update may claim; an update with more is refused. Also the largest
    count of a metric in a client's evaluation; if it is exceeded, that client's metric is omitted."""

    max_units: int = Field(default=1_000_000, ge=1, le=2**40)
    """Largest number of units (tokens, pixels) that a client may claim for each example with which it joined, in the
    same places: with n examples at most the smaller of n x `max_units` and `max_examples`. A client that joins without
    a number, 0, is limited only by `max_examples`. 1: an update counts no more than the examples that its site has
    reported."""

    max_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Largest share of one client in the mean of a round: larger weights are reduced, all to the same number, until no
    share is larger (`w' = min(w, c)`). It also applies to each metric of the clients' evaluations, where a client's
    weight is its count, or, unless there are two sums, the sum of their magnitudes. 1: no bound. The quorum must have
    at least `1 / max_share` updates; if fewer clients evaluate, all count the same. If updates count the same anyway
    (weighting "uniform", a rule other than "mean"), it only applies to evaluations."""

    @model_validator(mode="before")
    @classmethod
    def _default_staleness_of_the_mode(cls, fields: Any) -> Any:
        """Fill in the default of `max_staleness` of an asynchronous mode."""
        if isinstance(fields, dict) and fields.get("mode") in ("fedbuff", "fedasync"):
            return {"max_staleness": _default_of(fields), **fields}
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
        for wait in ("retry_wait", "failure_rest"):
            if (first := getattr(self, wait)) > (most := getattr(self, f"{wait}_max")):
                faults.append(f"{wait} {first} is more than {wait}_max ({most})")
        if self.quorum_count < (least := num_sites_for(self.max_share)):
            faults.append(
                f"max_share {self.max_share} needs at least {count_of(least, 'update')}, as fewer have more each, and "
                f"the quorum is {self.quorum_count}: set a quorum of {least}, or a max_share of at least "
                f"{math.ceil(1000 / self.quorum_count) / 1000:g}"
            )
        if self.min_available and self.min_available < self.quorum_count:
            faults.append(f"min_available {self.min_available} is less than the quorum ({self.quorum_count})")
        if faults:
            raise Refused(*faults)
        return self

    def _fields_of_other_modes(self) -> Iterator[str]:
        """Yield the faults of fields that have no effect in this mode or with this discount.

        Settings are stored with all their defaults, so a field with its default value counts as not given.
        """
        fields = type(self).model_fields
        given = [name for name in (*MODES_OF, *DISCOUNT_OF) if getattr(self, name) != fields[name].default]
        for name in given:
            if self.mode not in (modes := MODES_OF.get(name, (self.mode,))):
                yield f"{name} belongs to mode {' and '.join(modes)}, and mode is {self.mode}"
            if self.staleness != (discount := DISCOUNT_OF.get(name, self.staleness)):
                yield f"{name} belongs to the {discount} discount, and staleness is {self.staleness}"

    def usual_staleness(self, num_clients: int | None = None) -> int:
        """Return the age of a typical update of an asynchronous run, in versions: ceil((C - 1) / K).

        While a client trains, each of the C - 1 other training clients sends an update, if all are equally fast, and K
        updates make a version.

        Args:
            num_clients: the number of clients, if it is known; C is at most that.
        """
        together = min(self.concurrency, num_clients) if num_clients else self.concurrency
        return -(-(together - 1) // self.num_wanted) if self.is_asynchronous else 0

    def warning_of_staleness(self, num_clients: int | None = None) -> str:
        """Return a warning if updates of a usual age are too old to count; empty: they are not."""
        if self.max_staleness >= (usual := self.usual_staleness(num_clients)):
            return ""
        who = count_of(min(self.concurrency, num_clients or self.concurrency), "client")
        made = f"a version after each {'update' if self.num_wanted == 1 else f'{self.num_wanted} updates'}"
        return (
            f"round.max_staleness: got {self.max_staleness}; with {who} at work at once and {made}, an update is "
            f"usually {count_of(usual, 'version')} old, older ones are dropped: set at least "
            f"{usual}, or a smaller concurrency"
        )

    @property
    def is_asynchronous(self) -> bool:
        """Return whether clients train continuously and a round is one fill of a buffer."""
        return self.mode != "sync"

    @property
    def takes_stale(self) -> bool:
        """Return whether a commit may use updates trained from a version older than its base."""
        return self.is_asynchronous or self.late == "next_round"

    @property
    def num_wanted(self) -> int:
        """The number of accepted updates that closes a round."""
        return {"sync": self.cohort_size, "fedbuff": self.buffer_size, "fedasync": 1}[self.mode]

    def discount(self, staleness: int) -> float:
        """Return the factor of an update that is `staleness` versions old, in (0, 1]."""
        match self.staleness:
            case "polynomial":
                return staleness_discount(staleness, exponent=self.staleness_exponent)
            case "hinge":
                return hinge_discount(staleness, slope=self.hinge_slope, delay=self.hinge_delay)
            case "constant":
                return 1.0

    @property
    def num_invited(self) -> int:
        """The number of invited clients: `ceil(cohort_size * over_selection)`, exact for factors such as 1.1."""
        return math.ceil(round(self.cohort_size * self.over_selection, 9))

    @property
    def quorum_count(self) -> int:
        """The quorum as a number of updates."""
        if isinstance(self.quorum, int):
            return self.quorum
        return max(1, math.ceil(round(self.quorum * self.num_wanted, 9)))

    @property
    def num_needed_to_draw(self) -> int:
        """The number of available clients at which a cohort is drawn without waiting."""
        return self.min_available or self.num_invited

    def waits_first(self, round_id: int) -> bool:
        """Return whether a round is the first one, and waits for more clients than any other."""
        return round_id == 1 and self.first_available > self.num_needed_to_draw


def _default_of(fields: Mapping[str, Any]) -> int:
    """Return the default of `max_staleness` in an asynchronous mode: twice the usual age, and at least 20."""
    names = ("concurrency", "buffer_size")
    known = [fields.get(name, StragglerPolicy.model_fields[name].default) for name in names]
    if not all(type(value) is int and value >= 1 for value in known):
        return STALENESS_MAX_ASYNC  # the fault is reported elsewhere
    concurrency, size = int(known[0]), int(known[1]) if fields.get("mode") == "fedbuff" else 1
    return min(STALENESS_MAX, max(STALENESS_MAX_ASYNC, 2 * -(-(concurrency - 1) // size)))
