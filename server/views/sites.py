"""The metrics and the meshes of single sites: for the newest version, and over the versions. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.protocol.value_type import value
from atoll.server.journal.rows import EvaluationRow
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.thinning import thinned
from atoll.task.metrics import is_loss

Document = dict[str, Any]

ROWS_MAX = 100_000
"""Largest number of measurements in a document; the oldest versions beyond it are omitted."""


@value
class Measurement:
    """Metrics of one site from one evaluation or training, or the reason for none."""

    site: str
    version: int
    values: Mapping[str, float | None] | None
    why_not: str = ""


def measurements(rows: Iterable[EvaluationRow], prefix: str) -> list[Measurement]:
    """Return the measurements in the rows whose source has this prefix (`sources.SITE` or `sources.TRAINING`)."""
    return [
        Measurement(
            row.source.removeprefix(prefix), row.version, row.values if row.statistics is not None else None, row.detail
        )
        for row in rows
        if row.source.startswith(prefix)
    ]


def sites(measured: Sequence[Measurement], *, whole: bool = True) -> Document:
    """Return the metrics of the sites by evaluations, or by trainings.

    Args:
        measured: the measurements, in the order of the versions.
        whole: whether the curves have all points, instead of at most 2,000 each.

    Returns:
        `version`: the newest with a measurement, None without one; `sites`: the values of this version by site and
        metric; `metrics`: their `spread`; `not_shown`: the newest reason of each site without values; `curves`: by site
        and metric, pairs of version and value.
    """
    chosen = measured[-ROWS_MAX:]
    newest = max((each.version for each in chosen), default=None)
    last = {each.site: each for each in chosen}
    values = {
        site: dict(each.values) for site, each in last.items() if each.version == newest and each.values is not None
    }
    return {
        "version": newest,
        "sites": values,
        "metrics": spreads(values),
        "not_shown": {site: each.why_not for site, each in last.items() if each.values is None},
        "curves": _curves(chosen, whole=whole),
    }


def meshes(records: Iterable[RoundRecord]) -> Document:
    """Return the use of each site's mesh, by site, in the newest of the rounds in which the site has trained."""
    found: Document = {}
    for record in records:
        for client_id, client in sorted(record.clients.items()):
            if client.mesh:
                found[client_id] = {"round": record.round_id, **client.mesh.document}
    return found


def _curves(measured: Sequence[Measurement], *, whole: bool) -> Document:
    curves: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    for each in measured:
        for metric, found in (each.values or {}).items():
            curves.setdefault(each.site, {}).setdefault(metric, []).append((each.version, found))
    if whole:
        return curves
    return {site: {metric: thinned(line) for metric, line in lines.items()} for site, lines in curves.items()}


def spreads(values: Mapping[str, Mapping[str, float | None]]) -> dict[str, Document]:
    """Return the spread of each metric over the sites with a value."""
    of_metric: dict[str, dict[str, float]] = {}
    for site, measured in values.items():
        for metric, found in measured.items():
            if found is not None and math.isfinite(found):
                of_metric.setdefault(metric, {})[site] = found
    return {metric: spread(metric, of_sites) for metric, of_sites in sorted(of_metric.items())}


def spread(metric: str, values: Mapping[str, float]) -> Document:
    """Return mean and standard deviation (with 1/n) over the sites, equally weighted, the worst and the best.

    Args:
        metric: its name; of a loss, an error or a perplexity the largest value is the worst, else the smallest.
        values: the values, by site, at least one, finite.
    """
    mean, deviation = _moments([*values.values()])
    ascending = sorted(values, key=lambda site: (values[site], site))
    worst, best = (ascending[-1], ascending[0]) if is_loss(metric) else (ascending[0], ascending[-1])
    return {
        "mean": mean,
        "deviation": deviation,
        "num_sites": len(values),
        "worst": {"site": worst, "value": values[worst]},
        "best": {"site": best, "value": values[best]},
    }


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (with 1/n) of finite values, of any size: sites may send what they like."""
    try:
        mean = math.fsum(values) / len(values)
        return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    except OverflowError:  # a sum or a square is too large; scaled ones are at most 1 and 4
        top = max(map(abs, values))
        mean, deviation = _moments([value / top for value in values])
        return mean * top, deviation * top
