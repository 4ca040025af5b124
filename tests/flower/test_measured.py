"""The metrics of an `evaluate_fn` are in a `Result` as the app has returned them, also after a restart."""

import math

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it")

import numpy as np
from flwr.app import MetricRecord

from atoll.flower.measured import Measured

METRICS = {"loss": 0.1, "seen": 2**60 + 1, "hist": [1, 2], "curve": [0.5, 1.0], "none": [], "bad": math.nan, "": -0.0}


def test_metrics_come_back_as_they_were_also_in_another_process(tmp_path):
    first = Measured(tmp_path / "app")
    first.add(0, MetricRecord({"seen": 1}))
    first.add(2, MetricRecord({"seen": 9}))
    first.add(2, MetricRecord(METRICS))
    first.add(7, {"loss": np.float32(0.5), "seen": np.int64(3)})
    with (tmp_path / "app.measured.jsonl").open("a") as file:
        file.write('{"version": 0, "metr')  # its process was killed
    for measured in (first, Measured(tmp_path / "app")):
        assert (0 in measured, 1 in measured) == (True, False)
        found = measured.records(2)
        assert list(found) == [0, 2]
        assert repr(found[0]) == repr(MetricRecord({"seen": 1}))
        assert repr(dict(found[2])) == repr(METRICS)
        assert repr(dict(measured.records(7)[7])) == "{'loss': 0.5, 'seen': 3}"


def test_without_a_folder_they_are_in_memory():
    measured = Measured(None)
    measured.add(1, MetricRecord({"seen": 1}))
    assert measured.records(1) == {1: MetricRecord({"seen": 1})}
