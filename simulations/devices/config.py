"""The table `[devices]` of a simulated run: how fast its clients are, how far away, and when they are awake."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, model_validator

from atoll.protocol.settings import STRICT, ConfigError, or_faults
from atoll.simulations.devices.awake import Awake
from atoll.simulations.devices.fleet import Fleet, Speeds
from atoll.simulations.devices.lots import Lots, lots
from atoll.simulations.devices.spread import Lognormal, Spread, Uniform, quantiles
from atoll.simulations.devices.traces import read_awake, read_speeds

File = Annotated[Path, Field(strict=False)]
Hours = Annotated[float, Field(ge=0, le=24)]

OF_THE_TRACE = ("examples_per_s", "seconds_per_round", "down_bytes_per_s", "up_bytes_per_s", "latency_s")
"""What a trace says in the place of these."""

OF_AVAILABILITY = {
    **dict.fromkeys(("awake_hours", "noon_spread", "begins_at", "sleepless"), "daily"),
    "awake_trace": "trace",
}
"""The fields that only one kind of availability has."""

HOUR_S = 3600.0


class DeviceConfig(BaseModel):
    """What the clients of a simulated run run on."""

    model_config = STRICT

    examples_per_s: Spread = 1000.0
    """Training examples that a client takes in a second; each pass over an example counts. A number: all alike;
    `{median = 1000, sigma = 0.8}`: lognormal; `{low = 100, high = 900}`: uniform."""

    seconds_per_round: Spread | None = None
    """Seconds of training in a round, whatever the size of a client's data, in the place of `examples_per_s`; absent:
    as `examples_per_s` says."""

    down_bytes_per_s: Spread = 12_500_000.0
    """Bytes that a client receives in a second."""

    up_bytes_per_s: Spread = 12_500_000.0
    """Bytes that a client sends in a second."""

    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Lognormal | Uniform = 0.01
    """Seconds before the first byte of a download or an upload."""

    trace: File | None = None
    """A CSV file that says all of this, in columns examples_per_s, down_mbps, up_mbps and latency_ms: with a column
    `client`, one line for each; with a column `weight`, one for each kind of device, which are dealt out by it. Absent:
    there is none."""

    stragglers: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the clients that train slower than all this says, rounded to whole clients."""

    slowdown: Annotated[float, Field(ge=1, le=1e6)] = 10.0
    """How many times as long the training of a straggler takes."""

    availability: Literal["always", "daily", "trace"] = "always"
    """When clients can be asked: "always"; "daily", for `awake_hours` around each one's own noon; "trace", as
    `awake_trace` says."""

    awake_hours: Annotated[float, Field(gt=0, le=24)] = 10.0
    """Of "daily": hours that a client is awake, of each 24."""

    noon_spread: Hours = 24.0
    """Of "daily": hours over which the clients' noons are spread, as by time zones: 24, at any hour about as many are
    awake; 0, all are awake at once."""

    begins_at: Hours = 12.0
    """Of "daily": the hour at which the run begins; at 12 most clients are awake."""

    sleepless: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Of "daily": the share of the clients that are always awake."""

    awake_trace: File | None = None
    """Of "trace": a CSV file with one line for each interval in which a client is awake, in columns client, from_s and
    to_s: seconds since the start of the run; and, if they repeat, period_s. Absent: there is none."""

    @model_validator(mode="after")
    def _fits_together(self) -> "DeviceConfig":
        if faults := [*self._faults()]:
            raise ValueError("; ".join(faults))
        return self

    def _faults(self) -> Iterator[str]:
        """Settings are stored whole: what has its default was not set."""
        fields = type(self).model_fields
        is_set = {name for name, field in fields.items() if getattr(self, name) != field.default}
        if self.trace is not None and (both := [name for name in OF_THE_TRACE if name in is_set]):
            yield f"{', '.join(both)}: the trace says it"
        if {"examples_per_s", "seconds_per_round"} <= is_set:
            yield "examples_per_s and seconds_per_round: allowed is one of them"
        if "slowdown" in is_set and "stragglers" not in is_set:
            yield "slowdown is of stragglers, and stragglers is 0"
        for name, kind in OF_AVAILABILITY.items():
            if name in is_set and kind != self.availability:
                yield f"{name} is of availability {kind}, and availability is {self.availability}"
        if self.availability == "trace" and self.awake_trace is None:
            yield "availability trace needs awake_trace"

    def of(self, names: Sequence[str], *, seed: int) -> Fleet:
        """The device of each client, from (seed, its name) alone; only who is a straggler depends on all names.

        Args:
            names: of the clients, distinct.
            seed: of the run, in 0..2^63-1.

        Raises:
            ConfigError: every fault of the traces; a client that they do not have.
        """
        drawn = lots(names, seed)
        slow = _least(drawn["straggler"], round(self.stragglers * len(names)))
        faults: list[str] = []
        speeds = or_faults(lambda: self._speeds(names, drawn), faults)
        awake = or_faults(lambda: self._awake(names, drawn), faults)
        if speeds is None or awake is None:
            raise ConfigError(faults)
        return Fleet(names, speeds.slowed(np.where(slow, self.slowdown, 1.0)), awake, slow)

    def _speeds(self, names: Sequence[str], drawn: Lots) -> Speeds:
        if self.trace is not None:
            return read_speeds(self.trace, names, drawn["kind"])
        whole = self.seconds_per_round
        return Speeds(
            quantiles(self.examples_per_s, drawn["compute"]),
            quantiles(self.down_bytes_per_s, drawn["download"]),
            quantiles(self.up_bytes_per_s, drawn["upload"]),
            quantiles(self.latency_s, drawn["latency"]),
            None if whole is None else quantiles(whole, drawn["compute"]),
        )

    def _awake(self, names: Sequence[str], drawn: Lots) -> Awake:
        if self.availability == "trace":
            assert self.awake_trace is not None
            return read_awake(self.awake_trace, names)
        if self.availability == "always" or self.awake_hours == 24:
            return Awake.always()
        noons = 12 + (drawn["noon"] - 0.5) * self.noon_spread
        wakes = (noons - self.awake_hours / 2 - self.begins_at) * HOUR_S
        sleepless = _least(drawn["sleeper"], round(self.sleepless * len(names)))
        return Awake.daily(wakes, self.awake_hours * HOUR_S, 24 * HOUR_S, ~sleepless)


def _least(numbers: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Which of the numbers (clients,) are the `count` smallest."""
    found = np.zeros(len(numbers), np.bool_)
    found[np.argsort(numbers, kind="stable")[:count]] = True
    return found
