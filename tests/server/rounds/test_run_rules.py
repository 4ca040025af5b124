"""Early stop, beside a loop of its own, and the better of two values."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.vocabulary import Version
from atoll.server.rounds.run_rules import EarlyStop, MeasuredVersion, Progress, WatchedMetric, value_in

AUROC = WatchedMetric("auroc", "clients", "max")
LOSS = WatchedMetric("loss", "server", "min")


def ends_at(stop: EarlyStop, values: Sequence[float]) -> tuple[int, str]:
    """Return the first version at which a run ends, with the cause; 0: it goes on."""
    progress: Progress | None = None
    for number, value in enumerate(values, start=1):
        measured = MeasuredVersion(Version(number), value)
        progress = stop.after(progress, measured)
        if cause := stop.cause(progress, measured):
            return number, cause
    return 0, ""


def keras(values: Sequence[float], patience: int, min_delta: float, *, is_max: bool) -> int:
    """`keras.callbacks.EarlyStopping`: the number of the epoch after which it stops; 0: it does not."""
    best, wait = (float("-inf") if is_max else float("inf")), 0
    for epoch, current in enumerate(values, start=1):
        wait += 1
        if (current - min_delta > best) if is_max else (current + min_delta < best):
            best, wait = current, 0
        if wait >= patience and epoch > 1:
            return epoch
    return 0


@given(
    st.lists(st.integers(-20, 20).map(lambda k: k / 4), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.booleans(),
)
def test_patience_ends_where_that_of_keras_does(values: list[float], patience: int, least: float, is_max: bool) -> None:
    stop = EarlyStop(WatchedMetric("m", "server", "max" if is_max else "min"), patience, least)
    assert ends_at(stop, values)[0] == keras(values, patience, least, is_max=is_max)


@pytest.mark.parametrize(
    ("metric", "values", "target", "end"),
    [(AUROC, [0.5, 0.9, 0.95], 0.9, 2), (LOSS, [0.5, 0.3, 0.2], 0.25, 3), (AUROC, [0.5, 0.6], 0.7, 0)],
)
def test_a_target_ends_a_run_when_it_is_reached(
    metric: WatchedMetric, values: list[float], target: float, end: int
) -> None:
    assert ends_at(EarlyStop(metric, target=target), values)[0] == end


def test_the_cause_names_metric_values_and_rule() -> None:
    stop = EarlyStop(AUROC, 2, 0.01, target=0.9)
    assert ends_at(stop, [0.5, 0.8, 0.805, 0.79]) == (
        4,
        "early stop: auroc (clients) has not improved by more than 0.01 in 2 evaluations, its best is 0.8 at version 2",
    )
    assert ends_at(stop, [0.91]) == (1, "early stop: auroc (clients) is 0.91 at version 1, and its target is 0.9")


def test_a_value_counts_for_a_metric_of_the_same_data_alone() -> None:
    values = {"auroc": 0.5, "loss": None}
    assert value_in(AUROC, values, "clients") == 0.5
    assert value_in(AUROC, values, "server") is None
    assert value_in(LOSS, values, "server") is None
    assert value_in(LOSS, {}, "server") is None
