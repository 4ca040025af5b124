"""The plan of a crew with `mesh = "auto"`: all ranks choose the same, and another start chooses it again."""

from dataclasses import replace

import pytest

from atoll.parallel.engine.plan import given_plan
from atoll.parallel.mesh_client import choice
from atoll.parallel.mesh_client.choice import choice_for, plan_for
from atoll.parallel.planner.choice import need_of
from atoll.parallel.planner.rank_memory import Machine
from atoll.task.errors import TaskBroken
from tests.parallel.mesh_client import tasks
from tests.parallel.ranks import call_on_ranks

AUTO = {"plan": {"mesh": "auto", "precision": "bf16"}, "device": "cpu", "site": "here"}


def on_a_rank(request, memory, of_rank):
    """Choose on this rank, of which one has other memory."""
    from atoll.parallel.world import read_world

    mine = of_rank if read_world().rank == 1 else memory
    choice.machine_of = lambda device, ranks: Machine(ranks, mine)  # this process is this rank's alone
    found = plan_for(tasks.task, request)
    return str(found.plan.mesh), found.plan.precision, found.why


@pytest.mark.real
def test_the_ranks_choose_for_the_one_with_the_least_memory():
    little = 2 * need_of(tasks.decoder(), given_plan("dp_shard=2", {"precision": "bf16"}), "sgd")
    (first, second) = call_on_ranks(on_a_rank, 2, AUTO, 10**9, little)
    assert first == second
    assert first[:2] == ("dp_shard=2", "bf16")
    assert "; dp_replicate=2 would need" in first[2]
    assert call_on_ranks(on_a_rank, 2, AUTO, little, 10**9)[0] == first, "the same at the next start"
    assert call_on_ranks(on_a_rank, 2, AUTO, 10**9, 10**9)[0][0] == "dp_replicate=2"


def test_a_given_mesh_is_taken_as_it_is():
    fields = {"mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1}, "zero": 2}
    found = plan_for(tasks.task, {**AUTO, "plan": fields})
    assert (found.plan.mesh.dp_shard, found.plan.zero, found.why) == (2, 2, "")


def test_a_task_that_no_mesh_can_train_is_refused_with_every_reason():
    with pytest.raises(TaskBroken, match=r"task\.fit: the task's own loop cannot be divided over ranks"):
        choice_for(tasks.with_fit, tasks.task.local, "fedavg", 2, Machine(2, 10**9), {})


def test_a_batch_that_is_too_small_for_copies_goes_to_tensor_parallelism():
    small = replace(tasks.task.local, batch_size=1)
    found = choice_for(tasks.task, small, "fedavg", 2, Machine(2, 10**9), {})
    assert str(found.plan.mesh) == "tp=2"
    assert "dp_replicate=2 is refused: a global batch of 1 is too small for dp=2" in found.why
