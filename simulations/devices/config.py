"""The settings of the devices of a simulated run, the table `[devices]`: speed, network, availability."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from atoll.ground.faults import Refused
from atoll.protocol.settings import STRICT, ConfigError, Plain, or_faults
from atoll.simulations.devices.custom_model import CUSTOM_DEVICE, replaced
from atoll.simulations.devices.spread import Lognormal, Spread, Uniform, quantiles

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atoll.simulations.devices.availability import Availability
    from atoll.simulations.devices.client_draws import Draws
    from atoll.simulations.devices.fleet import Fleet, Speeds

File = Annotated[Path, Field(strict=False)]
Hours = Annotated[float, Field(ge=0, le=24)]

OF_THE_TRACE = ("examples_per_s", "seconds_per_round", "down_bytes_per_s", "up_bytes_per_s", "latency_s")
"""Fields that a trace replaces."""

OF_AVAILABILITY = {
    **dict.fromkeys(("awake_hours", "noon_spread", "begins_at", "sleepless"), "daily"),
    "awake_trace": "trace",
}
"""Fields that belong to one kind of availability."""

HOUR_S = 3600.0


class DeviceConfig(BaseModel, **STRICT):
    """The devices of the clients of a simulated run."""

    examples_per_s: Spread = 1000.0
    """Training examples that a client processes per second; each pass over an example counts. A number: the same for
    all; `{median = 1000, sigma = 0.8}`: lognormal; `{low = 100, high = 900}`: uniform."""

    seconds_per_round: Spread | None = None
    """Seconds of training in a round, independent of the size of a client's data; absent: `examples_per_s` applies."""

    down_bytes_per_s: Spread = 12_500_000.0
    """Bytes that a client receives per second."""

    up_bytes_per_s: Spread = 12_500_000.0
    """Bytes that a client sends per second."""

    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Lognormal | Uniform = 0.01
    """Seconds before the first byte of a download or an upload."""

    trace: File | None = None
    """CSV file with speeds and latencies, in columns examples_per_s, down_mbps, up_mbps and latency_ms: with a column
    `client`, one line for each client; with a column `weight`, one for each kind of device, drawn for each client by
    weight. Absent: no trace, and the settings above apply."""

    model: Annotated[str, AfterValidator(CUSTOM_DEVICE.check)] | None = None
    """Your own function of (client, rng), which returns the device of one client: a table with one or more of
    examples_per_s or seconds_per_round, down_bytes_per_s, up_bytes_per_s and latency_s; missing values are as set
    above. Given by the name that an installed package declares (see `atoll plugins`), or as `module:function` or
    `path/to/file.py:function`. Absent: no such function."""

    options: dict[str, Plain] = {}
    """Values for `model`, passed by name: `options.median = 200`."""

    stragglers: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the clients whose training is slower by `slowdown`, rounded to whole clients."""

    slowdown: Annotated[float, Field(ge=1, le=1e6)] = 10.0
    """Factor by which the training of a straggler takes longer."""

    availability: Literal["always", "daily", "trace"] = "always"
    """Times at which clients can be invited: "always"; "daily", `awake_hours` around the noon of each client; "trace",
    the intervals of `awake_trace`."""

    awake_hours: Annotated[float, Field(gt=0, le=24)] = 10.0
    """Hours of each 24 in which a client is awake, for "daily"."""

    noon_spread: Hours = 24.0
    """Hours over which the clients' noons are spread, as by time zones, for "daily": 24, about the same number is awake
    at any hour; 0, all are awake at once."""

    begins_at: Hours = 12.0
    """Hour of the day at which the run begins, for "daily"; at 12 most clients are awake."""

    sleepless: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the clients that are always awake, for "daily"."""

    awake_trace: File | None = None
    """CSV file for "trace", with one line for each interval in which a client is awake, in columns client, from_s and
    to_s: seconds since the start of the run; and, for intervals that repeat, period_s. Absent: refused by "trace"."""

    @model_validator(mode="after")
    def _fits_together(self) -> "DeviceConfig":
        if faults := [*self._faults()]:
            raise Refused(*faults)
        return self

    def _faults(self) -> Iterator[str]:
        """Yield the faults; a field with its default counts as not set, because settings are stored completely."""
        fields = type(self).model_fields
        is_set = {name for name, field in fields.items() if getattr(self, name) != field.default}
        if self.trace is not None and (both := [name for name in OF_THE_TRACE if name in is_set]):
            yield f"{', '.join(both)}: the trace sets it already"
        if self.trace is not None and self.model is not None:
            yield "model and trace: allowed is one of them"
        if self.options and self.model is None:
            yield f"options {', '.join(self.options)} belong to model, and model is absent"
        if {"examples_per_s", "seconds_per_round"} <= is_set:
            yield "examples_per_s and seconds_per_round: allowed is one of them"
        if "slowdown" in is_set and "stragglers" not in is_set:
            yield "slowdown applies to stragglers, and stragglers is 0"
        for name, kind in OF_AVAILABILITY.items():
            if name in is_set and kind != self.availability:
                yield f"{name} applies only to availability {kind}, and availability is {self.availability}"
        if self.availability == "trace" and self.awake_trace is None:
            yield "availability trace needs awake_trace"

    def of(self, names: Sequence[str], *, seed: int) -> "Fleet":
        """Return the device of each client.

        A device depends on (seed, client name) alone, except that the choice of stragglers depends on all names.

        Args:
            names: the names of the clients, distinct.
            seed: the seed of the run, in 0..2^63-1.

        Raises:
            ConfigError: a trace has faults, or lacks clients; the message lists all of them.
        """
        import numpy as np

        from atoll.simulations.devices.client_draws import client_draws
        from atoll.simulations.devices.fleet import Fleet

        draws = client_draws(names, seed)
        stragglers = _smallest(draws["straggler"], round(self.stragglers * len(names)))
        faults: list[str] = []
        speeds = or_faults(lambda: self._speeds(names, draws, seed), faults)
        availability = or_faults(lambda: self._availability(names, draws), faults)
        if speeds is None or availability is None:
            raise ConfigError(faults)
        return Fleet(names, speeds.slowed(np.where(stragglers, self.slowdown, 1.0)), availability, stragglers)

    def _speeds(self, names: Sequence[str], draws: "Draws", seed: int) -> "Speeds":
        from atoll.simulations.devices.fleet import Speeds
        from atoll.simulations.devices.traces import read_speeds

        if self.trace is not None:
            return read_speeds(self.trace, names, draws["kind"])
        round_s = self.seconds_per_round
        speeds = Speeds(
            quantiles(self.examples_per_s, draws["compute"]),
            quantiles(self.down_bytes_per_s, draws["download"]),
            quantiles(self.up_bytes_per_s, draws["upload"]),
            quantiles(self.latency_s, draws["latency"]),
            None if round_s is None else quantiles(round_s, draws["compute"]),
        )
        return speeds if self.model is None else replaced(speeds, self.model, self.options, names, seed)

    def _availability(self, names: Sequence[str], draws: "Draws") -> "Availability":
        from atoll.simulations.devices.availability import Availability
        from atoll.simulations.devices.traces import read_availability

        if self.availability == "trace":
            assert self.awake_trace is not None
            return read_availability(self.awake_trace, names)
        if self.availability == "always" or self.awake_hours == 24:
            return Availability.always()
        noons = 12 + (draws["noon"] - 0.5) * self.noon_spread
        wakes = (noons - self.awake_hours / 2 - self.begins_at) * HOUR_S
        sleepless = _smallest(draws["sleeper"], round(self.sleepless * len(names)))
        return Availability.daily(wakes, self.awake_hours * HOUR_S, 24 * HOUR_S, ~sleepless)


def _smallest(numbers: "NDArray[np.float64]", count: int) -> "NDArray[np.bool_]":
    """Return a mask of the `count` smallest of the numbers (clients,)."""
    import numpy as np

    mask = np.zeros(len(numbers), np.bool_)
    mask[np.argsort(numbers, kind="stable")[:count]] = True
    return mask
