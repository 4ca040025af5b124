import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div, log_softmax, softmax

from atoll import Algorithm
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.hooks import HookRefused, Hooks
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.choice import Resources, choose
from atoll.simulations.engines.engine import Job, Trained, Training
from atoll.simulations.engines.loop import orders
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.task.randomness import seed_everything
from tests.simulations.engines.cases import (
    SIZES,
    WORDS,
    Case,
    Featured,
    accuracy,
    all_trained,
    batchnorm_cnn,
    cnn,
    dropout_mlp,
    featured_loss,
    first_version,
    groupnorm_cnn,
    images,
    mlp,
    vectors,
)


class Proximal(Algorithm):
    """FedProx as a hook."""

    def gradients(self, client, gradients):
        return {name: g + 0.5 * (client.parameters[name] - client.start[name]) for name, g in gradients.items()}


class InPlace(Algorithm):
    """The same, in place."""

    def gradients(self, client, gradients):
        for name, gradient in gradients.items():
            gradient.add_(client.parameters[name] - client.start[name], alpha=0.5)
        return gradients


class Clamped(Algorithm):
    """Weights that are changed in place after each step."""

    def after_step(self, client):
        for parameter in client.parameters.values():
            parameter.clamp_(-0.3, 0.3)


class Momentum(Algorithm):
    """A momentum in the state, a count of steps beside it, and a mean that travels; two branches on the round."""

    def shared(self, model):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def state(self, model):
        zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        return zeros | {"count": torch.zeros((), dtype=torch.int64)}

    def gradients(self, client, gradients):
        for name, gradient in gradients.items():
            client.state[name] = 0.9 * client.state[name] + gradient
        if client.context.version == 0:
            return {name: client.state[name] for name in gradients}
        return {name: 0.5 * client.state[name] + 0.5 * client.received[name] for name in gradients}

    def after_step(self, client):
        client.state["count"].add_(1)

    def end(self, client):
        for name, now in client.parameters.items():
            client.shared[name] = (client.start[name] - now) / (client.local.lr * client.num_steps)


class Smoothed(Algorithm):
    """A loss with the inputs, the size of the batch and a tensor of the state."""

    def state(self, model):
        return {"mean": torch.zeros(6)}

    def loss(self, client, loss, outputs):
        client.state["mean"] = 0.5 * client.state["mean"] + 0.5 * client.inputs.detach().mean(0)
        penalty = (outputs * (client.inputs - client.state["mean"]).sum(1, keepdim=True)).square().mean()
        return loss + 0.1 * penalty * len(client.inputs) / 8


class Distilled(Algorithm):
    """A loss that pulls the outputs to those of the global model."""

    def loss(self, client, loss, outputs):
        return loss + kl_div(log_softmax(outputs, -1), softmax(client.outputs(client.start), -1), reduction="batchmean")


class ByBatch(Algorithm):
    """Gradients that depend on the size of the batch and on its targets: short batches move half as far."""

    def gradients(self, client, gradients):
        share = 0.5 if len(client.targets) < client.local.batch_size else 1.0
        return {name: share * g * (1 + client.targets.float().mean()) for name, g in gradients.items()}


class Personal(Algorithm):
    """Ditto: a model of each client's own."""

    def state(self, model):
        return dict(model.state_dict())

    def after_step(self, client):
        for name, gradient in client.gradient(client.state).items():
            own = client.state[name]
            client.state[name] = own - 0.1 * (gradient + 0.5 * (own - client.start[name]))


class Prepared(Algorithm):
    """What is set before the first step and after the last, with as many steps as each client has."""

    def shared(self, model):
        return {"sum": torch.zeros(())}

    def state(self, model):
        return {"anchor": next(iter(model.parameters())).detach().clone()}

    def begin(self, client):
        assert client.inputs is None
        client.state["anchor"] = 0.5 * next(iter(client.parameters.values())) + 0.5 * client.state["anchor"]

    def gradients(self, client, gradients):
        first = next(iter(gradients))
        return gradients | {first: gradients[first] + client.state["anchor"] / (1 + client.num_steps)}

    def end(self, client):
        client.shared["sum"] = client.state["anchor"].sum() * client.num_steps


class Noted(Algorithm):
    """What a hook sets on the client until its training ends: a tree, a number, means of batches of several sizes."""

    def shared(self, model):
        return {"seen": torch.zeros(6)}

    def begin(self, client):
        client.velocity = {"of": [torch.zeros_like(p) for p in client.parameters.values()], "decay": 0.9}
        client._last, client.unset = torch.zeros(6), None

    def gradients(self, client, gradients):
        client._last = 0.5 * client._last + client.inputs.mean(0) * len(client.inputs)
        for velocity, gradient in zip(client.velocity["of"], gradients.values(), strict=True):
            velocity.mul_(client.velocity["decay"]).add_(gradient, alpha=0.1)
        if not hasattr(client, "first"):
            client.first = client.velocity["of"][0].abs().sum()
        scale = 1 + 0.01 * client.first
        return {n: g + scale * v for (n, g), v in zip(gradients.items(), client.velocity["of"], strict=True)}

    def end(self, client):
        client.shared["seen"] = client._last
        client.velocity = "ended"


class InPlaceShared(Algorithm):
    """Shared tensors that are changed in place, from what the clients have received."""

    def shared(self, model):
        return {"steps": torch.ones(()), "sum": torch.zeros(3)}

    def gradients(self, client, gradients):
        client.shared["sum"].add_(gradients["layers.1.0.bias"])
        return gradients | {"layers.1.0.bias": gradients["layers.1.0.bias"] + client.received["sum"]}

    def after_step(self, client):
        client.shared["steps"] += 1 + client.targets.float().mean()


class Contrast(Algorithm):
    """MOON: features that are near those of the global model, and far from those of the last local one."""

    def state(self, model):
        return model.state_dict()

    def loss(self, client, loss, outputs):
        towards, away = client.outputs(client.start)[1], client.outputs(client.state)[1]
        pairs = torch.stack([cosine_similarity(outputs[1], other) / 0.5 for other in (towards, away)], dim=1)
        return loss + cross_entropy(pairs, torch.zeros(len(pairs), dtype=torch.long))

    def end(self, client):
        client.state = {name: tensor.clone() for name, tensor in client.parameters.items()}


@dataclass(frozen=True)
class Hooked:
    algorithm: type[Algorithm]
    local: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 2})
    case: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.algorithm.__name__} {dict(self.local)} {getattr(self.case.get('model'), '__name__', '')}"


def training_of(algorithm: Algorithm | None, local: Mapping[str, Any] | None = None, **case: Any) -> Training:
    one = Case("hooked", local=local or {"epochs": 2}, **case)
    return replace(one.training(), task=replace(one.task(), algorithm=algorithm))


def rounds(training: Training, engine: Any, reference: Any, count: int = 2) -> list[tuple[Trained, Trained]]:
    """Return the results of both engines for the same jobs, each round with the states that the second one found."""
    version, own, found = first_version(training), dict[str, Arrays](), []
    for number in range(count):
        jobs = [
            Job(site, 2**40 * number + seed, own=own.get(site) or None, round_id=number, version=number)
            for seed, site in enumerate(SIZES)
        ]
        theirs = all_trained(reference.train(version, jobs))
        found += list(zip(all_trained(engine.train(version, jobs)), theirs, strict=True))
        own = {one.client_id: one.own for one in theirs}
        for one in theirs:
            for name, change in one.update.items():
                version[name] = np.asarray(version[name] + change / len(jobs), version[name].dtype)
    return found


def check(training: Training, count: int = 2) -> None:
    engine = Batched(training, at_once=3)
    engine._trainer._alone.one = pytest.fail  # type: ignore[attr-defined]
    rounding = 5e-7 * np.sqrt(sum(float(np.square(array).sum()) for array in first_version(training).values()))
    for ours, theirs in rounds(training, engine, Sequential(training), count):
        for mine, expected in ((ours.update, theirs.update), (ours.own, theirs.own)):
            assert mine.keys() == expected.keys()
            for name, array in expected.items():
                assert mine[name].dtype == array.dtype
                distance = np.linalg.norm((mine[name] - array).astype(float))
                assert distance <= 1e-5 * np.linalg.norm(array) + rounding / training.local.lr, name
        for name, sums in theirs.statistics.items():
            np.testing.assert_allclose(ours.statistics[name], sums, rtol=1e-5)
        assert (ours.num_examples, ours.work, ours.report) == (theirs.num_examples, theirs.work, theirs.report)


ALL = {"epochs": 2, "clip_norm": 0.5, "prox_mu": 0.1, "momentum": 0.5, "weight_decay": 0.1}
ADAM = {"optimizer": "adam", "lr": 0.01}


EVERY = (Proximal, InPlace, Clamped, Momentum, Smoothed, Distilled, ByBatch, Personal, Prepared, Noted, InPlaceShared)

VARIANTS = [
    *(Hooked(each, ALL) for each in (Proximal, Smoothed, ByBatch, Personal, Noted, InPlaceShared)),
    *(Hooked(each, ADAM) for each in (Proximal, Momentum, Distilled)),
    *(Hooked(each, {"max_steps": 3, "epochs": 3, "shuffle": False}) for each in (Prepared, Clamped)),
    Hooked(Momentum, {"batch_size": None}),
    *(Hooked(each, {"lr": 0.05}, {"model": cnn, "examples": images}) for each in (Momentum, Personal)),
    *(Hooked(Distilled, {"lr": 0.05}, {"model": net, "examples": images}) for net in (groupnorm_cnn, batchnorm_cnn)),
    Hooked(Momentum, {"lr": 0.05}, {"model": batchnorm_cnn, "examples": images}),
    *(Hooked(each, {"epochs": 2}, {"model": dropout_mlp}) for each in (Momentum, Smoothed, Distilled)),
    *(Hooked(each, {"epochs": 1}, WORDS) for each in (Momentum, Proximal, Clamped)),
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERY)
def test_hooks_agree_with_a_deployed_client(algorithm: type[Algorithm]) -> None:
    check(training_of(algorithm(), {"epochs": 2}))


@pytest.mark.slow
def test_a_hook_sees_all_outputs_of_a_model() -> None:
    pair = {"model": Featured, "loss": featured_loss, "metric": lambda outputs, targets: accuracy(outputs[0], targets)}
    check(training_of(Contrast(), {"epochs": 2}, **pair))


@pytest.mark.long
@pytest.mark.parametrize("hooked", VARIANTS, ids=str)
def test_hooks_agree_under_other_settings_and_models(hooked: Hooked) -> None:
    check(training_of(hooked.algorithm(), hooked.local, **hooked.case))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Proximal, Prepared])
def test_a_hooked_round_is_that_of_a_deployed_client(algorithm: type[Algorithm]) -> None:
    check(training_of(algorithm(), {"max_steps": 3}), 1)


def by_a_plain_loop(training: Training, version: Arrays, job: Job) -> Arrays:
    """Return the update of FedProx with a momentum of the client's own, whose state begins at zero, in float64."""
    model = mlp().double()
    model.load_state_dict({name: torch.tensor(array).double() for name, array in version.items()})
    inputs, targets = vectors(SIZES[job.client_id], SIZES[job.client_id])
    seed_everything(job.seed)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in start.items()}
    for order in islice(orders(len(targets), training.local.epochs, torch.Generator()), training.local.epochs):
        for rows in torch.split(order, 8):
            loss = cross_entropy(model(inputs[rows].double()), targets[rows])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
                    momentum[name] = 0.9 * momentum[name] + gradient + 0.5 * (p - start[name])
                    p.sub_(momentum[name], alpha=training.local.lr)
    return {name: (p.detach() - start[name]).numpy() for name, p in model.named_parameters()}


class ProximalMomentum(Algorithm):
    def state(self, model):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def gradients(self, client, gradients):
        for name, gradient in gradients.items():
            near = gradient + 0.5 * (client.parameters[name] - client.start[name])
            client.state[name] = 0.9 * client.state[name] + near
        return dict(client.state)


def test_hooks_agree_with_a_plain_loop_in_float64() -> None:
    training = training_of(ProximalMomentum(), {"epochs": 2, "lr": 0.05})
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    for job, found in zip(jobs, all_trained(Batched(training).train(version, jobs)), strict=True):
        for name, expected in by_a_plain_loop(training, version, job).items():
            np.testing.assert_allclose(found.update[name], expected, atol=2e-6, err_msg=name)


def test_the_same_jobs_give_the_same_bits_again() -> None:
    training = training_of(Momentum())
    engine = Batched(training, at_once=3)
    version, jobs = first_version(training), [Job(site, seed) for seed, site in enumerate(SIZES)]
    once, again = (all_trained(engine.train(version, jobs)) for _ in range(2))
    for one, other in zip(once, again, strict=True):
        for name, array in (one.update | one.own).items():
            np.testing.assert_array_equal(array, (other.update | other.own)[name])


class OnMore(Algorithm):
    """A hook of one function, for refusals."""

    def __init__(self, hook: str, function: Callable[..., Any]) -> None:
        setattr(self, hook, lambda *args: function(self, *args))
        self.count, self.total, self.tensor = 0, [0.0], torch.zeros(())
        self.generator = np.random.default_rng(0)

    def state(self, model):
        return {"a": torch.zeros(3)}

    def shared(self, model):
        return {"s": torch.zeros(3)}


def counted(self, client, gradients):
    self.count += 1
    return gradients


def listed(self, client):
    self.total.append(1.0)


COUNTS = {"calls": 0}


def counted_globally(self, client):
    COUNTS["calls"] += 1


def set_attribute(self, client):
    client.anchor = client.parameters


def set_start(self, client):
    client.anchor = client.start


def set_twice(self, client):
    client.one = client.two = torch.zeros(3)


def set_state(self, client):
    client.mine = client.state["a"]


def set_number(self, client):
    client.count = getattr(client, "count", 0) + 1


def set_length(self, client, loss, outputs):
    client.length = len(client.inputs)
    return loss


def set_object(self, client):
    client.meter = random.Random(0)


def scaled(number: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, client, gradients: {name: g * number(self, client, g) for name, g in gradients.items()}


def keep(value: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self, client, gradients):
        client.state["a"] = value(client, gradients)
        return gradients

    return hook


def looks_at_the_model(self, client, loss, outputs):
    return loss + sum(p.square().sum() for p in client.model.parameters())


def steps_in_the_loss(self, client, loss, outputs):
    next(iter(client.parameters.values())).mul_(0.5)
    return loss


REFUSED: list[tuple[str, Callable[..., Any], str]] = [
    ("gradients", counted, "changes count in a hook: the object is shared"),
    ("after_step", listed, r"changes total in a hook"),
    ("after_step", counted_globally, "in a hook: the object is shared"),
    ("begin", set_attribute, "begin sets client.anchor to a view of a parameter or gradient, which changes: clone"),
    ("begin", set_start, r"begin sets client.anchor to a view of another tensor of client: clone\(\) it"),
    ("begin", set_twice, "begin sets client.one to a view of another tensor"),
    ("begin", set_state, "begin sets client.mine to a view of another tensor"),
    ("begin", set_object, "begin sets client.meter, which holds a Random: a group supports tensors and numbers"),
    (
        "begin",
        lambda self, client: setattr(client, "num_steps", 3),
        "begin sets client.num_steps, a reserved name",
    ),
    ("after_step", set_number, "sets client.count to types, shapes or plain values that differ from other clients'"),
    ("loss", set_length, "sets client.length to types, shapes or plain values that differ from other clients'"),
    ("begin", lambda self, client: client.full_gradient(client.start), "begin calls client.full_gradient"),
    ("begin", lambda self, client: client.full_loss({}), "begin calls client.full_loss"),
    ("begin", lambda self, client: client.leaves_out.add("a"), "begin reads client.leaves_out"),
    ("begin", lambda self, client: setattr(client, "leaves_out", {"a"}), "begin sets client.leaves_out"),
    ("begin", lambda self, client: client.start["layers.0.0.weight"].zero_(), "changes client.start or"),
    ("begin", lambda self, client: client.received["s"].add_(1), "changes client.start or client.received in place"),
    ("end", lambda self, client: client.inputs.sum(), "end looks at the last batch"),
    ("loss", looks_at_the_model, "loss reads client.model"),
    ("loss", steps_in_the_loss, "changes layers.0.0.weight in place"),
    ("gradients", scaled(lambda self, client, g: g.sum().item()), r"torch.func .*\.item"),
    ("gradients", scaled(lambda self, client, g: 2.0 if g.sum() > 0 else 1.0), "torch.func .*control flow"),
    ("gradients", scaled(lambda self, client, g: torch.rand(())), "torch.func .*random"),
    ("gradients", scaled(lambda self, client, g: random.random()), "draws random numbers in a hook"),
    ("gradients", scaled(lambda self, client, g: self.generator.random()), "changes generator in a hook"),
    ("gradients", scaled(lambda self, client, g: self.tensor.add_(g.sum())), "torch.func"),
    ("gradients", scaled(lambda self, client, g: len(client.context.site)), "reads context.site"),
    ("gradients", lambda self, client, gradients: {}, "returns no gradient of layers.0.0.weight"),
    ("gradients", keep(lambda client, gradients: gradients["layers.1.0.bias"]), "view of a parameter or gradient"),
    ("gradients", keep(lambda client, gradients: client.parameters["layers.1.0.bias"]), "view of a parameter"),
    ("gradients", keep(lambda client, gradients: torch.zeros(4)), r"to \(\(4,\), torch.float32\); before, it was"),
    ("after_step", lambda self, client: client.state.update(b=torch.zeros(2)), "adds names to client.state"),
    ("after_step", lambda self, client: client.state.clear(), "adds names to client.state, or removes them: a"),
    ("state", lambda self, model: {"a": torch.zeros(3, dtype=torch.float64)}, "a is torch.float64"),
]


@pytest.mark.parametrize(
    ("hook", "function", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_no_product_can_take_is_refused_by_name_before_the_first_step(
    hook: str, function: Callable[..., Any], reason: str
) -> None:
    training = training_of(OnMore(hook, function), {"epochs": 1})
    with pytest.raises(HookRefused, match=reason) as refused:
        Batched(training)
    assert "OnMore" in str(refused.value)
    assert "engines sequential and processes" in str(refused.value)


def test_a_gradient_that_the_client_keeps_is_refused_where_it_is_clipped() -> None:
    with pytest.raises(HookRefused, match="returns a tensor that the client keeps"):
        Batched(training_of(Momentum(), {"clip_norm": 1e6}))


def test_layers_that_stay_at_a_client_are_refused() -> None:
    with pytest.raises(CannotBatch, match="keeps layers at the clients"):
        Batched(training_of(Proximal(), {"keep": "layers.1.*"}))


class Late(Algorithm):
    """A hook that torch.func cannot map in later rounds alone, after the trial."""

    def gradients(self, client, gradients):
        if client.context.round < 5:
            return gradients
        return {name: g * float(g.abs().sum() > 0) for name, g in gradients.items()}


def test_a_branch_that_the_trial_has_not_seen_is_trained_alone(caplog: pytest.LogCaptureFixture) -> None:
    training = training_of(Late(), {"max_steps": 2})
    engine, version = Batched(training), first_version(training)
    jobs = [Job(site, seed, round_id=7, version=6) for seed, site in enumerate(SIZES)]
    expected = all_trained(Sequential(training).train(version, jobs))
    for ours, theirs in zip(all_trained(engine.train(version, jobs)), expected, strict=True):
        for name, array in theirs.update.items():
            np.testing.assert_array_equal(ours.update[name], array)
    assert "trained one by one: task.algorithm: Late.gradients cannot be mapped" in caplog.text


def test_another_engine_is_chosen_with_the_reason() -> None:
    training = training_of(OnMore("gradients", scaled(lambda self, client, g: g.sum().item())), {"max_steps": 1})
    for name in ("batched", "auto"):
        choice = choose(training, first_version(training), list(SIZES)[:2], name=name, resources=Resources(1))
        assert choice.engine.name == "sequential"
        assert "not batched: task.algorithm: OnMore.gradients cannot be mapped" in "".join(choice.reasons)


def test_a_loss_that_is_not_overridden_stays_the_tasks() -> None:
    assert not Hooks(training_of(Proximal())).has_loss
    assert Hooks(training_of(Smoothed())).has_loss
