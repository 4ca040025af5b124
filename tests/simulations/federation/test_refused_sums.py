"""A site whose metric is NaN: it is left out of the federation's value, and named."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.data import TensorDataset

from atoll import Metric
from atoll.operations.load import load_user_task
from atoll.simulations.federation.run import opened
from atoll.task.task import Task
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import settings


def refuse(literal: str) -> None:
    raise ValueError(f"{literal} stands bare")


def strange(site: str, split: str) -> TensorDataset:
    """The data of a site, where those of site c have a third class."""
    inputs, targets = line_task.data(site, split).tensors
    return TensorDataset(inputs, torch.full_like(targets, 2) if site == "c" else targets)


def positives(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
    return (math.nan if bool((targets == 2).any()) else float(targets.sum())), len(targets)


REAL = [pytest.param(engine, marks=pytest.mark.real) for engine in ("batched", "processes")]  # they start processes


@pytest.mark.parametrize("engine", ["sequential", *REAL])
def test_a_metric_that_is_nan_at_one_site_is_that_of_the_others_and_names_the_site(tmp_path, engine):
    file = settings("round.cohort_size=4", "rounds=2", "evaluation.clients_every=1", f"simulation.engine={engine}")
    task = load_user_task(file.task)
    assert isinstance(task, Task)
    never = Metric(lambda *_: (1.0,), value=lambda sums: math.nan)
    task = replace(
        task,
        data=strange,
        model=lambda: torch.nn.Linear(3, 3),
        metrics={"positives": positives, "never": never, "accuracy": line_task.correct},
        test_data=lambda: strange("c", "test"),
    )
    with opened(file, task, tmp_path, on_round=lambda line: None, is_fresh=False) as federation:
        federation.run()
    texts = (tmp_path / "rounds.jsonl").read_text().splitlines()
    for line in (json.loads(text, parse_constant=refuse) for text in texts):
        for part, split in (("train", "train"), ("clients", "test")):
            targets = torch.cat([line_task.data(site, split).tensors[1] for site in "abd"])
            assert line[part]["positives"] == pytest.approx(targets.double().mean().item(), rel=1e-12)
            assert line[part]["accuracy"] is not None  # its sums at site c are numbers
            assert line["not_finite"][f"{part}.positives"] == "its sums are NaN, infinite or left out at c"
        assert line["server"]["positives"] is None
        assert line["not_finite"]["server.positives"] == "its sums are NaN, infinite or left out"
        assert line["clients"]["never"] is None
        assert line["not_finite"]["clients.never"] == "NaN"
        assert "clients.accuracy" not in line["not_finite"]
