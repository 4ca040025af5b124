"""The boxes and the memory of each rank, before one is started: those that real ranks then send."""

import pytest
import torch
import torch.distributed as dist

from atoll import Local
from atoll.parallel.engine.plan import given_plan
from atoll.parallel.mesh_client.needs import moments_of, needs_of_ranks
from atoll.tensors.pieces import part_name
from atoll.training.model.parameters import model_on_meta
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import on_a_mesh, plan_of, write_version

BYTES = sum(4 * parameter.numel() for parameter in model_on_meta(tasks.task).parameters())


@pytest.mark.real
def test_the_parts_are_those_that_ranks_send(tmp_path):
    options = {"dp_shard": 2}
    write_version(tmp_path)
    answer, _ = on_a_mesh(tmp_path, options)
    needs = needs_of_ranks(tasks.task, tasks.task.local, plan_of(options))
    assert [each.own_boxes for each in needs] == [len(pieces) for pieces in answer["parts"]]
    sizes = [(tmp_path / "mesh" / part_name(index)).stat().st_size for index in range(len(needs))]
    assert [each.own for each in needs] == sizes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2", "pp=2", "pp=2,tp=2"])
def test_each_byte_is_sent_once_and_the_memory_is_the_sum(mesh):
    plan = given_plan(mesh, {})
    needs = needs_of_ranks(tasks.task, Local(optimizer="adamw"), plan)
    assert [each.rank for each in needs] == list(range(plan.mesh.size))
    assert sum(each.own for each in needs) == BYTES
    for each in needs:
        assert each.boxes >= each.own_boxes
        assert each.gradients == pytest.approx(each.held, abs=1024), "the rotary tables are held, and have none"
        assert each.optimizer == 2 * each.gradients + 4 * each.boxes
        assert each.peak == each.held + each.gradients + each.optimizer
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_mesh_that_divides_holds_its_fraction():
    (whole, _), shards = (
        needs_of_ranks(tasks.task, tasks.task.local, plan_of(options))
        for options in ({"dp_replicate": 2}, {"dp_shard": 4})
    )
    assert whole.gradients == BYTES
    assert sum(each.gradients for each in shards) == BYTES


@pytest.mark.parametrize(
    ("local", "moments"),
    [
        (Local(), 0),
        (Local(momentum=0.9), 1),
        (Local(optimizer="adam"), 2),
        (Local(optimizer=torch.optim.Adagrad), None),
    ],
)
def test_the_state_is_that_of_the_optimizer(local, moments):
    assert moments_of(local) == moments
    (each,) = needs_of_ranks(tasks.task, local, plan_of({}))
    assert each.optimizer == (None if moments is None else moments * BYTES + (4 * each.boxes if moments == 2 else 0))
