"""Files of sites whose statistics are added."""

import csv

import numpy as np
import pytest

from tests.federation.statistics import csv_sites_task


@pytest.fixture
def sites():
    """Name the sites that have a file."""
    return "abcde"


@pytest.fixture
def rows(tmp_path, sites):
    """Write the file of each site, and return its features and outcomes."""
    found = {}
    for number, site in enumerate(sites):
        draws = np.random.default_rng(number)
        size = 30 + 10 * number
        features = draws.normal([60, 120, 1e9], [20, 20, 7], size=(size, 3))
        features[draws.random((size, 3)) < 0.1] = np.nan
        features[0, 0] = 130.0  # beyond the last edge
        outcomes = draws.integers(0, 4, size)
        with (tmp_path / f"{site}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["split", *csv_sites_task.FEATURES, "outcome"])
            for row, outcome in zip(features, outcomes, strict=True):
                table.writerow(["train", *("" if np.isnan(x) else repr(float(x)) for x in row), outcome])
        found[site] = features, outcomes
    return found
