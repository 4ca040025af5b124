"""A local optimizer of a user's own: what it is called with, what it may be, and how each mistake is told."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from atoll import Local, Task
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.recipe import make_recipe
from atoll.task.context import context_of, within
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken
from atoll.task.overrides import OverridesRefused
from atoll.training.local.algorithms import check_training
from atoll.training.local.training import make_optimizer, train_locally
from atoll.training.optimizers.lamb import LAMB
from atoll.training.trials.elementwise import is_elementwise
from atoll.training.worker.model_bench import ModelBench
from atoll.training.worker.operations import Operations
from tests.plugins.packages import LION, install

MODULE: dict[str, Any] = {}
exec(LION, MODULE)
Lion: Any = MODULE["Lion"]


def examples(site: str, split: str) -> TensorDataset:
    inputs = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1, keepdim=True) > 0).float())


def task(optimizer: Any, **local: Any) -> Task:
    return Task(
        model=lambda: torch.nn.Linear(3, 1),
        data=examples,
        sites=["a"],
        loss=torch.nn.functional.binary_cross_entropy_with_logits,
        local=Local(**{"optimizer": optimizer, "lr": 0.01, "shuffle": False, "batch_size": 5, **local}),
        options={"beta": 0.8},
    )


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(()))]


class ByNorm(torch.optim.SGD):
    """Steps of unit length, over all parameters together, as an optimizer that clips by itself."""

    def step(self, closure: Any = None) -> Any:
        found = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(found, 1.0)
        return super().step()


class Noisy(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        return super().step()


def lamb(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return LAMB(parameters, lr=lr)


class OfDistance(torch.optim.Optimizer):
    """Prodigy, which estimates the distance to the optimum from all gradients: arXiv:2306.06101, Algorithm 4."""

    def __init__(self, given: Any, lr: float) -> None:
        super().__init__(given, {"lr": lr})
        self.distance, self.numerator = 1e-6, 0.0

    def step(self, closure: Any = None) -> Any:
        lr, d, (b1, b2) = self.param_groups[0]["lr"], self.distance, (0.9, 0.999)
        found = [p for group in self.param_groups for p in group["params"]]
        self.numerator *= b2**0.5
        norm = 0.0
        for p in found:
            if not self.state[p]:
                zeros = {name: torch.zeros_like(p) for name in ("m", "v", "s")}
                self.state[p] = {"first": p.detach().clone(), **zeros}
            state = self.state[p]
            state["m"] = b1 * state["m"] + (1 - b1) * d * p.grad
            state["v"] = b2 * state["v"] + (1 - b2) * (d * p.grad) ** 2
            state["s"] = b2**0.5 * state["s"] + (1 - b2**0.5) * lr * d**2 * p.grad
            self.numerator += (1 - b2**0.5) * lr * d**2 * float((p.grad * (state["first"] - p.detach())).sum())
            norm += float(state["s"].abs().sum())
        with torch.no_grad():
            for p in found:
                p -= lr * d * self.state[p]["m"] / (self.state[p]["v"].sqrt() + d * 1e-8)
        self.distance = max(d, self.numerator / norm)


class OfSingles(torch.optim.SGD):
    """An optimizer that knows single precision alone."""

    def step(self, closure: Any = None) -> Any:
        assert all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"])
        return super().step()


OF_ELEMENTS = [
    *(Lion, OfSingles, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, 0.01])
@pytest.mark.parametrize("optimizer", OF_ELEMENTS)
def test_an_optimizer_that_moves_each_element_by_itself_is_known_by_a_trial(optimizer: Any, lr: float) -> None:
    assert is_elementwise(Local(optimizer=optimizer, lr=lr))
    assert is_elementwise(Local(optimizer=optimizer, lr=lr, weight_decay=0.1))


@pytest.mark.parametrize("lr", [1e-6, 0.01])
@pytest.mark.parametrize("optimizer", [lamb, torch.optim.Adafactor, ByNorm, Noisy, OfDistance])
def test_one_that_looks_at_a_tensor_or_draws_is_known_too(optimizer: Any, lr: float) -> None:
    """A small rate hides nothing: a schedule may come to it, and another answer then would end the run."""
    assert not is_elementwise(Local(optimizer=optimizer, lr=lr))


def test_one_whose_step_fails_in_a_trial_is_told() -> None:
    told = r"SparseAdam raised RuntimeError: .* dense gradients.* \(in a trial at lr=0.01 .*allowed: "
    with pytest.raises(TaskBroken, match=told):
        is_elementwise(Local(optimizer=torch.optim.SparseAdam, lr=0.01))


class Timid(torch.optim.SGD):
    """An optimizer that refuses large rates, when it is made or when it steps."""

    def __init__(self, given: Any, lr: float, when: str = "made") -> None:
        super().__init__(given, lr)
        self.when = when
        if when == "made":
            self.look()

    def look(self) -> None:
        if self.param_groups[0]["lr"] > 0.5:
            raise ValueError("this rate is too large")

    def step(self, closure: Any = None) -> Any:
        if self.when == "stepped":
            self.look()
        return super().step()


@pytest.mark.parametrize("when", ["made", "stepped"])
def test_one_that_refuses_the_rate_of_the_trial_is_told_the_way_out(when: str) -> None:
    optimizer = functools.partial(Timid, when=when)
    told = r"^local\.optimizer: partial: this rate is too large \(in a trial at lr=1 .*dp_replicate"
    with pytest.raises(TaskBroken, match=told):
        is_elementwise(Local(optimizer=optimizer, lr=0.1))


class Counted:
    """A factory that counts what it makes, with settings that change from outside."""

    def __init__(self, **settings: Any) -> None:
        self.made, self.settings, self.kind = 0, settings, torch.optim.SGD

    def __call__(self, given: Any, lr: float, **settings: Any) -> torch.optim.Optimizer:
        self.made += 1
        return self.kind(given, lr=lr, **self.settings, **settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted)

    def __hash__(self) -> int:
        return 0


def tried(factory: Counted, **settings: Any) -> tuple[bool, bool]:
    """The verdict on what a factory makes, and whether a trial was made for it."""
    before = factory.made
    verdict = is_elementwise(Local(optimizer=factory, **settings))
    return verdict, factory.made > before + 1


def test_a_verdict_is_remembered_for_other_rates() -> None:
    factory = Counted()
    assert tried(factory, lr=0.01) == (True, True)
    assert tried(factory, lr=0.02) == tried(factory, lr=0.005) == (True, False)


@pytest.mark.slow
def test_a_verdict_is_of_one_optimizer_alone() -> None:
    """Another factory, also one that says it is equal; other settings, given or made; another class."""
    factory = Counted()
    assert tried(factory, lr=0.01) == tried(Counted(), lr=0.01) == (True, True)
    assert tried(factory, lr=0.01, momentum=0.9) == tried(factory, lr=0.01, weight_decay=0.1) == (True, True)
    factory.settings = {"nesterov": True, "momentum": 0.9}
    assert tried(factory, lr=0.01) == (True, True)
    factory.settings, factory.kind = {}, ByNorm
    assert tried(factory, lr=0.01) == (False, True)
    assert tried(factory, lr=0.02) == (False, False), "a no is remembered, too"


def test_one_whose_settings_are_no_plain_values_is_tried_each_time() -> None:
    class WithTensor(torch.optim.SGD):
        def __init__(self, given: Any, lr: float) -> None:
            super().__init__(given, lr)
            self.scale = torch.ones(2000)

    factory = Counted()
    factory.kind = WithTensor
    assert tried(factory, lr=0.01) == tried(factory, lr=0.02) == (True, True)


def test_the_steps_are_those_of_its_formula() -> None:
    """Lion: w <- w - lr (sign(b1 m + (1 - b1) g) + decay w), m <- b2 m + (1 - b2) g; Chen et al. 2023, Algorithm 2."""
    made, model = task(Lion, weight_decay=0.1), torch.nn.Linear(3, 1).double()
    twin = [p.detach().clone() for p in model.parameters()]
    momenta = [torch.zeros_like(p) for p in twin]
    inputs, targets = (tensor.double() for tensor in examples("a", "train").tensors)
    data = TensorDataset(inputs, targets)
    train_locally(made, model, data, made.local, seed=3)
    for begin in range(0, 20, 5):
        weight, bias = (p.requires_grad_() for p in twin)
        outputs = inputs[begin : begin + 5] @ weight.T + bias
        grads = torch.autograd.grad(made.loss(outputs, targets[begin : begin + 5]), [weight, bias])
        for place, (p, g) in enumerate(zip(twin, grads, strict=True)):
            p = p.detach()
            twin[place] = p - 0.01 * (torch.sign(0.9 * momenta[place] + 0.1 * g) + 0.1 * p)
            momenta[place] = 0.99 * momenta[place] + 0.01 * g
    for found, expected in zip(model.parameters(), twin, strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


def test_it_is_called_with_the_rate_and_with_what_is_not_zero() -> None:
    calls: list[dict[str, Any]] = []

    def kept(given: Any, **named: Any) -> torch.optim.Optimizer:
        calls.append(named)
        return torch.optim.SGD(given, **named)

    for local in ({}, {"momentum": 0.5}, {"momentum": 0.5, "weight_decay": 0.1, "lr": 1}):
        make_optimizer(Local(**{"optimizer": kept, "lr": 0.2, **local}), parameters())
    assert calls == [{"lr": 0.2}, {"lr": 0.2, "momentum": 0.5}, {"lr": 1, "momentum": 0.5, "weight_decay": 0.1}]
    local = Local(optimizer=functools.partial(torch.optim.SGD, nesterov=True, momentum=0.9))
    assert make_optimizer(local, parameters()).defaults["nesterov"]
    assert local.optimizer_name == "partial"
    assert Local(optimizer=Lion).optimizer_name == "Lion"


def test_it_may_take_the_context_with_the_options_of_the_run() -> None:
    def of_run(given: Any, lr: float, context: Any) -> torch.optim.Optimizer:
        return Lion(given, lr, betas=(context.options["beta"], 0.99))

    made = task(of_run)
    bench = ModelBench(made, {"site": "a", "local": {"task.beta": 0.7}})
    assert bench.num_examples() == 20
    with within(context_of(made)):
        assert make_optimizer(made.local, parameters()).defaults["betas"] == (0.8, 0.99)


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda given, lr: None, r"<lambda>: made an object of the type NoneType; allowed: a torch.optim.Optimizer"),
        (lambda given, lr: 1 / 0, "<lambda> raised ZeroDivisionError: division by zero"),
        (lambda given: None, "<lambda> raised TypeError: .*unexpected keyword argument 'lr'"),
        (lambda given, lr: torch.optim.SGD(parameters(), lr), "<lambda>: has other parameters than it"),
        (
            torch.optim.LBFGS,
            r"LBFGS: its step cannot be called without arguments \(missing a required argument: 'closure'",
        ),
        (lambda given, lr: exit(3), "<lambda> raised SystemExit: 3"),
    ],
)
def test_what_makes_no_optimizer_is_told_before_a_round(optimizer: Any, told: str) -> None:
    for request in ({"site": "a"}, {}):
        with pytest.raises(TaskBroken, match=f"^local.optimizer: .*{told}"):
            ModelBench(task(optimizer), request)


def test_it_goes_with_no_algorithm_that_counts_steps_of_sgd() -> None:
    for algorithm in ("fednova", "scaffold"):
        with pytest.raises(TaskBroken, match=r"local.optimizer must be 'sgd' \(.*\), got 'Lion'"):
            ModelBench(task(Lion), {"algorithm": algorithm})


def test_a_centralized_training_asks_for_one_of_its_own() -> None:
    local = task(Lion).local
    with pytest.raises(ValueError, match=r"train.optimizer: absent, and local.optimizer is Lion.*allowed: sgd, adam"):
        make_recipe(local, TrainConfig(), num_examples=20, num_ranks=1)
    recipe = make_recipe(local, TrainConfig(optimizer="adam"), num_examples=20, num_ranks=1)
    assert recipe.optimizer.name == "adam"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"atoll.local_optimizers": {"lion": "acme_lion:Lion", "sgd": "acme_lion:Lion", "gone": "acme_lion:Gone"}}
    install(tmp_path, "acme-lion", modules={"acme_lion": LION}, points=points)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_a_run_names_an_installed_package_s_optimizer() -> None:
    local = Local().with_overrides({"optimizer": "lion", "lr": 0.01})
    assert local.optimizer == "lion" == local.optimizer_name
    assert type(make_optimizer(local, parameters())).__name__ == "Lion"
    assert type(make_optimizer(Local(), parameters())) is torch.optim.SGD, "a built-in name stays what it is"
    with pytest.raises(
        TaskBroken,
        match=r"got 'gone': acme_lion:Gone of the package acme-lion 1.2 cannot be loaded",
    ):
        make_optimizer(Local(optimizer="gone"), parameters())


@pytest.mark.usefixtures("package")
def test_an_optimizer_that_does_not_load_is_refused_before_anything_runs() -> None:
    task = Task(model=lambda: torch.nn.Linear(1, 1), data=lambda site, split: None, loss=torch.nn.functional.l1_loss)
    check_training(task, "fedavg", Local(optimizer="lion"))
    with pytest.raises(
        TaskBroken,
        match=r"got 'gone': acme_lion:Gone of the package acme-lion 1.2 cannot be loaded",
    ):
        check_training(task, "fedavg", Local(optimizer="gone"))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["acme_lion:Lion", "os:system", "path/to/file.py:Lion", "lions", "", 7])
def test_a_run_names_nothing_else(name: Any) -> None:
    """A reference that comes over the wire is never resolved."""
    with pytest.raises(OverridesRefused, match=r"local.optimizer: (must be one of sgd, adam|expected str)"):
        Local().with_overrides({"optimizer": name})
    with pytest.raises(ValueError, match=r"local\.optimizer"):
        Local(optimizer=name)


def test_a_site_without_the_package_reports_the_name() -> None:
    request = {"op": "load", "task": f"{__file__}:by_default", "site": "a", "local": {"optimizer": "lion"}}
    answer = Operations().answer(request, Deadline.never())
    assert answer["error"] == "task_broken"
    assert "a name that one installed package declares (`atoll plugins`)" in answer["detail"]
    assert "got 'lion'" in answer["detail"]


by_default = task("sgd")
