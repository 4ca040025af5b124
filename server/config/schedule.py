"""The settings that change over the rounds of a run."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, model_validator

from atoll.ground.faults import Refused
from atoll.protocol.settings import STRICT, Finite, Plain
from atoll.server.config.aggregation import OptimizerConfig
from atoll.task.overrides import OverridesRefused
from atoll.task.round_schedule import BOUNDED, read_schedule


class OneSchedule(BaseModel, **STRICT):
    """Schedule of one setting: its value in each round r = 1, 2, ..., with t = r - 1 - warmup."""

    kind: Literal["cosine", "linear", "exponential", "step", "list"]
    """Course of the value. "cosine": end + (start - end) (1 + cos(pi t / T)) / 2, T = `rounds` - `warmup`; "linear":
    from start to end in T rounds; "exponential": start times `factor` to the power of t; "step": times `factor` after
    `every` rounds; "list": `values`."""

    start: Finite | None = None
    """Value to start from; absent: the setting's value."""

    end: Finite | None = None
    """Value of "cosine" and "linear" after `rounds`; absent: 0."""

    factor: Finite | None = None
    """Factor of "exponential" and "step"; absent: refused by them, because there is no default."""

    every: int | None = None
    """Rounds of one stair of "step"; absent: refused by it, because there is no default."""

    warmup: int | None = None
    """First rounds, in which the value rises in equal stairs to its start; absent: 0. Not with "list"."""

    rounds: int | None = None
    """Round after which "cosine" and "linear" have reached their end; absent: the rounds of the run."""

    values: list[Plain] | None = None
    """Values of "list", one for each round; the last one holds from its round on; absent: refused by it."""

    rounds_from: list[int] | None = None
    """First round of each of the `values`, rising from 1; absent: 1, 2, 3, ..."""

    @property
    def ends_with_run(self) -> bool:
        """Return whether the value reaches its end in the last round of the run."""
        return self.kind in BOUNDED and self.rounds is None

    @property
    def same_until(self) -> int:
        """The last round whose value depends on no `rounds`: the first one after the warm-up has the start."""
        return (self.warmup or 0) + 1

    def table(self, rounds: int, start: object = None) -> dict[str, Any]:
        """Return the given fields, as they are sent, with the run's rounds and the setting's start."""
        table = {name: value for name, value in self if value is not None}
        if self.kind in BOUNDED:
            table.setdefault("rounds", rounds)
        if start is not None and self.kind != "list":
            table.setdefault("start", start)
        return table


class ScheduleConfig(BaseModel, **STRICT):
    """Settings that change over the rounds; a round that commits no version is repeated with the same values."""

    local: dict[str, OneSchedule] = {}
    """Schedules of the local settings by name, such as `lr = {kind = "cosine", end = 0.001}`: all of `local` except
    `keep`."""

    optimizer: dict[str, OneSchedule] = {}
    """Schedules of the server optimizer's numbers by name, such as `lr = {kind = "step", factor = 0.5, every = 20}`;
    for a custom optimizer, the numbers among its `options`."""

    @model_validator(mode="after")
    def _are_schedules(self) -> "ScheduleConfig":
        faults: list[str] = []
        for name in ("local", "optimizer"):
            for key, schedule in getattr(self, name).items():
                try:
                    read_schedule(f"{name}.{key}", schedule.table(rounds=2**31))
                except OverridesRefused as error:
                    faults += error.faults
        if faults:
            raise Refused(*faults)
        return self


def optimizer_at(
    config: OptimizerConfig, schedules: Mapping[str, OneSchedule], version: int, *, rounds: int
) -> OptimizerConfig:
    """Return the settings of the server optimizer for the step to a version.

    Args:
        config: the settings of the run.
        schedules: the schedules of some of them.
        version: the version that the step makes, >= 1.
        rounds: the rounds of the run.

    Raises:
        ValueError: a value is not allowed.
    """
    if not schedules:
        return config
    numbers = config.scheduled
    values = {
        key: read_schedule(f"optimizer.{key}", schedule.table(rounds, numbers.get(key))).at(version)
        for key, schedule in schedules.items()
    }
    return config.with_numbers(values)


def faults_of_optimizer(config: OptimizerConfig, schedules: Mapping[str, OneSchedule], rounds: int) -> Iterator[str]:
    """Yield the faults of the server optimizer's schedules in the rounds of a run."""
    if not schedules:
        return
    numbers = config.scheduled
    for key, schedule in schedules.items():
        if key not in numbers:
            known = ", ".join(numbers) or "none"
            yield f"schedule: optimizer.{key}: no setting of {config.name} (known: {known})"
            continue
        for turn in read_schedule(key, schedule.table(rounds)).turns(rounds):
            try:
                optimizer_at(config, {key: schedule}, turn, rounds=rounds)
            except ValidationError as error:
                found = error.errors()[0]
                yield f"schedule: optimizer.{key}: {found['input']!r} in round {turn} is not allowed: {found['msg']}"
                break
