"""The bound of every wait of the tests for something that must happen."""

import os

VARIABLE = "ATOLL_TEST_BOUND_S"
"""The environment variable that shortens the waits: for tests that are expected to fail by one (`tests/mutants.py`)."""

BOUND_S = float(os.environ.get(VARIABLE, "150"))
"""Seconds: no expectation, but the end of a hang. It must suffice beside twenty busy processes on two cores."""
