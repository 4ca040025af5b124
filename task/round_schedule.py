"""Settings that change over the rounds: a value as a function of the round. Pure.

With the start s, the end e, the round r = 1, 2, ..., the warm-up w, t = r - 1 - w and T = rounds - w:

    constant start        s r / (w + 1)                                  rounds 1 to w, the warm-up
    cosine                e + (s - e) (1 + cos(pi min(t, T) / T)) / 2    rounds after it, as all below
    linear                s + (e - s) min(t, T) / T
    exponential           s factor^t
    step                  s factor^floor(t / every)
    list                  values[i], i the last with rounds_from[i] <= r

A round that commits no version is repeated with the same value: r is the version that the round makes.

Source:
    The formulas of `torch.optim.lr_scheduler`: CosineAnnealingLR (Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5
    without restarts), LinearLR, ExponentialLR, StepLR.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.ground.faults import Refused, faults_in
from atoll.task.overrides import OverridesRefused, type_faults

FIELDS = {
    "cosine": ("start", "end", "rounds", "warmup"),
    "linear": ("start", "end", "rounds", "warmup"),
    "exponential": ("start", "factor", "warmup"),
    "step": ("start", "factor", "every", "warmup"),
    "list": ("values", "rounds_from"),
}
"""The fields of each kind."""

NEEDED = {"exponential": ("factor",), "step": ("factor", "every"), "list": ("values",)}

BOUNDED = ("cosine", "linear")
"""The kinds that reach their end in a known round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSchedule:
    """The schedule of one setting: its value as a function of the round.

    Raises:
        ValueError: a field has a wrong type or value, is missing, or of another kind; the message lists all faults.
    """

    kind: str
    start: float | None = None
    end: float | None = None
    factor: float | None = None
    every: int | None = None
    warmup: int | None = None
    rounds: int | None = None
    values: tuple[Any, ...] | None = None
    rounds_from: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        faults = type_faults(self, "schedule", hidden=("values", "rounds_from"))
        if faults := faults or list(self._faults()):
            raise Refused(*faults)

    def _faults(self) -> Iterator[str]:
        if self.kind not in FIELDS:
            yield f"kind: must be one of {', '.join(FIELDS)}, got {self.kind!r}"
            return
        given = {name for name in self.__slots__ if name != "kind" and getattr(self, name) is not None}
        if foreign := sorted(given - set(FIELDS[self.kind])):
            yield f"{', '.join(foreign)}: not of kind {self.kind} (known: {', '.join(FIELDS[self.kind])})"
        yield from (f"{name}: {self.kind} needs it" for name in NEEDED.get(self.kind, ()) if name not in given)
        for name in ("start", "end", "factor"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield f"{name}: must be finite, got {value!r}"
        if self.factor is not None and not self.factor > 0:
            yield f"factor: must be positive, got {self.factor!r}"
        yield from self._faults_of_rounds()

    def _faults_of_rounds(self) -> Iterator[str]:
        for name, least in (("every", 1), ("rounds", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"{name}: must be at least {least}, got {value}"
        if self.rounds is not None and (self.warmup or 0) >= self.rounds >= 1:
            yield f"warmup: must be less than rounds ({self.rounds}), got {self.warmup or 0}"
        if self.values is not None:
            yield from _faults_of_list(self.values, self.rounds_from)

    def at(self, round_: int) -> Any:
        """Return the value in a round, r >= 1.

        Raises:
            ValueError: the schedule has no start.
        """
        if self.values is not None:
            begins = self.rounds_from or range(1, len(self.values) + 1)
            return self.values[sum(begin <= round_ for begin in begins) - 1]
        if self.start is None:
            raise ValueError("start: there is no number to start from")
        warmup = self.warmup or 0
        if round_ <= warmup:
            return self.start * round_ / (warmup + 1)
        return self._after_warmup(self.start, round_ - 1 - warmup)

    def _after_warmup(self, start: float, t: int) -> float:
        if self.kind in BOUNDED:
            end, span = self.end or 0.0, (self.rounds or 1) - (self.warmup or 0)
            part = min(t, span) / span
            return start + (end - start) * (part if self.kind == "linear" else (1 - math.cos(math.pi * part)) / 2)
        assert self.factor is not None
        power = t // self.every if self.every is not None else t
        try:
            return float(start * self.factor**power)
        except OverflowError:
            return math.inf

    def turns(self, rounds: int) -> list[int]:
        """Return some of the first `rounds` rounds, which have the least and the largest value."""
        if self.values is not None:
            begins = list(self.rounds_from or range(1, len(self.values) + 1))
            return [begin for begin in begins if begin <= rounds]
        turns = {1, (self.warmup or 0) + 1, self.rounds or 1, (self.rounds or 0) + 1, rounds}
        return sorted(turn for turn in turns if turn <= rounds)


def _faults_of_list(values: tuple[Any, ...], begins: tuple[int, ...] | None) -> Iterator[str]:
    if not values:
        yield "values: must have at least one"
    if not all(isinstance(value, bool | int | float | str) for value in values):
        yield f"values: must be numbers, strings, true or false, got {list(values)!r}"
    if begins is None:
        return
    if len(begins) != len(values):
        yield f"rounds_from: must be as many as values ({len(values)}), got {len(begins)}"
    are_rounds = all(type(begin) is int for begin in begins)
    if not (are_rounds and begins and begins[0] == 1 and all(a < b for a, b in pairwise(begins))):
        yield f"rounds_from: must be rising rounds that begin with 1, got {list(begins)!r}"


def read_schedule(where: str, table: Mapping[str, Any]) -> RoundSchedule:
    """Read the schedule of one setting from a table of plain values.

    Args:
        where: the name of the setting, for the messages.
        table: the fields of a `RoundSchedule`, lists in place of tuples.

    Raises:
        OverridesRefused: unknown keys, or values that are not allowed; the message lists all faults.
    """
    known = list(RoundSchedule.__slots__)
    faults = [
        f"{where}: {key}: unknown key, got {value!r} (known: {', '.join(known)})"
        for key, value in table.items()
        if key not in known
    ]
    if "kind" not in table:
        faults.append(f"{where}: kind: missing (allowed: {', '.join(FIELDS)})")
    faults += [
        f"{where}: {name}: must be a list, got {table[name]!r}"
        for name in ("values", "rounds_from")
        if not isinstance(table.get(name, []), list | tuple)
    ]
    if faults:
        raise OverridesRefused(*faults)
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    try:
        return RoundSchedule(**given)
    except ValueError as error:
        raise OverridesRefused(*(f"{where}: {fault.removeprefix('schedule.')}" for fault in faults_in(error))) from None
