"""SCAFFOLD's client against the paper's algorithm by hand in float64, pfl-research's numbers, and its identities."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Deadline, Local, Task
from atoll.task.arrays import Arrays
from atoll.task.errors import NotFinite, TaskBroken, TaskMismatch
from atoll.tensors.layout import CONTROL
from atoll.training.local.scaffold import ControlVariates, split
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.federation.quadratics_task import task as quadratics
from tests.training.tasks import linear, make_task

SCAFFOLD = {"algorithm": "scaffold"}
Json = dict[str, Any]


def trained(task: Task, site: str, version: Arrays, own: Arrays | None, local: Json, **request: Any) -> Outcome:
    bench = ModelBench(task, {"site": site})
    request = SCAFFOLD | {"seed": 3, "local": local} | request
    return bench.train(Received(version, own), request, Deadline.never())


def initial(task: Task) -> Arrays:
    return ModelBench(task, dict(SCAFFOLD)).initial(5)


class Federation:
    """The server's side in float64 numpy: x <- x + mean of the deltas, c <- c + (1/N) sum of theirs."""

    def __init__(self, task: Task, local: Json) -> None:
        self.task, self.local = task, local
        self.version: Arrays = initial(task)
        self.own: dict[str, Arrays] = {}

    def round(self, sites: list[str]) -> None:
        outcomes = {s: trained(self.task, s, self.version, self.own.get(s), self.local) for s in sites}
        for name, array in self.version.items():
            total = sum(outcome.trained.update[name].astype(np.float64) for outcome in outcomes.values())
            count = len(self.task.sites) if name.startswith(CONTROL) else len(sites)
            self.version[name] = np.asarray(array + total / count, array.dtype)
        self.own |= {site: outcome.own for site, outcome in outcomes.items()}

    def mean_of_clients(self, name: str) -> Any:
        return sum(self.own[site][name].astype(np.float64) for site in self.task.sites) / len(self.task.sites)


def test_two_quadratics_follow_the_paper() -> None:
    """Karimireddy et al. 2020, option II, in float64; pfl-research's option II gives the same numbers."""
    federation = Federation(quadratics, {"epochs": 10, "batch_size": None, "lr": 0.1})
    xs, cs = [], []
    for _ in range(8):
        federation.round(["a", "b"])
        xs.append(float(federation.version["x"][0]))
        cs.append(float(federation.version["control/x"][0]))
        assert federation.version["control/x"] == pytest.approx(federation.mean_of_clients("control/x"), abs=1e-5)
    assert xs[:3] == pytest.approx([3.828134775, 2.720846398, 2.702668411], rel=1e-6)
    assert cs[:3] == pytest.approx([6.171865225, 1.107288377, 0.018177987], rel=1e-5)
    assert xs[-1] == pytest.approx(3.0, abs=0.02), "not FedAvg's 2.394844484"


def by_hand(sites: dict[str, tuple[Any, Any]], rounds: list[list[str]], *, steps: int, lr: float) -> tuple[Any, Any]:
    """Algorithm 1 of the paper, option II, for logistic regression without bias: weights (3, 6) and c in float64."""
    x, c = np.zeros((3, 6)), np.zeros((3, 6))
    of_client = {site: np.zeros((3, 6)) for site in sites}
    for chosen in rounds:
        deltas, changes = [], []
        for site in chosen:
            inputs, targets = sites[site]
            y = x.copy()
            for _ in range(steps):
                logits = inputs @ y.T
                shares = np.exp(logits - logits.max(axis=1, keepdims=True))
                shares /= shares.sum(axis=1, keepdims=True)
                gradient = (shares - np.eye(3)[targets]).T @ inputs / len(targets)
                y -= lr * (gradient - of_client[site] + c)
            new = of_client[site] - c + (x - y) / (steps * lr)
            deltas.append(y - x)
            changes.append(new - of_client[site])
            of_client[site] = new
        x = x + sum(deltas) / len(chosen)
        c = c + sum(changes) / len(sites)
    return x, c


def zeros() -> nn.Module:
    model = nn.Linear(6, 3, bias=False)
    nn.init.zeros_(model.weight)
    return model


def test_logistic_regression_with_partial_participation_follows_the_paper() -> None:
    task = make_task(zeros)
    sites = {}
    for site in task.sites:
        inputs, targets = task.data(site, "train").tensors
        sites[site] = (inputs.numpy().astype(np.float64), targets.numpy())
    rounds = [["a", "b", "c"], ["a", "c"], ["b"], ["a", "b", "c"], ["b", "c"], ["a", "b"]]
    federation = Federation(task, {"epochs": 4, "batch_size": None, "lr": 0.5})
    for chosen in rounds:
        federation.round(chosen)
        np.testing.assert_allclose(
            federation.version["control/weight"], federation.mean_of_clients("control/weight"), atol=1e-6
        )
    x, c = by_hand(sites, rounds, steps=4, lr=0.5)
    np.testing.assert_allclose(federation.version["weight"], x, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(federation.version["control/weight"], c, rtol=2e-5, atol=1e-6)


def test_the_first_round_is_the_first_of_fedavg_to_the_bit() -> None:
    task, local = make_task(), {"batch_size": 4, "epochs": 2}
    version = initial(task)
    plain = trained(task, "b", split(version)[0], None, local, algorithm="fedavg")
    outcome = trained(task, "b", version, None, local)
    for name, array in plain.trained.update.items():
        np.testing.assert_array_equal(outcome.trained.update[name], array)
    assert plain.own == {}
    assert outcome.trained.statistics == plain.trained.statistics


def test_a_client_whose_variate_is_the_servers_trains_as_in_fedavg() -> None:
    task, local = make_task(), {"batch_size": 4, "epochs": 2}
    rng = np.random.default_rng(0)
    version = {
        name: rng.standard_normal(array.shape).astype(np.float32) if name.startswith(CONTROL) else array
        for name, array in initial(task).items()
    }
    own = {name: array for name, array in version.items() if name.startswith(CONTROL)}
    outcome = trained(task, "b", version, own, local)
    plain = trained(task, "b", split(version)[0], None, local, algorithm="fedavg")
    for name, array in plain.trained.update.items():
        np.testing.assert_array_equal(outcome.trained.update[name], array)


def test_partial_work_divides_by_the_steps_that_were_taken() -> None:
    """17 examples in batches of 8 are 3 steps an epoch; of 6 steps only 4 are taken."""
    task = make_task()
    outcome = trained(task, "a", initial(task), None, {"batch_size": 8, "epochs": 2, "max_steps": 4, "lr": 0.25})
    assert outcome.report["steps"] == 4
    for name, delta in split(outcome.trained.update)[1].items():
        np.testing.assert_allclose(delta, -outcome.trained.update[name] / (4 * 0.25), rtol=1e-6)


class Unused(nn.Module):
    """One parameter has no part in the loss, one is frozen, one is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3, bias=False), nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.ones(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


def test_only_trained_parameters_have_a_variate_and_unused_ones_gradient_zero() -> None:
    task = make_task(Unused)
    version = initial(task)
    assert set(split(version)[1]) == {"used.weight", "unused"}
    version["control/unused"] += np.float32(0.5)
    own = {CONTROL + name: np.zeros_like(c) + np.float32(0.25) for name, c in split(version)[1].items()}
    outcome = trained(task, "a", version, own, {"batch_size": 8, "lr": 0.1})
    np.testing.assert_allclose(outcome.trained.update["unused"], -3 * 0.1 * (0.5 - 0.25) * np.ones(2), rtol=1e-5)
    np.testing.assert_allclose(outcome.own["control/unused"], 0.0, atol=1e-6)  # the mean of its gradients


@pytest.mark.parametrize(
    ("field", "value"),
    [("momentum", 0.9), ("weight_decay", 0.1), ("clip_norm", 1.0), ("prox_mu", 0.5), ("optimizer", "adam")],
)
def test_settings_that_break_option_ii_are_refused_by_coordinator_and_client(field: str, value: Any) -> None:
    with pytest.raises(TaskBroken, match=f"local.{field} must be"):
        ModelBench(make_task(), SCAFFOLD | {"local": {field: value}})
    task = make_task()
    with pytest.raises(TaskBroken, match=f"local.{field} must be"):
        trained(task, "a", initial(task), None, {field: value})


def test_all_faults_come_at_once() -> None:
    local = Local(momentum=0.9, weight_decay=0.1)
    with pytest.raises(TaskBroken, match=r"a custom `fit`.*local\.momentum .*local\.weight_decay"):
        ModelBench(replace(make_task(fit=lambda *_: 1.0), local=local), dict(SCAFFOLD))


def test_a_variate_of_another_model_is_refused_by_name() -> None:
    task = make_task()
    version = initial(task)
    del version["control/0.weight"]
    with pytest.raises(TaskMismatch, match=r"0\.weight is missing"):
        trained(task, "a", version, None, {})


def test_a_variate_that_leaves_float32_is_named() -> None:
    control = ControlVariates({"w": np.zeros(2, np.float32)}, None)
    with pytest.raises(NotFinite, match="control variate has NaN or infinite values in control/w"):
        control.after({"w": np.full(2, 3e38, np.float32)}, num_steps=1, lr=0.1)


def test_a_model_may_not_use_the_variates_names() -> None:
    def odd() -> nn.Module:
        return nn.ModuleDict({"control/net": linear()})

    with pytest.raises(
        TaskBroken, match=r"control/net\.0\.weight: the prefixes control/, algorithm/, secure/ are reserved"
    ):
        ModelBench(make_task(odd), {}).initial(0)
