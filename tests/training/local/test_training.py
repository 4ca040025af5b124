import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from atoll import Deadline, Local, Metric, Task
from atoll.task import metrics
from atoll.task.arrays import Arrays
from atoll.task.errors import OutOfTime, TaskBroken
from atoll.training.data.batches import batch_sizes, fetcher, to_device
from atoll.training.local.training import Work, evaluate, train_locally
from atoll.training.model.parameters import initial_parameters, load_parameters, parameters_of, update_of
from tests.federation.quadratics_task import task as quadratics
from tests.training.tasks import accuracy, data, linear, make_task
from tests.waiting import BOUND_S

FULL_BATCH = Local(batch_size=None, lr=0.3)


def trained(task: Task, start: Arrays, dataset: Any, local: Local, **more: Any) -> tuple[Work, Arrays]:
    model = task.model()
    load_parameters(model, start)
    work = train_locally(task, model, dataset, local, **({"seed": 3} | more))
    return work, update_of(start, model)


def fedavg(task: Task, start: Arrays, local: Local) -> Arrays:
    outcomes = [trained(task, start, task.data(site, "train"), local) for site in task.sites]
    total = sum(work.num_examples for work, _ in outcomes)
    return {name: start[name] + sum(w.num_examples * u[name] for w, u in outcomes) / total for name in start}


class Ticking:
    """A clock on which each batch takes as long as the test says."""

    def __init__(self, step_s: list[float]) -> None:
        self.now, self.step_s = 0.0, iter(step_s)

    def __call__(self) -> float:
        return self.now

    def dataset(self, num_examples: int) -> Any:
        clock = self

        class Slow(TensorDataset):
            def __getitems__(self, indices: list[int]) -> list[Any]:
                clock.now += next(clock.step_s)
                return [self[index] for index in indices]

        return Slow(*data(num_examples, seed=1).tensors)


def test_fedsgd_with_everybody_is_centralized_sgd_on_the_pooled_batch() -> None:
    """McMahan 2017, section 2: E=1 and B=∞ is one step of large-batch synchronous SGD, round after round."""
    task = make_task()
    pooled: ConcatDataset[Any] = ConcatDataset([task.data(site, "train") for site in task.sites])
    federated = central = initial_parameters(task, 0)
    for _ in range(5):
        federated = fedavg(task, federated, FULL_BATCH)
        _, update = trained(task, central, pooled, FULL_BATCH)
        central = {name: central[name] + update[name] for name in central}
    for name in central:
        np.testing.assert_allclose(federated[name], central[name], rtol=1e-5, atol=1e-7)


def test_one_full_step_of_sgd_is_the_hand_written_one() -> None:
    task, dataset = make_task(), data(20, seed=4)
    start = initial_parameters(task, 0)
    work, update = trained(task, start, dataset, FULL_BATCH)
    model = task.model()
    load_parameters(model, start)
    loss = task.loss(model(dataset.tensors[0]), dataset.tensors[1])
    loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(update[name], -0.3 * parameter.grad.numpy(), atol=1e-6)
    assert (work.num_examples, work.work, work.steps) == (20, 1.0, 1)
    assert work.statistics["loss"] == pytest.approx((20 * loss.item(), 20.0))


def test_statistics_of_sites_merge_to_those_of_the_pooled_data() -> None:
    task = make_task()
    model = task.model()
    datasets = [task.data(site, "train") for site in task.sites]
    merged = metrics.merge(evaluate(task, model, dataset, batch_size=7) for dataset in datasets)
    pooled = evaluate(task, model, ConcatDataset(datasets))
    assert merged["accuracy"] == pooled["accuracy"]
    assert merged["loss"] == pytest.approx(pooled["loss"], rel=1e-6)
    assert metrics.values(task.metrics, merged)["accuracy"] == pooled["accuracy"][0] / 62


def test_evaluation_is_in_eval_mode_and_of_nothing_is_nothing() -> None:
    task = make_task(lambda: nn.Sequential(nn.Dropout(0.9), linear()))
    model = task.model().train()
    dataset = data(30, seed=2)
    assert evaluate(task, model, dataset) == evaluate(task, model, dataset)
    nothing = evaluate(task, model, data(0, seed=2))
    assert nothing == {"loss": (0.0, 0.0)}
    assert metrics.values(task.metrics, nothing) == {"loss": None}


def test_a_metric_named_loss_replaces_the_default() -> None:
    tokens = Metric(lambda outputs, targets: (1.0, 2.0, len(targets)), lambda sums: sums[0])
    task = make_task(metrics={"loss": tokens})
    assert evaluate(task, task.model(), data(30, seed=2), batch_size=20) == {"loss": (2.0, 4.0, 30.0)}
    assert trained(task, initial_parameters(task, 0), data(9, seed=2), Local())[0].statistics == {"loss": (1, 2, 9)}


DIGEST = """
import hashlib, torch
from atoll import Local
from atoll.training.model.parameters import initial_parameters
from tests.training.tasks import make_task
from tests.training.local.test_training import trained
from torch import nn
torch.set_num_threads(1)
task = make_task(lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
work, update = trained(task, initial_parameters(task, 5), task.data("b", "train"), Local(epochs=3, batch_size=8))
print(hashlib.sha256(b"".join(update[name].tobytes() for name in sorted(update))).hexdigest(), work.statistics)
"""


@pytest.mark.real
def test_same_seed_gives_the_same_bits_in_another_process() -> None:
    runs = [subprocess.Popen([sys.executable, "-c", DIGEST], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=BOUND_S)[0] for run in runs]
    assert outputs[0] == outputs[1] != ""


def test_another_seed_gives_another_order() -> None:
    task = make_task()
    start, dataset = initial_parameters(task, 0), data(40, seed=1)
    updates = [trained(task, start, dataset, Local(batch_size=4), seed=seed)[1]["0.weight"] for seed in (1, 1, 2)]
    assert np.array_equal(updates[0], updates[1])
    assert not np.array_equal(updates[0], updates[2])
    plain = [
        trained(task, start, dataset, Local(batch_size=4, shuffle=False), seed=seed)[1]["0.weight"] for seed in (1, 2)
    ]
    assert np.array_equal(plain[0], plain[1])


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        (Local(epochs=2, batch_size=8), 6),
        (Local(epochs=2, batch_size=8, max_steps=4), 4),
        (Local(epochs=1, batch_size=8, max_steps=9), 3),
    ],
)
def test_steps_are_epochs_of_batches_up_to_a_maximum(local: Local, steps: int) -> None:
    work, _ = trained(make_task(), initial_parameters(make_task(), 0), data(17, seed=1), local)
    assert (work.steps, work.work, work.num_examples) == (steps, 1.0, 17)


@pytest.mark.parametrize(
    ("step_s", "at", "steps"),
    [
        ([1.0] * 10, 10.0, 10),
        ([1.0] * 10, 9.9, 9),
        ([1.0] * 10, 0.5, 1),
        ([1.0, 1.0, 3.0, 1.0, 1.0] + [1.0] * 5, 9.0, 5),
        ([4.0] + [1.0] * 9, 11.9, 5),
        ([4.0] + [1.0] * 9, 12.9, 9),
    ],
)
def test_training_stops_before_a_step_that_would_not_fit(step_s: list[float], at: float, steps: int) -> None:
    """The longest of the last five steps is what the next one is expected to take."""
    clock, task = Ticking(step_s), make_task()
    work, update = trained(
        task, initial_parameters(task, 0), clock.dataset(40), Local(batch_size=4), deadline=Deadline(clock, at)
    )
    assert (work.steps, work.work) == (steps, steps / 10)
    assert work.num_examples == 40
    assert work.statistics["accuracy"][1] == 4 * steps
    assert update["0.weight"].any()


def test_training_that_may_not_begin_is_out_of_time() -> None:
    deadline = Deadline.never()
    deadline.stop()
    task = make_task()
    with pytest.raises(OutOfTime, match="no time for the first of 3 steps"):
        trained(task, initial_parameters(task, 0), data(17, seed=1), task.local, deadline=deadline)


def test_a_site_without_examples_is_refused() -> None:
    task = make_task()
    with pytest.raises(TaskBroken, match="the data set is empty"):
        train_locally(task, task.model(), data(0, seed=1), task.local, seed=0)


@pytest.mark.parametrize("num_examples", [9, 17, 8, 1])
def test_batch_norm_trains_with_a_lone_last_example(num_examples: int) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    assert sum(batch_sizes(num_examples, 8, model=task.model())) == num_examples
    start = initial_parameters(task, 0)
    if num_examples == 1:
        with pytest.raises(TaskBroken, match=r"a batch norm has a single value per channel .* at least two rows"):
            trained(task, start, data(1, seed=1), Local(batch_size=8))
        return
    work, update = trained(task, start, data(num_examples, seed=1), Local(batch_size=8))
    assert update["1.num_batches_tracked"] == work.steps


def test_the_short_last_batch_is_kept() -> None:
    assert batch_sizes(9, 8, model=linear()) == [8, 1]
    assert batch_sizes(9, 8, model=nn.BatchNorm1d(3)) == [9]
    assert batch_sizes(3, 1, model=nn.BatchNorm2d(3)) == [1, 1, 1]
    assert batch_sizes(9, None, model=linear()) == [9]


def test_all_ways_to_fetch_give_the_same_batch() -> None:
    tensors, indices = data(20, seed=1), torch.tensor([3, 1, 11])

    class Listed:
        def __getitem__(self, index: int) -> Any:
            return tensors[index]

    nested = Subset(Subset(tensors, list(range(19, -1, -1))), list(range(19, -1, -1)))
    datasets: list[Any] = [tensors, Listed(), nested, ConcatDataset([tensors])]
    for dataset in datasets:
        inputs, targets = fetcher(dataset)(indices)
        assert torch.equal(inputs, tensors.tensors[0][indices])
        assert torch.equal(targets, tensors.tensors[1][indices])


def test_nested_batches_reach_the_device() -> None:
    batch = to_device([{"ids": torch.ones(2)}, (torch.zeros(1), "name")], "meta")
    assert batch[0]["ids"].is_meta
    assert batch[1][0].is_meta
    assert batch[1][1] == "name"


def test_proximal_term_pulls_towards_the_global_model() -> None:
    task = make_task()
    start, dataset = initial_parameters(task, 0), data(40, seed=1)
    norms = [
        sum(float(np.square(array).sum()) for array in trained(task, start, dataset, local)[1].values())
        for local in (Local(batch_size=4, lr=0.3), Local(batch_size=4, lr=0.3, prox_mu=2.0))
    ]
    assert norms[1] < 0.7 * norms[0]


def test_gradients_are_clipped_to_their_norm() -> None:
    task = make_task()
    local = Local(batch_size=None, lr=1.0, clip_norm=0.01)
    _, update = trained(task, initial_parameters(task, 0), data(40, seed=1), local)
    assert sum(float(np.square(array).sum()) for array in update.values()) ** 0.5 == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_every_optimizer_learns(optimizer: str) -> None:
    task, dataset = make_task(), data(120, seed=1)
    lr = 0.3 if optimizer == "sgd" else 0.03
    model = task.model()
    train_locally(task, model, dataset, Local(epochs=20, lr=lr, optimizer=optimizer, weight_decay=1e-4), seed=0)
    value = metrics.values(task.metrics, evaluate(task, model, dataset))["accuracy"]
    assert value is not None
    assert value > 0.9


def fit_half(model: nn.Module, dataset: Any, local: Local, deadline: Deadline) -> float:
    assert model.training
    assert (len(dataset), local.lr, deadline.passed()) == (17, 0.25, False)
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    return 0.5


def test_fit_takes_the_place_of_the_loop() -> None:
    task = make_task(fit=fit_half)
    work, update = trained(task, initial_parameters(task, 0), data(17, seed=1), Local(lr=0.25))
    assert (work.num_examples, work.work, work.statistics) == (17, 0.5, {})
    assert update["0.weight"] == pytest.approx(1.0)
    assert not update["2.bias"].any()


@pytest.mark.parametrize("work", [None, 0, 0.0, 1.5, True, float("nan"), "all"])
def test_fit_must_say_what_it_did(work: Any) -> None:
    task = make_task(fit=lambda *arguments: work)
    with pytest.raises(TaskBroken, match="fit must return the work done, a number in "):
        trained(task, initial_parameters(task, 0), data(17, seed=1), Local())


def test_fit_must_leave_the_tensors_that_it_was_given() -> None:
    def fit(model: nn.Module, dataset: Any, local: Local, deadline: Deadline) -> float:
        model.set_submodule("2", nn.Linear(8, 7))
        return 1.0

    task = make_task(fit=fit)
    with pytest.raises(
        TaskBroken, match=r"task.fit has left other tensors in the model .*: 2\.bias was \[.*\] and is \[7\]"
    ):
        trained(task, initial_parameters(task, 0), data(17, seed=1), Local())


def test_training_leaves_frozen_parameters_alone() -> None:
    def frozen() -> nn.Module:
        model = linear()
        model.get_parameter("0.weight").requires_grad_(False)
        return model

    task = make_task(frozen)
    _, update = trained(task, initial_parameters(task, 0), data(17, seed=1), Local(prox_mu=0.1))
    assert not update["0.weight"].any()
    assert update["2.weight"].any()
    assert set(update) == set(parameters_of(frozen()))


def test_metric_functions_see_each_batch_once() -> None:
    seen: list[int] = []

    def counting(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        seen.append(len(targets))
        return 0.0, len(targets)

    functions: dict[str, Callable[[Any, Any], Any]] = {"count": counting, "accuracy": accuracy}
    task = make_task(metrics=functions)
    work, _ = trained(task, initial_parameters(task, 0), data(17, seed=1), Local(batch_size=8))
    assert seen == [8, 8, 1]
    assert work.statistics["count"] == (0.0, 17.0)


def test_fedprox_follows_the_reference_where_sites_solve_their_problem_exactly() -> None:
    """x <- mean of argmin f_i(w) + μ/2 (w - x)², μ = 1, for two quadratics from x = 10."""
    local = Local(epochs=60, batch_size=None, lr=0.25, prox_mu=1.0)
    version = initial_parameters(quadratics, 0)
    xs = []
    for _ in range(3):
        updates = [trained(quadratics, version, quadratics.data(site, "train"), local)[1] for site in "ab"]
        version["x"] = version["x"] + (updates[0]["x"] + updates[1]["x"]) / 2
        xs.append(float(version["x"][0]))
    assert xs == pytest.approx([5.25, 3.46875, 2.80078125], rel=1e-6)


def test_a_step_of_fedprox_is_the_formula() -> None:
    """w <- w - η (∇F(w) + μ (w - w_global)), four steps in float64."""
    task, dataset = make_task(), data(20, seed=4)
    start = initial_parameters(task, 0)
    _, update = trained(task, start, dataset, Local(epochs=4, batch_size=None, lr=0.3, prox_mu=0.7))
    model = task.model()
    load_parameters(model, start)
    model.double()
    first = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, targets = dataset.tensors
    for _ in range(4):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(task.loss(model(inputs.double()), targets), parameters)
        with torch.no_grad():
            for parameter, gradient, origin in zip(parameters, gradients, first, strict=True):
                parameter -= 0.3 * (gradient + 0.7 * (parameter - origin))
    for (name, parameter), origin in zip(model.named_parameters(), first, strict=True):
        np.testing.assert_allclose(update[name], (parameter - origin).detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("decay_vectors", [True, False])
def test_vectors_decay_unless_they_are_exempt(optimizer: str, *, decay_vectors: bool) -> None:
    """With gradients of 0 a step moves what decays alone: sgd by lr wd w, adam by lr sign(w), adamw by lr wd w."""
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
        data=lambda _site, _split: data(8, seed=0),
        loss=lambda outputs, _targets: 0.0 * outputs.sum(),
    )
    start = initial_parameters(task, 0)
    local = Local(
        batch_size=None, lr=0.1, weight_decay=0.5, momentum=0.0, optimizer=optimizer, decay_vectors=decay_vectors
    )
    _, update = trained(task, start, TensorDataset(torch.randn(8, 3), torch.zeros(8)), local)
    for name, before in start.items():
        moves = before.ndim > 1 or decay_vectors
        expected = np.sign(before) * 0.1 if optimizer == "adam" else 0.05 * before
        assert np.allclose(update[name], -expected * moves, atol=1e-6), name


def test_own_optimizers_group_their_parameters_themselves() -> None:
    with pytest.raises(ValueError, match=r"local\.decay_vectors: belongs to sgd, adam, adamw, not to SGD, got False"):
        Local(optimizer=torch.optim.SGD, decay_vectors=False)
