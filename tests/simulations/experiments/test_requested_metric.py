"""The check of a requested metric, by the task at the start and by the rounds later."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.protocol.settings import ConfigError
from atoll.simulations.experiments.grid import Cell
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.experiments.requested_metric import RequestedMetric
from tests.simulations.experiments.runs import line, write_run
from tests.simulations.federation.line_task import task

GROUPS = (
    "allowed: GROUP/NAME, where GROUP is one of server, clients, train, honest_clients, honest_train, such as "
    "server/loss"
)


class Arrays:
    """An ArrayTask for this test: it names no metrics."""


def cells(**settings: Any) -> list[Cell]:
    plain, measuring = {}, {key.replace("__", "."): value for key, value in settings.items()}
    return [Cell({}, plain, "t:t"), Cell({}, measuring, "t:t")]


def run(folder: Path, *changes: dict[str, Any]) -> RunReport:
    return read_run(write_run(folder, [line(number, **each) for number, each in enumerate(changes, 1)]))


@pytest.mark.parametrize("metric", ["server/accuracy", "server/loss", "train/loss", "train/accuracy"])
def test_a_task_names_its_metrics_and_has_a_loss(metric: str) -> None:
    RequestedMetric(metric, "m").check_start(task, cells())


@pytest.mark.parametrize(
    ("metric", "changed", "fault"),
    [
        ("server/accuracies", {}, "allowed: server/accuracy, server/loss"),
        ("server/loss", {"test_data": None}, "it will not be measured, because the task has no test_data"),
        ("train/loss", {"fit": lambda *_: 1.0}, "it will not be measured, because the task has a custom fit"),
        ("clients/loss", {}, "it will not be measured, because evaluation.clients_every is 0"),
        (
            "nobody/loss",
            {},
            GROUPS,
        ),
        (
            "server/",
            {},
            GROUPS,
        ),
    ],
)
def test_what_no_round_can_have_is_refused(metric: str, changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RequestedMetric(metric, "m").check_start(replace(task, **changed), cells())
    assert refusal.value.faults == (f"m: got {metric!r}; {fault}",)


def test_one_cell_that_measures_is_enough() -> None:
    RequestedMetric("clients/loss", "m").check_start(task, cells(evaluation__clients_every=5))


def test_of_a_task_that_names_nothing_rounds_must_tell(tmp_path: Path) -> None:
    wanted = RequestedMetric("server/r2", "m")
    wanted.check_start(Arrays(), cells())  # type: ignore[arg-type]
    assert not wanted.is_measured([], is_over=False)
    assert not wanted.is_measured([run(tmp_path / "a", {"server": None})], is_over=False)
    assert wanted.is_measured([run(tmp_path / "b", {"server": None}, {"server": {"r2": None}})], is_over=False)
    with pytest.raises(ConfigError, match=r"m: got 'server/r2'; the runs measure server/mse, train/loss"):
        wanted.is_measured([run(tmp_path / "c", {"server": {"mse": 1.0}})], is_over=False)
    with pytest.raises(ConfigError, match=r"the runs measure train/loss"):
        wanted.is_measured([run(tmp_path / "a", {"server": None})], is_over=True)
