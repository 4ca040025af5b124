"""The metrics of single sites: of the newest version, and over the versions. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.parallel.task.metrics import is_loss
from atoll.server.journal.journal import EvaluationRow

Document = dict[str, Any]

ROWS_MAX = 100_000
"""The largest number of measurements in a document: the oldest versions are left out beyond it."""


def sites(rows: Iterable[EvaluationRow], prefix: str) -> Document:
    """Return the metrics of the sites by evaluations, or by trainings.

    Args:
        rows: the evaluations of single sites, by version.
        prefix: the beginning of their source (`sources.SITE` or `sources.TRAINING`); others are left out.

    Returns:
        `version`: the newest with a row, None without one; `sites`: the values of this version by site and metric;
        `metrics`: their `spread`; `not_shown`: the newest reason of each site without; `curves`: by site and metric,
        pairs of version and value.
    """
    chosen = [row for row in rows if row.source.startswith(prefix)][-ROWS_MAX:]
    newest = max((row.version for row in chosen), default=None)
    last = {row.source.removeprefix(prefix): row for row in chosen}  # the newest row of each site
    shown = {site: row for site, row in last.items() if row.version == newest and row.statistics is not None}
    values = {site: dict(row.values) for site, row in shown.items()}
    return {
        "version": newest,
        "sites": values,
        "metrics": spreads(values),
        "not_shown": {site: row.detail for site, row in last.items() if row.statistics is None},
        "curves": _curves(chosen, prefix),
    }


def _curves(rows: Sequence[EvaluationRow], prefix: str) -> Document:
    curves: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    for row in rows:
        for metric, value in row.values.items() if row.statistics is not None else ():
            of_site = curves.setdefault(row.source.removeprefix(prefix), {})
            of_site.setdefault(metric, []).append((row.version, value))
    return curves


def spreads(values: Mapping[str, Mapping[str, float | None]]) -> dict[str, Document]:
    """Return the spread of each metric over the sites that have a value of it."""
    of_metric: dict[str, dict[str, float]] = {}
    for site, measured in values.items():
        for metric, value in measured.items():
            if value is not None and math.isfinite(value):
                of_metric.setdefault(metric, {})[site] = value
    return {metric: spread(metric, of_sites) for metric, of_sites in sorted(of_metric.items())}


def spread(metric: str, values: Mapping[str, float]) -> Document:
    """Return mean and standard deviation (with 1/n) over the sites, all with the same weight, the worst and the best.

    Args:
        metric: its name; of a loss, an error or a perplexity the largest value is the worst, else the smallest.
        values: by site, at least one, finite.
    """
    mean = math.fsum(values.values()) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values.values()) / len(values)
    ascending = sorted(values, key=lambda site: (values[site], site))
    worst, best = (ascending[-1], ascending[0]) if is_loss(metric) else (ascending[0], ascending[-1])
    return {
        "mean": mean,
        "deviation": math.sqrt(variance),
        "num_sites": len(values),
        "worst": {"site": worst, "value": values[worst]},
        "best": {"site": best, "value": values[best]},
    }
