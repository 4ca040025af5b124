"""The metrics of a simulated run's sites, in the form of those of a deployed one (`server.views.sites`)."""

from collections.abc import Iterable, Mapping
from typing import Any

from atoll.server.views.sites import spreads

Document = dict[str, Any]

EVALUATION, TRAINING = "client_values", "train_values"
"""The keys of a round's line with the values of each client, by its evaluation and by its training."""


def sites(lines: Iterable[Mapping[str, Any]]) -> Document:
    """Return the metrics of the sites by `evaluation` and by `training`, from the lines of the rounds."""
    rounds = list(lines)
    return {"evaluation": _part(rounds, EVALUATION), "training": _part(rounds, TRAINING)}


def _part(rounds: list[Mapping[str, Any]], key: str) -> Document:
    """Return the document of one kind; a training belongs to the version that it began from."""
    measured = [
        (line["version"] - (key == TRAINING), line[key]) for line in rounds if line.get(key) and line["version"]
    ]
    version, values = measured[-1] if measured else (None, {})
    curves: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    for number, of_sites in measured:
        for site, metrics in of_sites.items():
            for metric, value in metrics.items():
                curves.setdefault(site, {}).setdefault(metric, []).append((number, value))
    return {"version": version, "sites": values, "metrics": spreads(values), "not_shown": {}, "curves": curves}
