"""Curves of several runs on one horizontal axis: their values at one position, and the band of mean and deviation.

A curve is a step function: between two measurements it has the value of the earlier one. It has none before the first
and none after the last measurement, so nothing is extrapolated. Pure.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.simulations.experiments.report import Axis, RunReport


@dataclass(frozen=True, slots=True)
class By:
    """Horizontal axis by which runs of different modes are compared."""

    axis: Axis
    to_target: str
    """Column of the table with the position at which the target is reached."""
    label: str


AXES = {
    "updates": By("updates", "updates_to_target", "updates counted"),
    "bytes": By("bytes", "bytes_to_target", "bytes, both ways"),
    "time": By("virtual_s", "virtual_s_to_target", "virtual time [s]"),
    "rounds": By("round", "rounds_to_target", "round"),
    "seconds": By("real_s", "real_s_to_target", "real time [s]"),
}
"""Axes by the values of `--by`."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a value over several runs."""

    mean: float | None
    """Mean over the runs that have the value; None: no run has it, or too few (`unless_all`)."""
    std: float | None
    """Sample standard deviation, with n - 1; None for fewer than two."""
    n: int
    """Number of runs that have the value."""
    of: int
    """Number of all runs."""

    def __str__(self) -> str:
        if self.mean is None:
            return f"- ({self.n} of {self.of})" if self.n else "-"
        spread = "" if self.std is None else f" ± {number(self.std)}"
        return f"{number(self.mean)}{spread}" + (f" ({self.n} of {self.of})" if self.n < self.of else "")

    @property
    def unless_all(self) -> "Mean":
        """The mean if all runs have the value; the mean over only those runs that reach a target would be too small."""
        return self if self.n == self.of else Mean(None, None, self.n, self.of)


def mean_of(values: Sequence[float | None]) -> Mean:
    """Compute mean and sample deviation of the values that are not None."""
    present = [value for value in values if value is not None]
    if not present:
        return Mean(None, None, 0, len(values))
    mean = math.fsum(present) / len(present)
    squares = math.fsum((value - mean) ** 2 for value in present)
    std = math.sqrt(squares / (len(present) - 1)) if len(present) > 1 else None
    return Mean(mean, std, len(present), len(values))


def number(value: float) -> str:
    """Format a number with four significant digits; whole numbers in full."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10_000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Curve:
    """Measurements of a metric in one run: non-decreasing positions, and the values there."""

    xs: Sequence[float]
    ys: Sequence[float]

    def at(self, x: float) -> float | None:
        """Return the last value at or before a position; None: it lies outside of the measurements."""
        if not self.xs or not self.xs[0] <= x <= self.xs[-1]:
            return None
        return self.ys[bisect_right(self.xs, x) - 1]


@dataclass(frozen=True, slots=True)
class Band:
    """Mean and deviation of curves, at every position where one of them was measured and all of them have a value."""

    xs: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...] | None
    """Sample standard deviations, with n - 1; None: there is only one curve."""
    n: int
    """Number of curves."""
    are_aligned: bool
    """Whether all curves were measured at the same positions."""


def band_of(curves: Sequence[Curve]) -> Band:
    """Compute the band of some curves, ignoring curves without measurements."""
    present = [curve for curve in curves if curve.xs]
    if not present:
        return Band((), (), None, 0, True)
    first, last = max(curve.xs[0] for curve in present), min(curve.xs[-1] for curve in present)
    xs = sorted({x for curve in present for x in curve.xs if first <= x <= last})
    means = [mean_of([curve.at(x) for curve in present]) for x in xs]
    return Band(
        tuple(xs),
        tuple(mean.mean for mean in means if mean.mean is not None),
        None if len(present) == 1 else tuple(mean.std or 0.0 for mean in means),
        len(present),
        all(list(curve.xs) == list(present[0].xs) for curve in present),
    )


def largest_common(curves: Iterable[Curve]) -> float | None:
    """Return the last position at which every curve has a value; None: no curve has one."""
    return min((curve.xs[-1] for curve in curves if curve.xs), default=None)


@dataclass(frozen=True)
class Repeats:
    """Runs that differ only in the seed, or in other settings that are averaged over."""

    name: str
    """Name in legends."""
    runs: tuple[RunReport, ...]
    """The runs, at least one."""

    def band(self, metric: str, over: Axis) -> Band:
        """Return the band of a metric."""
        return band_of([Curve(*run.curve(metric, over)) for run in self.runs])


def each(reports: Iterable[RunReport | Repeats]) -> list[Repeats]:
    """Wrap each run as a repeat of one."""
    return [one if isinstance(one, Repeats) else Repeats(one.name, (one,)) for one in reports]
