"""The hooks of a task's own algorithm on a mesh: the numbers of one process, or a refusal before anything runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Algorithm
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.mesh_client.faults import faults_of_mesh
from atoll.parallel.world import read_world
from atoll.task.errors import TaskBroken
from atoll.tensors import safetensors_file
from tests.parallel.mesh_client import hook_tasks
from tests.parallel.mesh_client.clients import (
    Json,
    distance,
    in_one_process,
    plan_of,
    request_of,
    update_in,
    write_version,
)
from tests.parallel.ranks import call_on_ranks

NAMES = ("proximal", "clipped", "feddyn", "fedcm", "normed", "averaged")

LAYOUTS: dict[str, Json] = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "uneven": {"dp_shard": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"tp": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
}

SHORT = ("feddyn", "averaged")
"""The tasks that `make test` trains, under FSDP: one with state of a client, one with an average of its own."""

TIMEOUT_S = 560.0


def request(folder: Path, name: str, out: str, number: int, **fields: Any) -> Json:
    """Return the request of round 1 or 2; the second begins with the state that one process has left."""
    own = folder / name / "one.1.own"
    before = {"own": str(own), "has_counted": True} if number == 2 and own.exists() else {}
    paths = {"model": str(folder / name / f"version.{number}")}
    whole = request_of(folder / name, f"{out}.{number}", round_id=number, version=number - 1, **before, **paths)
    return {**whole, **fields}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Json]]]:
    """Train each task for two rounds in one process; return the folder, and the answers."""
    folder = tmp_path_factory.mktemp("hooks")
    answers: dict[str, list[Json]] = {}
    for name in NAMES:
        place = folder / name
        place.mkdir()
        write_version(place, name)
        answers[name] = []
        for number in (1, 2):
            (place / "version").rename(place / f"version.{number}")
            fields = request(folder, name, "one", number)
            del fields["out"]
            answer, update = in_one_process(place, name=name, **fields)
            answers[name].append(answer)
            (place / "one").rename(place / f"one.{number}")
            version = safetensors_file.read(place / f"version.{number}")
            added = {tensor: array + update.get(tensor, 0) for tensor, array in version.items()}
            safetensors_file.write(place / "version", added)
    return folder, answers


def tasks_on_a_rank(folder: Path, options: Json, names: Sequence[str]) -> dict[str, list[Json]]:
    """Train tasks for two rounds each on this rank."""
    answers: dict[str, list[Json]] = {}
    for name in names:
        task = getattr(hook_tasks, name)
        bench = MeshBench(task, {"site": "here"}, plan_of(options), read_world())
        description, answers[name] = bench.describe(), []
        for number in (1, 2):
            asked = request(folder, name, "mesh", number)
            answer = bench.train(asked, lambda: False)
            answer |= {"evaluation": bench.evaluate(asked | {"split": "test"}), "description": description}
            answers[name].append(answer)
    return answers


@pytest.mark.real
@pytest.mark.parametrize(
    ("layout", "names"),
    [("fsdp", SHORT), *(pytest.param(layout, NAMES, marks=pytest.mark.long, id=layout) for layout in LAYOUTS)],
)
def test_hooks_have_the_numbers_of_one_process(
    layout: str, names: Sequence[str], one_process: tuple[Path, dict[str, list[Json]]]
) -> None:
    folder, expected = one_process
    options = LAYOUTS[layout]
    found = call_on_ranks(tasks_on_a_rank, plan_of(options).mesh.size, folder, options, names, timeout_s=TIMEOUT_S)[0]
    for name in names:
        for number, (answer, of_one) in enumerate(zip(found[name], expected[name], strict=True), 1):
            where, place = f"{name}, round {number}", folder / name
            update = update_in(place / f"mesh.{number}", answer["parts"])
            assert distance(update, safetensors_file.read(place / f"one.{number}")) < 1e-6, where
            assert answer["description"] == of_one["description"], where
            assert answer["has_own"] == of_one["has_own"], where
            losses = [of["evaluation"]["statistics"]["loss"] for of in (answer, of_one)]
            assert losses[0] == pytest.approx(losses[1], rel=5e-6), where
            if of_one["has_own"]:
                states = [safetensors_file.read(place / f"{which}.{number}.own") for which in ("mesh", "one")]
                assert distance(*states) < 1e-6, where
                assert all(states[0][tensor].dtype == array.dtype for tensor, array in states[1].items()), where


@pytest.mark.slow
def test_the_algorithms_differ(one_process: tuple[Path, dict[str, list[Json]]]) -> None:
    """What is compared above is changed by the hooks: updates differ, and the state and the shared tensors count."""
    folder, _ = one_process
    updates = {name: safetensors_file.read(folder / name / "one.2") for name in NAMES}
    weights = {name: update["layers.0.mlp.up.weight"] for name, update in updates.items()}
    for name in set(NAMES) - {"averaged"}:
        others = [other for other in weights if other != name]
        assert all(np.abs(weights[name] - weights[other]).max() > 1e-5 for other in others), name
    assert not any(name.endswith("norm.weight") for name in updates["averaged"])
    assert "algorithm/of each" in updates["normed"]


class OfTheRank(Algorithm):
    """The mean of what a rank has, which is no mean of the tensor."""

    def gradients(self, client: Any, gradients: Any) -> Any:
        return {name: g - getattr(g, "to_local", lambda g=g: g)().mean() for name, g in gradients.items()}


class InArrays(Algorithm):
    """A step that leaves torch."""

    def end(self, client: Any) -> None:
        client.largest = max(np.abs(tensor.numpy()).max() for tensor in client.parameters.values())


def refused_on_a_rank() -> list[str]:
    """Return why this mesh does not take these algorithms."""
    found = []
    for algorithm in (OfTheRank(), InArrays()):
        bench = MeshBench(replace(hook_tasks.proximal, algorithm=algorithm), {"site": "here"}, SHARDS, read_world())
        with pytest.raises(TaskBroken) as refused:
            bench.describe()
        found.append(str(refused.value))
    return found


@pytest.mark.real
def test_what_a_mesh_computes_otherwise_is_refused_before_a_round() -> None:
    other, failing = call_on_ranks(refused_on_a_rank, 2, timeout_s=TIMEOUT_S)[1]
    assert "OfTheRank gives other numbers on dp_shard=2 than in one process (round 1, step 1, the gradient of" in other
    assert "a hook of InArrays fails on a mesh (RuntimeError: .numpy() is not supported" in failing


SHARDS = Plan(mesh=Mesh(dp_shard=2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ditto", "task.algorithm: Personal uses client.gradient, and a rank of a mesh has rows of a batch"),
        ("pfedme", "task.algorithm: MoreauEnvelope uses client.gradient"),
        ("mime", "task.algorithm: MimeLite uses client.full_gradient"),
        ("ifca", "task.algorithm: ChooseCluster uses client.full_loss"),
        ("moon", "task.algorithm: Contrast.loss needs whole batches"),
    ],
)
def test_what_needs_whole_batches_is_refused_by_name(name: str, words: str) -> None:
    task = getattr(hook_tasks, name)
    (fault,) = faults_of_mesh(task, task.local, "fedavg", SHARDS)
    assert words in fault
    assert "train in one process" in fault


class Noisy(Algorithm):
    def gradients(self, client: Any, gradients: Any) -> Any:
        return {name: g + 0.1 * torch.randn_like(g) for name, g in gradients.items()}


class Unrepeatable(Algorithm):
    def gradients(self, client: Any, gradients: Any) -> Any:
        return {name: g * np.random.default_rng().uniform(1, 2) for name, g in gradients.items()}


class Looking(Algorithm):
    def after_step(self, client: Any) -> None:
        client.state["seen"] = client.inputs.float().mean()


class Failing(Algorithm):
    def begin(self, client: Any) -> None:
        raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("algorithm", "plan", "words"),
    [
        (Noisy(), SHARDS, "a hook draws random numbers, and each rank of a mesh draws different ones"),
        (Noisy(), Plan(mesh=Mesh(dp_replicate=2)), "a hook draws random numbers"),
        (Unrepeatable(), SHARDS, "Unrepeatable gives other numbers when it is repeated (round 1, step 1, the gradient"),
        (Looking(), SHARDS, "Looking uses client.inputs"),
        (Failing(), SHARDS, "a hook of Failing fails on a mesh (KeyError: 'no such layer')"),
        (hook_tasks.Proximal(), Plan(mesh=Mesh(pp=2)), "the hooks of Proximal need all parameters, and pp=2"),
        (hook_tasks.Proximal(), Plan(mesh=Mesh(dp_replicate=2), outer="diloco:2"), "one model in each step"),
    ],
)
def test_a_hook_that_ranks_would_compute_otherwise_is_refused(algorithm: Algorithm, plan: Plan, words: str) -> None:
    task = replace(hook_tasks.proximal, algorithm=algorithm)
    (fault,) = faults_of_mesh(task, task.local, "fedavg", plan)
    assert words in fault
