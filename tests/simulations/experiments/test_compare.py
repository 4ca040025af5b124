import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from atoll.simulations.experiments.compare import (
    Point,
    Pooled,
    Side,
    centralized,
    epochs_of,
    federated,
    passes_of,
    plot,
    pooled,
    rows,
    write,
)
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.task.local import Local
from atoll.task.task import Task
from tests.simulations.experiments.runs import line, write_run


@pytest.fixture
def report(tmp_path: Path) -> RunReport:
    """Return a report on three rounds in which 11 of 22 clients count."""
    run = write_run(tmp_path / "federated", [line(k) for k in (1, 2, 3)])
    (run / "population.json").write_text(json.dumps({"clients": [{}] * 22}))
    return read_run(run)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write the log of six steps, of which every other is logged, with evaluations after the third and the sixth."""
    events: list[dict[str, Any]] = [{"event": "step", "step": k, "seconds": k / 10} for k in (2, 4, 6)]
    events += [
        {"event": "evaluation", "step": k, "epoch": k / 3, "test/accuracy": k / 10, "test/loss": 1 / k, "sites/f1": 0.5}
        for k in (3, 6)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_round_makes_as_many_passes_as_its_clients_hold_of_the_data(report: RunReport) -> None:
    side = federated(report, "server/accuracy", epochs=lambda round_: 2)
    assert [point.passes for point in side.points] == [1, 2, 3]
    assert side.points[1] == Point(2 / 3, 2, 2.0, 3400, 200.0, 4.0)
    assert passes_of(report, epochs=lambda round_: 2) == 3
    assert passes_of(report, epochs=lambda round_: 0.1) == 1


def test_steps_know_the_time_of_the_last_that_was_told(log: Path) -> None:
    side = centralized(log, "server/accuracy", data_bytes=77)
    assert side.points == (Point(0.3, 3, 1.0, 77, None, 0.2), Point(0.6, 6, 2.0, 77, None, 0.6))
    assert [point.value for point in centralized(log, "clients/f1", data_bytes=0).points] == [0.5, 0.5]
    assert centralized(log, "server/f1", data_bytes=0).points == ()


def test_a_table_has_a_row_for_each_and_one_for_the_way_to_the_target(report: RunReport, log: Path) -> None:
    sides = [
        federated(report, "server/accuracy", epochs=lambda round_: 1),
        centralized(log, "server/accuracy", data_bytes=77),
    ]
    found = rows(sides, 0.6)
    assert [row[""] for row in found] == ["federated", "federated, to 0.6", "centralized", "centralized, to 0.6"]
    assert [row["length"] for row in found] == ["3 rounds", "2 rounds", "6 steps", "6 steps"]
    assert [row["best"] for row in found] == [0.75, None, 0.6, None]
    assert rows(sides, 0.9)[1] == dict.fromkeys(found[0]) | {"": "federated, to 0.9"}
    assert len(rows(sides, None)) == 2


def test_of_a_loss_smaller_is_better() -> None:
    points = tuple(Point(value, k, 0.0, 0, None, 0.0) for k, value in enumerate((0.9, 0.3, 0.5)))
    side = Side("centralized", "steps", "server/loss", points)
    assert side.best == 0.3
    assert side.reached(0.6) == points[1]


@pytest.mark.parametrize(
    ("local", "epochs"),
    [
        (Local(epochs=3), 3),
        (Local(epochs=3, max_steps=5, batch_size=10), 0.5),  # 50 of the 100 examples of a client
        (Local(epochs=1, max_steps=50, batch_size=10), 1),
        (Local(epochs=4, batch_size=None), 4),
        (Local(epochs=4, batch_size=None, max_steps=2), 2),  # a step is a pass
    ],
)
def test_a_client_makes_as_many_passes_as_it_may(local: Local, epochs: float) -> None:
    assert epochs_of(local, num_examples=1000, num_clients=10) == epochs


def test_the_pooled_data_is_as_large_as_its_tensors() -> None:
    def load(site: str, split: str) -> TensorDataset | None:
        return None if site == "empty" else TensorDataset(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))

    task = Task(model=torch.nn.Identity, data=load, sites=["a", "empty", "b"], loss=torch.nn.functional.mse_loss)
    assert pooled(task) == Pooled(10, 10 * (3 * 4 + 8))


@pytest.mark.slow
def test_everything_is_written_for_a_script_and_drawn_for_a_person(
    report: RunReport, log: Path, tmp_path: Path
) -> None:
    sides = [
        federated(report, "server/accuracy", epochs=lambda round_: 1),
        centralized(log, "server/accuracy", data_bytes=77),
    ]
    write(sides, 0.6, tmp_path / "compare.json")
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["curves"]["centralized"] == [[1.0, 0.2, 0.3], [2.0, 0.6, 0.6]]
    assert plot(sides, tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
