"""Runs side by side, simulated and deployed: their differing settings, and a metric over rounds, bytes or time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.interface.deployed import DeployedRun
from atoll.interface.errors import AtollError
from atoll.interface.figures import main_of, metric_of
from atoll.interface.simulated import SimulatedRun
from atoll.protocol.json_values import flat
from atoll.protocol.paging import COUNT_MAX

Run = SimulatedRun | DeployedRun

AXES = {"round": 0, "bytes": 1, "seconds": 2}
"""What a metric is drawn over, by its place in a measurement: rounds; bytes both ways; virtual seconds.

Of a deployed run the rounds are its versions, the bytes those received, and the seconds real ones since its creation.
"""

POINTS_MAX = 1_000
"""Largest number of points of a curve; of more the extremes of each interval are kept."""

NOT_COMPARED = ("name", "simulation.engine", "simulation.workers")
"""Settings that say nothing about what a run computes."""

At = tuple[float, float | None, float | None]
"""Where a value was measured: round, bytes, seconds; None: unknown."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the runs.

    Args:
        row: its state, version, rounds, bytes and seconds.
        settings: its settings by dotted names.
        points: its measurements by metric, GROUP/NAME, in the order of the rounds.
    """

    row: Mapping[str, Any]
    settings: Mapping[str, Any]
    points: Mapping[str, Sequence[tuple[At, float]]]


def side_by_side(runs: Mapping[str, Run], metric: str = "", over: str = "round") -> dict[str, Any]:
    """Compare runs by what they have measured so far; a run that cannot be read is left out, with the reason.

    Args:
        runs: the runs by their names.
        metric: the metric, such as `server/accuracy`, or `accuracy`; empty: the first of all runs that is no loss.
        over: one of `AXES`.

    Returns:
        In plain values: `metric`, `metrics` that some run has, `over`; of each run the `name`, state, version, rounds,
        `final` and `best` value, bytes and seconds as `runs`; the differing `settings`, each with a value for each run;
        `curves` by name, as points (x, value); and by name why a run is `left_out`, or has no curve.

    Raises:
        AtollError: no run has measured the metric, or there is no such axis.
    """
    if over not in AXES:
        raise AtollError(f"over: got {over!r}; allowed: {', '.join(AXES)}")
    sides, left_out = dict[str, _Side](), dict[str, str]()
    for name, run in runs.items():
        try:
            sides[name] = _simulated(run) if isinstance(run, SimulatedRun) else _deployed(run)
        except AtollError as error:
            left_out[name] = " ".join(error.faults)
    known = list(dict.fromkeys(each for side in sides.values() for each in side.points))
    of_all = [each for each in known if all(each in side.points for side in sides.values())]
    chosen = metric_of(known, metric or main_of(of_all or known)) if known or metric else ""
    rows, curves = [], dict[str, list[tuple[float, float]]]()
    for name, side in sides.items():
        points = side.points.get(chosen, ())
        rows.append({"name": name, **side.row, **_ends(chosen, [value for _, value in points])})
        curve = [(x, value) for at, value in points if (x := at[AXES[over]]) is not None]
        if curve:
            curves[name] = _thinned(curve)
        elif chosen:
            left_out[name] = f"its {over} are not known" if points else f"it has not measured {chosen}"
    settings = differing({name: side.settings for name, side in sides.items()})
    found = {"metric": chosen or None, "metrics": known, "over": over, "runs": rows, "settings": settings}
    return {**found, "curves": curves, "left_out": left_out}


def differing(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that differ between runs, each with its value in each run; None: it is not set, or empty.

    Args:
        settings: of each run, by dotted names.
    """
    names = sorted({name for one in settings.values() for name in one} - {*NOT_COMPARED})
    empty: tuple[Any, ...] = ("", {}, [])
    of_each = {name: [one.get(name) for one in settings.values()] for name in names}
    values = {name: [None if value in empty else value for value in each] for name, each in of_each.items()}
    return [
        {"setting": name, "values": each} for name, each in values.items() if any(value != each[0] for value in each)
    ]


def _simulated(run: SimulatedRun) -> _Side:
    document, report = run.document, run.report
    points = {}
    for metric in report.metrics:
        places = zip(*(report.curve(metric, axis)[0] for axis in ("round", "bytes", "virtual_s")), strict=True)
        points[metric] = [*zip(places, report.curve(metric)[1], strict=True)]
    row = {name: document[name] for name in ("state", "version", "rounds")}
    row |= {"bytes": report.bytes, "seconds": report.rounds[-1]["virtual_s"] if report.rounds else None}
    return _Side(row, flat(report.settings), _numbers(points))


def _deployed(run: DeployedRun) -> _Side:
    document = run.document
    begun, ended = float(document["created_at"]), document["ended_at"]
    rounds = run.page("rounds", count=COUNT_MAX, last=True).rows
    is_whole = bool(rounds) and int(rounds[0]["round"]) == 1
    places, received = dict[int, tuple[float | None, float]](), 0.0
    for each in rounds:
        received += int(each.get("num_bytes") or each.get("bytes_up") or 0)
        if each.get("version") is not None and each["ended_at"] is not None:
            places[int(each["version"])] = (received if is_whole else None, each["ended_at"] - begun)
    points: dict[str, list[tuple[At, Any]]] = {}
    for version, by_source in sorted((int(version), found) for version, found in document["metrics"].items()):
        bytes_, seconds = places.get(version, (0.0, 0.0) if version == 0 else (None, None))
        for source, values in by_source.items():
            for name, value in values.items():
                points.setdefault(f"{source}/{name}", []).append(((version, bytes_, seconds), value))
    row = {name: document[name] for name in ("state", "version", "rounds")}
    row |= {"bytes": received if is_whole else None, "seconds": None if ended is None else ended - begun}
    return _Side(row, flat(document["settings"]), _numbers(points))


def _numbers(points: Mapping[str, Iterable[tuple[At, Any]]]) -> dict[str, list[tuple[At, float]]]:
    """Return the measurements that are finite numbers, of the metrics that have some."""
    found = {metric: [(at, float(value)) for at, value in each if _is_finite(value)] for metric, each in points.items()}
    return {metric: each for metric, each in found.items() if each}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and float("-inf") < value < float("inf")


def _ends(metric: str, values: Sequence[float]) -> dict[str, float | None]:
    from atoll.task.metrics import is_loss

    if not values:
        return {"final": None, "best": None}
    return {"final": values[-1], "best": (min if is_loss(metric) else max)(values)}


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    from atoll.server.views.thinning import kept

    return [points[place] for place in kept([value for _, value in points], POINTS_MAX)]
