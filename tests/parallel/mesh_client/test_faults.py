"""What a mesh cannot take is said before anything runs, all of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll import Algorithm, Base, Local
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.mesh_client.faults import faults_of_mesh
from atoll.parallel.world import World
from atoll.task.errors import TaskBroken
from tests.parallel.mesh_client import tasks

SHARDS = Plan(mesh=Mesh(dp_shard=2))


def adagrad(parameters: list[object], lr: float) -> object:
    raise AssertionError("never called")


class WholeBatches(Algorithm):
    def loss(self, client: object, loss: object, outputs: object) -> object:
        raise AssertionError("never called")


def test_a_task_that_fits_has_no_faults() -> None:
    assert faults_of_mesh(tasks.task, tasks.task.local, "fedavg", SHARDS) == []
    synced = replace(SHARDS, batchnorm="sync")
    assert faults_of_mesh(tasks.pictures, tasks.pictures.local, "scaffold", synced) == []


def test_all_faults_are_said_at_once() -> None:
    local = Local(optimizer=adagrad, keep="nothing.*", batch_size=1)
    task = replace(tasks.task, algorithm=WholeBatches())
    found = faults_of_mesh(task, local, "fedavg", SHARDS)
    for word in (
        "task.algorithm: WholeBatches.loss needs whole batches",
        "local.keep: 'nothing.*' fits",
        "local.optimizer: adagrad",
        "a global batch of 1",
    ):
        assert [fault for fault in found if word in fault], (word, found)
    lost = replace(tasks.task, travels="trained", base=Base("/nowhere"))
    (fault,) = faults_of_mesh(lost, tasks.task.local, "fedavg", SHARDS)
    assert "base /nowhere: there is no such file or folder" in fault
    assert "task.fit:" in faults_of_mesh(tasks.with_fit, Local(), "fedavg", SHARDS)[0]


@pytest.mark.parametrize(
    ("plan", "algorithm", "words"),
    [
        (Plan(mesh=Mesh(dp_replicate=2), compression="bf16"), "fedavg", "plan.compression: must be none"),
        (Plan(mesh=Mesh(dp_replicate=2), outer="diloco:2"), "scaffold", "plan.outer: algorithm 'scaffold' needs one"),
        (Plan(mesh=Mesh(dp_replicate=2000)), "fedavg", "mesh: an update has at most 1024 parts, got 2000 ranks"),
        (Plan(mesh=Mesh(tp=3)), "fedavg", "tp=3 must divide"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Plan, algorithm: str, words: str) -> None:
    assert [fault for fault in faults_of_mesh(tasks.task, Local(batch_size=None), algorithm, plan) if words in fault]


@pytest.mark.parametrize(("microbatches", "words"), [(1, "plan.batchnorm must be sync"), (2, "allowed: 1, or a model")])
def test_batch_norms_need_the_whole_batch(microbatches: int, words: str) -> None:
    plan = replace(SHARDS, accumulate=microbatches)
    (fault,) = faults_of_mesh(tasks.pictures, tasks.pictures.local, "fedavg", plan)
    assert words in fault


SLOW: list[torch.Tensor] = []


def with_slow_head() -> nn.Module:
    model = tasks.task.model()
    head = list(model.parameters())[-1]
    head.slows = True  # type: ignore[attr-defined]
    SLOW[:] = [head]
    return model


def by_identity(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    slow = [p for p in parameters if any(p is other for other in SLOW)]
    others = [p for p in parameters if not any(p is other for other in SLOW)]
    return torch.optim.SGD([{"params": others}, *([{"params": slow, "lr": lr / 10}] if slow else [])], lr=lr)


def by_attribute(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    rates = [lr / 10 if hasattr(p, "slows") else lr for p in parameters]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
    return torch.optim.SGD(groups, lr=lr)


def test_an_optimizer_that_knows_parameters_by_identity_is_refused_and_one_by_attributes_is_not() -> None:
    task = replace(tasks.task, model=with_slow_head)
    (fault,) = faults_of_mesh(task, Local(batch_size=8, optimizer=by_identity), "fedavg", SHARDS)
    assert "local.optimizer: by_identity gives other settings to copies of the parameters" in fault
    assert faults_of_mesh(task, Local(batch_size=8, optimizer=by_attribute), "fedavg", SHARDS) == []
    copies = Plan(mesh=Mesh(dp_replicate=2))
    assert faults_of_mesh(task, Local(batch_size=8, optimizer=by_identity), "fedavg", copies) == []


def test_a_bench_refuses_before_any_group_is_used() -> None:
    with pytest.raises(TaskBroken, match=r"task\.fit: .* train in one process"):
        MeshBench(tasks.with_fit, {"site": "here"}, SHARDS, World())
