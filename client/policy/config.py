"""The settings of a site's policy, `policy.toml`: tasks, runs, hours, and the amount of data that may leave.

The string under a field is its documentation; `docs/configuration.md` is generated from these strings.
"""

import re
from collections.abc import Sequence
from datetime import UTC, tzinfo
from functools import lru_cache
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.client.policy.small_cells import StatisticsTerms
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.settings import STRICT

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)
"""All days, in the order of `date.weekday`."""

Pattern = Annotated[str, Field(min_length=1, max_length=200)]

_CLOCK = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")


class Hours(BaseModel, **STRICT):
    """The hours in which this site takes part; by default always."""

    days: list[Day] = list(DAYS)
    """Weekdays on which the hours begin."""

    begin: str = "00:00"
    """Begin of the hours, HH:MM in `time_zone`."""

    end: str = "24:00"
    """End of the hours, HH:MM in `time_zone`; on the next day when it is earlier than `begin`."""

    @field_validator("begin", "end")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        if _CLOCK.fullmatch(text) is None:
            raise ValueError("allowed: HH:MM, in 00:00..24:00")
        return text

    @model_validator(mode="after")
    def _is_a_time_span(self) -> "Hours":
        if self.begin == self.end or self.begin == "24:00":
            raise ValueError(
                f"begin {self.begin} and end {self.end} leave no hours; allowed, for all day: 00:00 and 24:00"
            )
        return self


class SecurePolicy(BaseModel, **STRICT):
    """The site's demands on secure sums (docs/secure-sites.md), in which no update can be read alone."""

    required: bool = False
    """Let nothing leave outside of a secure sum: plain invitations, evaluations, requests for statistics, messages of a
    server program and plain updates are refused."""

    min_others: int = Field(default=2, ge=2, le=63)
    """Least number of other sites in every sum with this site's values. A run whose sums have fewer is refused."""

    trust: Literal["pinned", "authority"] = "authority"
    """Sites with which this one joins a sum. "pinned": those whose fingerprint the operator has compared and given to
    `atoll site trust`; then even a coordinator that has the authority's key cannot put invented sites into a sum.
    "authority": every site whose certificate the federation's authority has signed, save those of `atoll site
    distrust`; a coordinator that has the authority's key can invent them."""

    colluders_max: int = Field(default=1, ge=0, le=62)
    """Number n_c of sites that may work together with the coordinator: a sum of n sites whose threshold t is not above
    (n + n_c) / 2 is refused."""

    base_repeats_max: int = Field(default=2, ge=1, le=1_000_000)
    """Number of sums from one version of the model: each is a new training from the same numbers, whose difference
    tells more than one sum. With 2, a round may fail once after this site has signed."""

    statistics_sets_max: int = Field(default=1, ge=1, le=1_000_000)
    """Number of different sets of sites in the sums of one task's statistics, over all runs and layouts. With 1 all
    sums with this site's numbers are over the same sites; two that differ by a site tell that site's numbers. A
    federation that has a new site, or has lost one for good, needs one more."""

    tell_examples: bool | None = None
    """Tell the coordinator the number of this site's examples, which plain runs use to select clients; absent: unless
    `required` is set. In a secure sum the number is never told, whatever this says."""

    @property
    def tells_examples(self) -> bool:
        """Whether the coordinator may know the number of this site's examples."""
        return not self.required if self.tell_examples is None else self.tell_examples


class DataBudget(BaseModel, **STRICT):
    """The budget of one data set: what all releases of it together may tell about one example or about the site."""

    name: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the data set in this site's ledger, such as mri-2026. The ledger keeps what was spent under a name for
    ever: a new budget is a new name."""

    tasks: Annotated[list[Pattern], Field(min_length=1)]
    """Names of the tasks that read this data, or patterns; the coordinator cannot choose. A task that matches several
    data sets is charged to each."""

    epsilon_max: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
    """Largest epsilon of all releases together, over all runs and coordinators. It may be lowered later, not raised."""

    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    """Probability with which `epsilon_max` may fail; far below 1 / the number of examples. It may be lowered later, not
    raised."""

    unit: Literal["example", "client"]
    """What is protected: "example", one example of this data; "client", all of it. A run with a guarantee for examples
    bounds nothing for the whole, and is refused under "client"; one with a guarantee for clients is charged to both."""


class PrivacyPolicy(BaseModel, **STRICT):
    """The site's budgets of differential privacy (docs/privacy.md)."""

    ledger: Annotated[str, Field(max_length=4096)] = ""
    """Folder of the ledger, an absolute path; empty: the agent's state directory. Agents of one site that read the same
    data for several coordinators name the same folder, so that they spend one budget."""

    data: list[DataBudget] = []
    """Data sets with a budget, one `[[privacy.data]]` each. They take part in nothing that is not accounted."""

    @field_validator("ledger")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if path and not path.startswith("/"):
            raise ValueError("allowed: an absolute path, such as /var/lib/atoll/budgets, or nothing")
        return path

    @field_validator("data")
    @classmethod
    def _names_differ(cls, data: list[DataBudget]) -> list[DataBudget]:
        names = [each.name for each in data]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(map(repr, twice))} occur twice: allowed is one table for each name")
        return data


class SitePolicy(BaseModel, **STRICT):
    """A site's policy: all of its rules must agree before the agent trains, evaluates or sends."""

    tasks: list[Pattern]
    """Names of the allowed tasks, such as digits:task, or patterns with *, ? and [...]; the agent must have been
    started with the task, too. Required, so that an empty file allows nothing."""

    runs: list[Pattern]
    """Ids of the allowed runs, such as digits-1, or patterns. Required."""

    approval: Literal["none", "each_run"] = "none"
    """Approval by the site's operator. With "each_run", a run waits for `atoll site approve` when it asks for the first
    time, and again when its task, algorithm, codec or training settings change. A run that was rejected with `atoll
    site reject` is always refused."""

    metrics: Literal["per_site", "merged", "none"] = "merged"
    """Form in which sums of this site's metrics leave it, from evaluations and trainings: "per_site": the coordinator
    may keep and show them for this site alone; "merged": only as a part of sums over several sites; "none": no metrics
    leave, and evaluations are refused. An approval is bound to it."""

    metrics_min_sites: int = Field(default=1, ge=1, le=1_000_000)
    """Least number of sites in any sum of metrics that is shown with this site's part in it; the coordinator shows no
    sum over fewer."""

    statistics: Literal["per_site", "merged", "none"] = "none"
    """Form in which statistics of this site's data leave it, requested by `atoll run statistics` before a training:
    same values as `metrics`; "none": every request is refused. An approval is bound to it."""

    statistics_min_sites: int = Field(default=1, ge=1, le=1_000_000)
    """Least number of sites in any statistic that is shown with this site's part in it."""

    statistics_min_count: int = Field(default=10, ge=1, le=1_000_000_000)
    """Least number of examples behind a statistic: every count that leaves is 0 or at least this. Labels with fewer
    examples are left out, and so is a feature with fewer values, missing values or infinite ones, and a split with
    fewer examples."""

    statistics_extremes: bool = False
    """Send the minimum and the maximum of each feature, too, which are values of single examples."""

    actions: list[Pattern] = ["train", "evaluate"]
    """Messages of a server program that may be answered here, by their kind and action, or patterns: "train",
    "evaluate", "query.*". A reply holds whatever the task's code puts into it, metrics of this site alone included, so
    every message is refused unless `metrics` is "per_site", and with `metrics_only`."""

    metrics_only: bool = False
    """Answer evaluations only: this site never trains, and no weights leave it."""

    upload_max_bytes: int = Field(default=2**50, ge=0, le=2**50)
    """Largest size of an update with its manifest [bytes]. A larger model is not downloaded for training."""

    rounds_per_day: int = Field(default=1_000_000, ge=0, le=1_000_000)
    """Largest number of rounds that begin in one day of `time_zone`. A restarted round counts again, unless it is the
    same work on the same day and no update of it was sent. Evaluations do not count."""

    time_zone: str = "UTC"
    """Time zone of `hours` and of the days in `rounds_per_day`, an IANA name such as Europe/Berlin."""

    hours: Hours = Hours()

    secure: SecurePolicy = SecurePolicy()

    privacy: PrivacyPolicy = PrivacyPolicy()

    error_details: bool = False
    """Send the text of errors to the coordinator: the exceptions of the task's code and lines of their tracebacks.
    Otherwise the coordinator gets only the reason, and the text stays in the agent's own log."""

    @property
    def disclosure(self) -> Disclosure:
        """Terms on which this site's metrics leave it."""
        return Disclosure(MetricsLeave(self.metrics), self.metrics_min_sites)

    @property
    def statistics_terms(self) -> StatisticsTerms:
        """Terms on which statistics of this site's data leave it."""
        disclosure = Disclosure(MetricsLeave(self.statistics), self.statistics_min_sites)
        return StatisticsTerms(disclosure, self.statistics_min_count, self.statistics_extremes)

    @model_validator(mode="after")
    def _only_metrics_but_none(self) -> "SitePolicy":
        if self.metrics_only and self.metrics == "none":
            raise ValueError(
                'metrics_only and metrics "none" let nothing leave: set metrics to "merged" or "per_site", or '
                "metrics_only to false"
            )
        return self

    @model_validator(mode="after")
    def _errors_tell_no_data(self) -> "SitePolicy":
        if self.error_details and self.privacy.data:
            raise ValueError(
                "error_details: got true, and data with a budget ([[privacy.data]]) would leave in the text of errors: "
                "allowed is false"
            )
        return self

    @field_validator("time_zone")
    @classmethod
    def _is_a_zone(cls, name: str) -> str:
        try:
            zone_of(name)
        except (ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError, which zone_of turns into ValueError
            raise ValueError("allowed: UTC, or an IANA name in this machine's time zone database") from None
        return name


@lru_cache(maxsize=16)
def zone_of(name: str) -> tzinfo:
    """Return the time zone of a name; UTC needs no database.

    Raises:
        ValueError, OSError: the database has no such zone.
    """
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except KeyError as error:
        raise ValueError(str(error)) from error


EVERYTHING: Sequence[str] = ("*",)


def default_policy() -> SitePolicy:
    """Return the policy without a file: the agent's tasks, any run, time and size, all metrics and statistics."""
    return SitePolicy(
        tasks=list(EVERYTHING),
        runs=list(EVERYTHING),
        error_details=True,
        actions=list(EVERYTHING),
        metrics="per_site",
        statistics="per_site",
        statistics_min_count=1,
        statistics_extremes=True,
    )
