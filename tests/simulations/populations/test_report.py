"""The report on a population, against the formulas of other libraries, and its plot."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from atoll.simulations.populations import plot as drawing
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.plot import NoPlots, plot
from atoll.simulations.populations.population import populate
from atoll.simulations.populations.report import Report, report
from atoll.task.task import Task
from examples.datasets.folder import data_folder
from examples.datasets.idx import read_idx
from tests.later import later
from tests.public_data import needs_data
from tests.simulations.populations.tasks import digits, digits_task, labelled, task_of

stats, distance = later("scipy.stats"), later("scipy.spatial.distance")

PNG = b"\x89PNG\r\n\x1a\n"


def reported(task: Task, **settings: object) -> Report:
    return report(populate(PopulationConfig(**settings), task, seed=0))  # type: ignore[arg-type]


def of_digits(**settings: object) -> Report:
    return reported(digits_task, **settings)


def test_the_report_counts_what_the_clients_hold() -> None:
    held = populate(PopulationConfig(kind="dirichlet", clients=15, alpha=1.0), digits_task, seed=0)
    found = report(held)
    for row in found.clients:
        train, test = (held.task.data(row.client, split) for split in ("train", "test"))
        digits_there, counts = np.unique([int(train[k][1]) for k in range(len(train))], return_counts=True)
        assert row.labels == {str(d): n for d, n in zip(digits_there, counts, strict=True)}
        assert (row.examples, row.test_examples) == (len(train), 0 if test is None else len(test))
    sizes = [row.examples for row in found.clients]
    assert (found.examples_min, found.examples_median, found.examples_max) == (
        *(min(sizes), float(np.median(sizes)), max(sizes)),
    )
    assert (found.examples, found.test_examples) == (1437, 360)
    assert json.loads(json.dumps(found.plain()))["clients"][3]["client"] == "c0003"


def test_entropy_and_distance_are_those_of_scipy() -> None:
    report = of_digits(kind="dirichlet", clients=15, alpha=0.7)
    summary = report.labels
    assert summary is not None
    pooled = np.array(summary.counts)
    assert pooled.tolist() == np.bincount(digits()[0].tensors[1]).tolist()
    own = [[(row.labels or {}).get(str(d), 0) for d in range(10)] for row in report.clients]
    assert summary.entropy_pooled == pytest.approx(stats.entropy(pooled, base=2))
    assert summary.entropy_mean == pytest.approx(np.mean([stats.entropy(row, base=2) for row in own]))
    distances = [distance.cityblock(np.array(row) / sum(row), pooled / pooled.sum()) / 2 for row in own]
    assert summary.total_variation_mean == pytest.approx(np.mean(distances))


def test_skew_grows_as_alpha_falls_from_iid_to_one_label_each() -> None:
    found = [of_digits(kind="dirichlet", clients=20, alpha=a, balanced=True).labels for a in (1e7, 10.0, 1.0, 1e-3)]
    distances = [summary.total_variation_mean for summary in found if summary is not None]
    assert distances == sorted(distances)
    iid = of_digits(kind="iid", clients=20).labels
    assert iid is not None
    assert distances[0] == pytest.approx(iid.total_variation_mean, abs=0.05)
    assert distances[-1] > 0.8  # 0.9 is one digit of ten each
    assert found[-1] is not None
    assert found[-1].per_client_median == 1


def test_shards_of_digits_hold_few_digits() -> None:
    summary = of_digits(kind="shards", clients=20).labels
    assert summary is not None
    assert summary.per_client_max <= 4
    assert summary.per_client_median in (2, 3)


@needs_data
def test_two_shards_of_mnist_give_most_of_100_clients_two_digits() -> None:
    """McMahan et al. 2017, section 3."""
    labels = read_idx(data_folder("mnist") / "train-labels-idx1-ubyte.gz")
    task = task_of({"all": labelled(labels)})
    report = reported(task, kind="shards", clients=100)
    assert (report.examples_min, report.examples_max) == (600, 600)
    summary = report.labels
    assert summary is not None
    assert summary.per_client_median == 2
    assert summary.per_client_max <= 4
    # 9 of the 200 shards have two digits, for no digit is a multiple of 300: at most 9 clients have more than two
    assert sum(len(row.labels or {}) > 2 for row in report.clients) <= 9
    assert sum(len(row.labels or {}) == 2 for row in report.clients) >= 75


def test_targets_that_are_no_labels_have_sizes_alone() -> None:
    task = task_of({"a": TensorDataset(torch.rand(30, 2), torch.rand(30))})
    report = reported(task, kind="quantity", clients=4, alpha=1.0)
    assert report.labels is None
    assert report.no_labels == "a target is float32 each, and a class label is one whole number"
    assert all(row.labels is None for row in report.clients)


def test_the_change_of_each_client_is_told() -> None:
    report = of_digits(kind="feature", clients=4, change="noise", strength=0.4)
    assert [row.features for row in report.clients] == ["noise 0.1", "noise 0.2", "noise 0.3", "noise 0.4"]


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 25, 300])
def test_a_population_is_drawn(clients: int, tmp_path: Path) -> None:
    plot(of_digits(kind="iid", clients=clients), tmp_path / "who.png")
    assert (tmp_path / "who.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_population_without_labels_or_with_many_is_drawn(tmp_path: Path) -> None:
    regression = task_of({"a": TensorDataset(torch.rand(30, 2), torch.rand(30))})
    many = task_of({"a": labelled(np.arange(300) % 60)})
    for task in (regression, many):
        plot(reported(task, kind="iid", clients=3), tmp_path / "who.svg")
        assert "<svg" in (tmp_path / "who.svg").read_text()


def test_the_bars_have_the_heights_of_the_counts() -> None:
    report = of_digits(kind="shards", clients=7)
    heights = drawing.counts(report)
    assert heights.sum(axis=0).tolist() == [row.examples for row in report.clients]
    assert heights.sum(axis=1).tolist() == np.bincount(digits()[0].tensors[1]).tolist()


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NoPlots, match=r"pip install 'atoll\[sim\]'"):
        plot(of_digits(kind="iid", clients=2), tmp_path / "who.png")
