import builtins
import gc
import pickle
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.simulations.engines.engine import ClientFailed, Job
from atoll.simulations.engines.processes import over_ray
from atoll.simulations.engines.processes.over_ray import STARTS, OverRay, RayMissing
from atoll.simulations.engines.processes.processes import WorkerDied
from atoll.simulations.engines.sequential import Sequential
from tests.cli.invoking import shown
from tests.simulations.engines.cases import SIZES, Case, all_trained, assert_same_bits, first_version, two_rounds
from tests.waiting import BOUND_S

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own, when it starts and ends


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect what Ray left open, so that its warnings do not appear in the middle of another test."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the bound of an actor's start: beside twenty busy processes Ray took more than two minutes for it."""
    monkeypatch.setattr(over_ray, "START_TIMEOUT_S", 4 * BOUND_S)


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if len(targets) == 7:
        raise RuntimeError("no batches of seven")
    return torch.nn.functional.cross_entropy(outputs, targets)


@pytest.mark.long
@pytest.mark.slow
def test_actors_train_with_the_bits_of_deployed_clients() -> None:
    case = Case("mlp scaffold", local={"epochs": 2}, algorithm="scaffold", loss=picky)
    training = case.training()
    engine = OverRay(training, workers=2)
    try:
        pairs = two_rounds(case, lambda version, jobs: all_trained(engine.train(version, jobs)), training)
        for found, expected in pairs:
            assert_same_bits(found, expected)
        jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 8)]
        found = list(engine.train(first_version(training), jobs))
        assert [each.client_id for each in found] == [job.client_id for job in jobs]
        with pytest.raises(ClientFailed, match=r"client seven failed:\nTraceback[\s\S]*no batches of seven"):
            list(engine.train(first_version(training), [Job("a", 1), Job("seven", 1)]))
        assert all(np.isfinite(each.row).all() for each in all_trained(iter(found)) if each.row is not None)
    finally:
        engine.close()
        engine.close()


@pytest.mark.long
@pytest.mark.slow
def test_a_task_of_a_file_trains_in_actors_as_it_does_here(tmp_path: Path) -> None:
    """The example caches a function, which every pickler sends by its name alone."""
    models = []
    for engine in ("ray", "sequential"):
        result = shown(
            "simulate", "examples/digits.py:task", "--rounds", 2, "--engine", engine, "--out", tmp_path / engine
        )
        assert result["state"] == "finished"
        models.append([path.read_bytes() for path in sorted((tmp_path / engine / "models").rglob("*.safetensors"))])
    assert models[0]
    assert models[0] == models[1]


class Unwell:
    """A Ray whose first starts fail."""

    def __init__(self, failures: int) -> None:
        self.failures, self.starts, self.shutdowns = failures, list[dict[str, Any]](), 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.starts.append(options)
        if len(self.starts) <= self.failures:
            raise Exception("The current node timed out\nduring startup.")

    def shutdown(self) -> None:
        self.shutdowns += 1

    def cluster_resources(self) -> dict[str, float]:
        raise InterruptedError("it is up")


def test_a_ray_of_this_machine_is_started_again_when_it_did_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("mlp").training()
    for failures in range(STARTS):
        ray = Unwell(failures)
        monkeypatch.setattr(over_ray, "_ray", lambda ray=ray: ray)
        with pytest.raises(InterruptedError, match="it is up"):
            OverRay(training)
        assert (len(ray.starts), ray.shutdowns) == (failures + 1, failures)
    ray = Unwell(STARTS)
    monkeypatch.setattr(over_ray, "_ray", lambda: ray)
    with pytest.raises(WorkerDied, match=r"no Ray started on this machine in 3 attempts: The current node timed out"):
        OverRay(training)
    assert ray.shutdowns == STARTS


class Died(Exception):
    """An error of Ray: an actor has died."""


class Errors:
    RayTaskError = type("RayTaskError", (Exception,), {})
    RayActorError = ObjectLostError = WorkerCrashedError = NodeDiedError = Died


class Mortal:
    """A Ray in this process. Each actor dies after a number of windows; the results that it still owes are lost.

    Args:
        lives: the windows of each actor, in the order in which they are made; later ones live for ever.
        processors: of the cluster.
        poison: the client whose window no actor survives.
        away: the windows after whose computing the node of a dead actor comes back; until then no new one starts.
    """

    exceptions = Errors

    def __init__(self, lives: list[int], processors: int = 3, poison: str = "", away: int = 0) -> None:
        self.computed, self.away = list[int](), away
        self.lives, self.poison, self.actors, self.processors = lives, poison, list[Any](), processors
        self.cloudpickle = self

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.processors, "GPU": 1.0}

    available_resources = cluster_resources

    def dumps(self, plan: Any) -> Any:
        return plan

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: Any) -> Any:
        return lambda kind: Making(self, kind)

    def wait(self, futures: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        is_away = len(self.computed) < self.away
        late = [future for future in futures if is_away and getattr(future, "number", 0) >= self.processors]
        return [future for future in futures if future not in late], late

    def get(self, future: Any) -> Any:
        return future()

    def kill(self, actor: Any) -> None:
        self.actors.remove(actor)


class Making:
    def __init__(self, ray: Mortal, kind: Any) -> None:
        self.ray, self.kind = ray, kind

    def remote(self, files: Any, plan: Any, form: Any) -> Any:
        number = len(self.ray.actors)
        actor = Actor(self.ray, self.kind(files, pickle.dumps(None), form, plan.trainer()), number)
        self.ray.actors.append(actor)
        return actor


class Actor:
    def __init__(self, ray: Mortal, inner: Any, number: int) -> None:
        self.ray, self.inner, self.number = ray, inner, number
        self.left = ray.lives[number] if number < len(ray.lives) else 10**9

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Any:
        def result() -> Any:
            if self.name != "ready":
                if any(job.client_id == self.actor.ray.poison for job in arguments[3]):
                    self.actor.left = 0
                if not self.actor.left:
                    raise Died("its node is gone")
                self.actor.left -= 1
                self.actor.ray.computed.append(self.actor.number)
            return getattr(self.actor.inner, self.name)(*arguments)

        if self.name == "ready":
            result.number = self.actor.number  # type: ignore[attr-defined]
        return result


def mortal(monkeypatch: pytest.MonkeyPatch, ray: Mortal, training: Any, workers: int = 3) -> OverRay:
    class Here(over_ray._Actor):
        def __init__(self, files: Any, plan: bytes, form: Any, trainer: Any) -> None:
            super().__init__({}, plan, form)
            self._trainer = trainer

    plan = type("Plan", (), {"trainer": lambda self: None})
    monkeypatch.setattr(over_ray, "_Actor", Here)
    monkeypatch.setattr(over_ray.pickle, "loads", lambda _: plan())
    monkeypatch.setattr(over_ray, "_ray", lambda: ray)
    return OverRay(training, workers=workers)


def test_what_a_dead_actor_owes_is_computed_again_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors die at their first, their second and their fifth window, and so does one that took a place."""
    training = Case("mlp").training()
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 12)]
    right = all_trained(Sequential(training).train(first_version(training), jobs))
    ray = Mortal([0, 1, 4, 2])
    engine = mortal(monkeypatch, ray, training)
    found = all_trained(engine.train(first_version(training), jobs))
    assert len(ray.actors) > 3
    assert [each.client_id for each in found] == [job.client_id for job in jobs]
    for one, other in zip(found, right, strict=True):
        assert one.statistics == other.statistics
        for name in one.update:
            np.testing.assert_array_equal(one.update[name], other.update[name])


def test_a_node_that_comes_back_takes_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node of two actors of three dies in their second window; the third works alone until it is back."""
    training, version = Case("mlp").training(), first_version(Case("mlp").training())
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 12)]
    right = all_trained(Sequential(training).train(version, jobs))
    ray = Mortal([1, 1], away=12)
    engine = mortal(monkeypatch, ray, training)
    found = all_trained(engine.train(version, jobs))
    assert ray.computed[:12] == [0, 1, *[2] * 10]
    assert 3 in ray.computed[12:], "the first of the new actors, which this Ray always finds idle"
    for one, other in zip(found, right, strict=True):
        for name in one.update:
            np.testing.assert_array_equal(one.update[name], other.update[name])


def test_clients_that_kill_every_actor_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("mlp").training()
    engine = mortal(monkeypatch, Mortal([], poison="c"), training)
    with pytest.raises(WorkerDied, match=r"3 actors of Ray have died with the same clients \(c\): its node is gone"):
        list(engine.train(first_version(training), [Job(site, 1) for site in SIZES]))


def test_more_workers_than_processors_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayMissing, match=r"simulation\.workers: got 4; allowed: at most 3, the processors of the Ray"):
        mortal(monkeypatch, Mortal([]), Case("mlp").training(), workers=4)


@pytest.mark.long
@pytest.mark.slow
def test_an_actor_that_is_killed_costs_nothing() -> None:
    training = Case("mlp", local={"epochs": 20}).training()
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 20)]
    version = first_version(training)
    right = Sequential(training)
    engine = OverRay(training, workers=2)
    try:
        results = engine.train(version, jobs)
        found = [next(results)]
        engine._ray.kill(engine._actors[0].handle)
        found = [*all_trained(iter(found)), *all_trained(results)]
        for one, other in zip(found, all_trained(right.train(version, jobs)), strict=True):
            assert one.statistics == other.statistics
            assert one.update.keys() == other.update.keys()
            for name in one.update:
                np.testing.assert_array_equal(one.update[name], other.update[name])
        measured = [Job(site, 0) for site in SIZES]
        assert engine.evaluate(version, measured) == right.evaluate(version, measured)
    finally:
        engine.close()


def test_an_address_where_no_ray_is_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Case("mlp").training()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address, asked in ((f"127.0.0.1:{port}", 0), (f"[::1]:{port}", 0), ("127.0.0.1:70000", 0), ("auto", 1)):
        ray = Unwell(1)
        monkeypatch.setattr(over_ray, "_ray", lambda ray=ray: ray)
        with pytest.raises(
            RayMissing, match=rf"^simulation\.ray_address: no Ray answers on '{re.escape(address)}': .+$"
        ):
            OverRay(training, address=address)
        assert len(ray.starts) == asked


def test_without_ray_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *others, **more)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RayMissing, match=r"pip install 'atoll\[sim\]'"):
        OverRay(Case("mlp").training())
