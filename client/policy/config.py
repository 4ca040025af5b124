"""The settings of a site's own policy, `policy.toml`: what this site takes part in, when, and how much may leave it.

The string under a field is its documentation; `docs/configuration.md` is held against these strings by a test.
"""

import re
from collections.abc import Sequence
from datetime import UTC, tzinfo
from functools import lru_cache
from typing import Annotated, Literal, get_args
from zoneinfo import ZoneInfo

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.protocol.settings import STRICT

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = get_args(Day)
"""In the order of `date.weekday`."""

Pattern = Annotated[str, Field(min_length=1, max_length=200)]

_CLOCK = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])|24:00")


class Hours(BaseModel):
    """When this site takes part; by default always."""

    model_config = STRICT

    days: list[Day] = list(DAYS)
    """The days on which the hours begin."""

    begin: str = "00:00"
    """HH:MM, in `time_zone`."""

    end: str = "24:00"
    """HH:MM, in `time_zone`; earlier than `begin`: on the day after."""

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
                f"begin {self.begin} and end {self.end} are no hours; allowed, for all day: 00:00 and 24:00"
            )
        return self


class SitePolicy(BaseModel):
    """A site's own policy. All of its rules must agree before anything is done or sent."""

    model_config = STRICT

    tasks: list[Pattern]
    """Names of the tasks that are allowed, of those that the agent was started with: digits:task, or a pattern with *,
    ? and [...]. Required, so that an empty file allows nothing."""

    runs: list[Pattern]
    """Ids of the runs that are allowed, such as digits-1, or patterns. Required."""

    approval: Literal["none", "each_run"] = "none"
    """"each_run": a run that asks for the first time, or with another task, algorithm, codec or other settings of the
    training than were approved, waits for `atoll site approve`. A run that `atoll site reject` was said about is
    refused in any case."""

    metrics_only: bool = False
    """Whether this site answers evaluations and nothing else: it never trains, and no weights leave it."""

    upload_max_bytes: int = Field(default=2**50, ge=0, le=2**50)
    """Most bytes of one update, its manifest included. A model that is larger is not even downloaded for training."""

    rounds_per_day: int = Field(default=1_000_000, ge=0, le=1_000_000)
    """Most rounds that are begun in one day of `time_zone`. A round that is begun again counts again, unless it is the
    same work on the same day and no update of it has left; an evaluation is no round."""

    time_zone: str = "UTC"
    """Of `hours` and of the days of `rounds_per_day`: an IANA name such as Europe/Berlin."""

    hours: Hours = Hours()

    error_details: bool = False
    """Whether the text of an error leaves this site, with what the task's code raised and lines of its traceback.
    Otherwise the coordinator is told the reason alone, and the text stays in the agent's own log."""

    @field_validator("time_zone")
    @classmethod
    def _is_a_zone(cls, name: str) -> str:
        try:
            zone_of(name)
        except (ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError, which zone_of has turned into ValueError
            raise ValueError("allowed: UTC, or an IANA name that this machine's time zone database has") from None
        return name


@lru_cache(maxsize=16)
def zone_of(name: str) -> tzinfo:
    """The time zone of this name; UTC needs no database.

    Raises:
        ValueError, OSError: there is none.
    """
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except KeyError as error:
        raise ValueError(str(error)) from error


EVERYTHING: Sequence[str] = ("*",)


def default_policy() -> SitePolicy:
    """Without a policy file: the tasks that the agent was started with, in any run, at any time, of any size."""
    return SitePolicy(tasks=list(EVERYTHING), runs=list(EVERYTHING), error_details=True)
