"""The metrics with which the main() of a Flower app goes on after a deployed run: those of Flower's own Result."""

import math

from atoll.protocol.vocabulary import RunId, Version
from atoll.server.hosting.app_conclusion import history_of
from atoll.server.journal.rows import EvaluationRow

NAN = math.nan


def row(version, source, statistics):
    return EvaluationRow(RunId("app-1"), Version(version), source, statistics, 1, "", 0.0)


def test_each_version_has_a_training_also_without_metrics():
    rows = [row(1, "training:a", {"loss": (1.0, 2.0)}), row(1, "training:b", {"loss": (2.0, 2.0)})]
    found = history_of(Version(3), [*rows, row(2, "clients", {}), row(3, "server", None)])
    assert found == {"train": {"1": {}, "2": {"loss": 0.75}, "3": {}}, "clients": {"2": {}}, "server": {}}


def test_trainings_of_a_version_that_was_not_made_are_left_out():
    assert history_of(Version(1), [row(1, "training:a", {"loss": (1.0, 2.0)})])["train"] == {"1": {}}


def test_a_metric_that_is_not_finite_at_one_client_is_nan_as_in_flower():
    rows = [
        row(0, "training:a", {"loss": (), "acc": (1.0, 1.0)}),
        row(0, "training:b", {"loss": (2.0, 2.0), "acc": (3.0, 1.0)}),
        row(1, "clients", {"loss": (4.0, 2.0), "acc": (3.0, 1.0)}),
        row(1, "site:a", {"loss": ()}),
        row(1, "site:b", {"loss": (4.0, 2.0), "acc": (3.0, 1.0)}),
        row(1, "server", {"norm": ()}),
    ]
    found = history_of(Version(1), rows)
    expected = {"train": {"loss": NAN, "acc": 2.0}, "clients": {"loss": NAN, "acc": 3.0}, "server": {"norm": NAN}}
    assert repr({kind: dict(sorted(rounds["1"].items())) for kind, rounds in found.items()}) == repr(
        {kind: dict(sorted(numbers.items())) for kind, numbers in expected.items()}
    )
