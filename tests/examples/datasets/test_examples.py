"""The examples on public data: the papers' models, a clear word without the data, and that they learn with them."""

import importlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from atoll.task.metrics import values
from atoll.task.task import Task
from atoll.training.local.training import evaluate, train_locally
from atoll.training.model.parameters import initial_parameters, load_parameters, update_of
from examples import mnist, table
from examples.datasets.folder import NoData
from tests.cli.invoking import refused
from tests.public_data import needs_data


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps this small are slower on more threads, by far so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_models_have_the_paper_s_parameters() -> None:
    """McMahan et al. 2017, section 3."""
    counts = [sum(p.numel() for p in task.model().parameters()) for task in (mnist.task, mnist.cnn)]
    assert counts == [199_210, 1_663_370]
    images = torch.rand(2, 1, 28, 28)
    assert [task.model()(images).shape for task in (mnist.task, mnist.cnn)] == [(2, 10), (2, 10)]


@pytest.mark.parametrize(
    ("task", "folder"), [(mnist.task, "mnist"), (table.task, "parkinsons_telemonitoring")], ids=["mnist", "table"]
)
def test_without_data_it_is_said_where_they_should_lie(
    task: Task, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    mnist.mnist.cache_clear()
    table.patients.cache_clear()
    with pytest.raises(NoData, match=f"ATOLL_DATA is not set; set it to the folder in which {folder}/ lies"):
        task.data(task.sites[0], "train")


def test_the_command_line_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    for name, folder in (("mnist", "mnist"), ("shakespeare", "tinyshakespeare")):
        (fault,) = refused("population", f"examples/{name}.py:task")
        assert f"ATOLL_DATA is not set; set it to the folder in which {folder}/ lies" in fault


def after(task: Task, site: str, metric: str, *, train: int, test: int) -> float:
    """A metric on a part of the server's data, after one epoch over a part of a site's."""
    model = task.model()
    load_parameters(model, initial_parameters(task, 0))
    train_locally(task, model, Subset(task.data(site, "train"), range(train)), task.local, seed=0)
    assert task.test_data is not None
    found = values(task.metrics, evaluate(task, model, Subset(task.test_data(), range(test))))[metric]
    assert found is not None
    return found


@needs_data
def test_the_2nn_learns_mnist() -> None:
    assert after(mnist.task, "all", "accuracy", train=3000, test=1000) > 0.7


@needs_data
def test_a_role_s_words_are_better_than_guessing() -> None:
    sys.modules.pop("examples.shakespeare", None)
    shakespeare = importlib.import_module("examples.shakespeare")
    assert shakespeare.CHARACTERS == 65
    assert after(shakespeare.task, "GLOUCESTER", "loss", train=100, test=60) < 3.8  # ln 65 = 4.17 knows nothing


@needs_data
def test_patients_scores_are_learned_by_federated_averaging() -> None:
    task = table.task
    parameters = initial_parameters(task, 0)
    sizes = np.array([len(task.data(site, "train")) for site in task.sites])
    model = task.model()
    for round_id in range(2):
        total = {name: np.zeros(array.shape) for name, array in parameters.items()}
        for number, site in enumerate(task.sites):
            load_parameters(model, parameters)
            train_locally(task, model, task.data(site, "train"), task.local, seed=100 * round_id + number)
            for name, change in update_of(parameters, model).items():
                total[name] = total[name] + change * sizes[number]
        parameters = {n: np.asarray(a + total[n] / sizes.sum(), a.dtype) for n, a in parameters.items()}
    load_parameters(model, parameters)
    assert task.test_data is not None
    found = values(task.metrics, evaluate(task, model, task.test_data()))["absolute_error"]
    assert found is not None
    assert found < 6.9  # with the mean of the training scores it is 6.92
