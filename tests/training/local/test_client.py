"""An algorithm of one's own at the client: against the built-in ones, what it sends and keeps, and its contract."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Algorithm, Deadline, Local, Task
from atoll.simulations.engines.engine import Job, Training
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.task.errors import NotFinite, TaskBroken, TaskMismatch
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.training.tasks import linear, make_task

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def a_task(algorithm: Algorithm | None = None, **fields: Any) -> Task:
    local = Local(epochs=2, batch_size=4, lr=0.05)
    return replace(make_task(), local=local, algorithm=algorithm, **fields)


def bench_of(task: Task, site: str | None = "a") -> ModelBench:
    return ModelBench(task, {"site": site})


def trained(task: Task, version: Arrays, own: Arrays | None = None, site: str = "a", **request: Any) -> Outcome:
    return bench_of(task, site).train(Received(version, own), {"seed": 3} | request, Deadline.never())


def initial(task: Task) -> Arrays:
    return bench_of(task, None).initial(5)


# ---------------------------------------------------------------- beside the built-in algorithms


class Proximal(Algorithm):
    def gradients(self, client: Any, gradients: Tensors) -> Tensors:
        return {name: g + 0.5 * (client.parameters[name] - client.start[name]) for name, g in gradients.items()}


class ProximalLoss(Algorithm):
    def loss(self, client: Any, loss: torch.Tensor, outputs: Any) -> torch.Tensor:
        return loss + 0.25 * sum(((p - client.start[name]) ** 2).sum() for name, p in client.trained.items())


@pytest.mark.parametrize("algorithm", [Proximal(), ProximalLoss()])
def test_a_proximal_term_is_that_of_fedprox(algorithm: Algorithm) -> None:
    plain = a_task()
    expected = trained(plain, initial(plain), local={"prox_mu": 0.5})
    found = trained(a_task(algorithm), initial(plain))
    for metric, sums in expected.trained.statistics.items():
        assert found.trained.statistics[metric] == pytest.approx(sums, rel=1e-5), "the loss is that of the task"
    for name, array in expected.trained.update.items():
        np.testing.assert_allclose(found.trained.update[name], array, rtol=1e-5, atol=1e-7)


class Scaffold(Algorithm):
    """SCAFFOLD with every client in every round, where the mean over the round is that over all clients."""

    needs_state = True

    def shared(self, model: nn.Module) -> Tensors:
        return {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    state = shared

    def gradients(self, client: Any, gradients: Tensors) -> Tensors:
        return {name: g + client.received[name] - client.state[name] for name, g in gradients.items()}

    def end(self, client: Any) -> None:
        for name, now in client.parameters.items():
            moved = (client.start[name] - now) / (client.num_steps * client.local.lr)
            changed = moved - client.received[name]
            client.shared[name] = client.received[name] + changed
            client.state[name] = client.state[name] + changed


def rounds(task: Task, number: int, prefix: str, **request: Any) -> Arrays:
    """FedAvg over all sites, and the mean of the changes of what is beside the model."""
    version = ModelBench(task, dict(request)).initial(5)
    own: dict[str, Arrays | None] = dict.fromkeys(task.sites)
    for _ in range(number):
        outcomes = {site: trained(task, version, own[site], site, **request) for site in task.sites}
        mean = {n: np.mean([o.trained.update[n].astype(float) for o in outcomes.values()], axis=0) for n in version}
        version = {name: np.float32(array + mean[name]) for name, array in version.items()}
        own = {site: outcome.own for site, outcome in outcomes.items()}
    return {name.removeprefix(prefix): array for name, array in version.items()}


def test_scaffold_of_one_s_own_is_the_built_in_one() -> None:
    expected = rounds(a_task(), 3, "control/", algorithm="scaffold")
    found = rounds(a_task(Scaffold()), 3, "algorithm/")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=1e-6, err_msg=name)


# ---------------------------------------------------------------- what is sent and kept


class Counts(Algorithm):
    """Sends the number of steps, keeps the number of trainings."""

    def shared(self, model: nn.Module) -> Tensors:
        return {"steps": torch.tensor(10.0)}

    def state(self, model: nn.Module) -> Tensors:
        return {"trainings": torch.tensor(0), "first": next(model.parameters()).detach()}

    def after_step(self, client: Any) -> None:
        client.shared["steps"] = client.shared["steps"] + 1

    def end(self, client: Any) -> None:
        client.state["trainings"] = client.state["trainings"] + 1

    def evaluated(self, client: Any) -> Tensors:
        name = next(iter(client.trained))
        return {name: torch.zeros_like(client.start[name])} if client.state["trainings"] > 1 else {}


class CountsInPlace(Counts):
    def after_step(self, client: Any) -> None:
        client.shared["steps"] += 1


def test_a_shared_tensor_that_a_hook_changes_in_place_is_sent() -> None:
    task = a_task(CountsInPlace())
    found = trained(task, initial(task))
    assert found.trained.update["algorithm/steps"] == found.report["steps"] > 0


def test_shared_tensors_and_state_go_their_ways() -> None:
    task = a_task(Counts())
    version = initial(task)
    assert version["algorithm/steps"] == np.float32(10)
    first = trained(task, version)
    assert first.trained.update["algorithm/steps"] == first.report["steps"]
    assert {name: array.dtype.kind for name, array in first.own.items()} == {"state/trainings": "i", "state/first": "f"}
    second = trained(task, version, first.own)
    assert second.own["state/trainings"] == 2
    assert bench_of(task).buffers() == ["algorithm/steps"], "the optimizer does not move it, and no codec encodes it"


def test_a_site_evaluates_its_own_model_and_the_server_the_version() -> None:
    task = a_task(Counts(), test_data=lambda: make_task().data("a", "train"))
    version, bench = initial(task), bench_of(task)
    plain = bench.evaluate(Received(version), {"split": "train"})
    own: Arrays = {"state/trainings": np.array(2), "state/first": next(iter(version.values())) * 0}
    assert bench.evaluate(Received(version, own), {"split": "train"}) != plain
    assert bench.evaluate(Received(version), {"split": "train"}) == plain, "nothing is left of it"
    assert bench.evaluate(Received(version, own), {"split": "server"}) == plain


def test_a_simulated_client_has_the_bits_of_a_deployed_one() -> None:
    task = a_task(Counts())
    version = initial(task)
    engine = Sequential(Training(task=task, model_seed=0))
    [result] = engine.train(version, [Job("a", 3)])
    expected = trained(task, version)
    assert {n: a.tobytes() for n, a in result.update.items()} == {
        n: a.tobytes() for n, a in expected.trained.update.items()
    }
    assert result.own.keys() == expected.own.keys()


class LeavesOut(Algorithm):
    def begin(self, client: Any) -> None:
        client.leaves_out = {next(iter(client.start))}


def test_an_update_may_leave_tensors_out() -> None:
    task = a_task(LeavesOut())
    version = initial(task)
    assert trained(task, version).trained.update.keys() == set(list(version)[1:])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(6), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(nn.functional.dropout(self.norm(x), 0.0, self.training))
        return found


class Looks(Algorithm):
    """Calls the model in every way, and changes nothing."""

    def begin(self, client: Any) -> None:
        client.full_gradient(client.start)
        assert client.full_loss({}) == client.full_loss(client.start) > 0

    def loss(self, client: Any, loss: torch.Tensor, outputs: Any) -> torch.Tensor:
        client.outputs(client.start)
        assert client.model.training
        same = client.gradient({})
        expected = torch.autograd.grad(loss, list(client.trained.values()), retain_graph=True)
        for found, gradient in zip(same.values(), expected, strict=True):
            torch.testing.assert_close(found, gradient)
        return loss


def test_looking_at_other_models_changes_nothing() -> None:
    plain, looking = (a_task(algorithm, model=Normed) for algorithm in (None, Looks()))
    version = initial(plain)
    one, other = trained(plain, version), trained(looking, version)
    assert {n: a.tobytes() for n, a in one.trained.update.items()} == {
        n: a.tobytes() for n, a in other.trained.update.items()
    }


def test_the_running_mean_of_a_model_of_one_s_own_moves_and_that_of_the_start_does_not() -> None:
    class Personal(Algorithm):
        def state(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
            return model.state_dict()

        def after_step(self, client: Any) -> None:
            client.gradient(client.state)
            client.gradient(client.start)

        def end(self, client: Any) -> None:
            torch.testing.assert_close(client.start["norm.running_mean"], torch.zeros(6))

    task = a_task(Personal(), model=Normed)
    outcome = trained(task, initial(task))
    moved = outcome.trained.update["norm.running_mean"]
    np.testing.assert_allclose(outcome.own["state/norm.running_mean"], moved, rtol=1e-6)
    assert outcome.own["state/norm.num_batches_tracked"] == outcome.report["steps"]


def test_the_full_gradient_is_that_of_all_examples_at_once() -> None:
    seen: list[Tensors] = []

    class Full(Algorithm):
        def begin(self, client: Any) -> None:
            seen.append(client.full_gradient(client.start))

    task = a_task(Full())
    version = initial(task)
    for batch_size in (3, None):
        trained(task, version, local={"batch_size": batch_size})
    for name, gradient in seen[0].items():
        torch.testing.assert_close(gradient, seen[1][name], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- the contract


def with_hooks(**hooks: Any) -> Algorithm:
    return type("Mine", (Algorithm,), hooks)()  # type: ignore[no-any-return]


def sets_state(client: Any) -> None:
    client.state["more"] = torch.zeros(2)


def sets_shared(client: Any) -> None:
    client.shared["more"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("hooks", "error", "sentence"),
    [
        ({"gradients": lambda self, client, g: {}}, TaskBroken, "algorithm.gradients: .* is missing, expected"),
        (
            {"gradients": lambda self, client, g: {n: v.reshape(-1)[:1] for n, v in g.items()}},
            TaskBroken,
            "algorithm.gradients: .* expected",
        ),
        ({"end": lambda self, client: sets_state(client)}, TaskBroken, "client.state: state/more is unknown"),
        ({"end": lambda self, client: sets_shared(client)}, TaskBroken, "client.shared: algorithm/more is unknown"),
        (
            {
                "state": lambda self, model: {"h": torch.zeros(2)},
                "end": lambda self, client: client.state.update(h=torch.full((2,), float("nan"))),
            },
            NotFinite,
            "client's state has NaN or infinite values in state/h",
        ),
        ({"begin": lambda self, client: client.outputs({"nothing": 1})}, TaskBroken, "nothing: no tensor of the model"),
        ({"loss": lambda self, client, loss, outputs: outputs}, TaskBroken, "loss"),
    ],
)
def test_a_breach_of_the_contract_is_named(
    hooks: Mapping[str, Callable[..., Any]], error: type[Exception], sentence: str
) -> None:
    task = a_task(with_hooks(**hooks))
    with pytest.raises(error, match=sentence):
        trained(task, initial(task))


def test_shared_tensors_are_floats() -> None:
    task = a_task(with_hooks(shared=lambda self, model: {"n": torch.zeros(2, dtype=torch.int64)}))
    with pytest.raises(TaskBroken, match=r"algorithm.shared: n must be tensors of floats"):
        initial(task)


def test_a_version_without_the_shared_tensors_is_of_another_task() -> None:
    with pytest.raises(TaskMismatch, match="algorithm/steps is missing"):
        trained(a_task(Counts()), initial(a_task()))
    with pytest.raises(TaskMismatch, match="algorithm/steps is unknown"):
        trained(a_task(), initial(a_task(Counts())))


def test_a_lost_state_ends_the_training_where_it_is_needed() -> None:
    needs, does_not = a_task(Scaffold()), a_task(Counts())
    with pytest.raises(TaskBroken, match="put it back, or start a new run"):
        trained(needs, initial(needs), has_counted=True)
    assert trained(does_not, initial(does_not), has_counted=True).own["state/trainings"] == 1


@pytest.mark.parametrize("algorithm", ["fednova", "scaffold"])
def test_it_excludes_the_other_algorithms(algorithm: str) -> None:
    task = a_task(Counts())
    with pytest.raises(TaskBroken, match="the task has a custom algorithm, so the run must name fedavg"):
        trained(task, initial(task), algorithm=algorithm)


def test_it_needs_the_built_in_loop() -> None:
    with pytest.raises(ValueError, match="algorithm has hooks of the built-in training loop"):
        a_task(Counts(), fit=lambda model, data, local, deadline: 1.0)
    with pytest.raises(ValueError, match="algorithm must be an Algorithm or None, got 'ditto'"):
        a_task("ditto")  # type: ignore[arg-type]
