"""The papers' count of rounds: the running best, with straight lines between the measurements."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.simulations.experiments.report import RunReport
from benchmarks.papers.goal import Goal

ACCURACY = Goal("server/accuracy", 0.9)


def report(values: list[float | None], name: str = "accuracy") -> RunReport:
    lines = tuple(
        {"round": number, "virtual_s": 0.0, "real_s": 0.0, "bytes_up": 0, "bytes_down": 0, "server": {name: value}}
        for number, value in enumerate(values, 1)
    )
    return RunReport("run", Path("run"), {}, lines, {}, {})


@pytest.mark.parametrize(
    ("values", "rounds"),
    [
        ([0.95], 1.0),
        ([0.8, 1.0], 1.5),  # halfway between the rounds
        ([0.8, 0.5, 1.0], 2.5),  # the fall to 0.5 does not count: the best so far is 0.8
        ([0.8, None, 0.9], 3.0),  # a round that was not measured
        ([0.1, 0.2], None),
        ([], None),
    ],
)
def test_the_crossing_of_the_best_so_far(values: list[float | None], rounds: float | None) -> None:
    assert ACCURACY.rounds_of(report(values)) == pytest.approx(rounds)


def test_a_loss_has_to_fall() -> None:
    assert Goal("server/loss", 1.0).rounds_of(report([3.0, 4.0, 0.0], "loss")) == pytest.approx(2 + 2 / 3)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.floats(0.01, 1))
def test_it_is_where_the_monotonic_curve_has_the_value(values: list[float], goal: float) -> None:
    best = np.maximum.accumulate(values)
    found = Goal("server/accuracy", goal).rounds_of(report([float(value) for value in values]))
    if best[-1] < goal:
        assert found is None
    else:
        assert found is not None
        assert np.interp(found, np.arange(1, len(values) + 1), best) == pytest.approx(goal, abs=1e-9) or found == 1


@pytest.mark.parametrize(
    ("line", "is_met"),
    [({"server": {"accuracy": 0.9}}, True), ({"server": {"accuracy": 0.89}}, False), ({"server": None}, False)],
)
def test_a_line_meets_it_or_not(line: dict[str, object], is_met: bool) -> None:
    assert ACCURACY.is_met_by(line) is is_met
