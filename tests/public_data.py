"""Tests on public data sets, which not every machine has."""

import os

import pytest

needs_data = pytest.mark.skipif(
    "ATOLL_DATA" not in os.environ,
    reason="set ATOLL_DATA to the folder of public data sets (docs/data.md): then `make test` runs it",
)
