"""The metrics of a simulated run's sites, in the same form as for deployed runs (`server.views.sites`)."""

from collections.abc import Iterable, Mapping
from typing import Any

from atoll.server.views.sites import Measurement
from atoll.server.views.sites import sites as of_measurements

Document = dict[str, Any]

EVALUATION, TRAINING = "client_values", "train_values"
"""Keys of a round's line with the values of each client, by its evaluation and by its training."""


def sites(lines: Iterable[Mapping[str, Any]]) -> Document:
    """Return the metrics of the sites by `evaluation` and by `training`, from the lines of the rounds."""
    rounds = list(lines)
    return {"evaluation": _part(rounds, EVALUATION), "training": _part(rounds, TRAINING)}


def _part(rounds: list[Mapping[str, Any]], key: str) -> Document:
    """Return the document of one kind; a training belongs to the version that it began from."""
    begins_before = int(key == TRAINING)
    return of_measurements(
        [
            Measurement(site, line["version"] - begins_before, values)
            for line in rounds
            if line.get(key) and line["version"]
            for site, values in line[key].items()
        ]
    )
