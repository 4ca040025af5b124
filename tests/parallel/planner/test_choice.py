"""The plan of `mesh = "auto"`: copies where they fit, then shards, then tensor parallelism; and why."""

import pytest
import torch
from torch import nn

from atoll.parallel.engine.plan import given_plan, possible_plans
from atoll.parallel.mesh_client.needs import needs_of_ranks
from atoll.parallel.planner.choice import choose, need_of
from atoll.parallel.planner.rank_memory import Machine, machine_of, memory_of_host
from tests.parallel.mesh_client import tasks
from tests.turns import table

WIDTH, DEPTH = 64, 8
PARAMETERS = DEPTH * WIDTH * WIDTH
STATE = 16 * PARAMETERS
"""Parameters, gradients and both moments of adam, without the counts of steps."""


def layers():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def chosen(memory, *, ranks=4, here=4, settings=None, refused=lambda plan: [], model=None, optimizer="adam"):
    plans = possible_plans(ranks, settings or {})
    model = model or layers()
    return choose(model, plans, Machine(here, memory), optimizer=optimizer, faults_of=refused)


@pytest.mark.parametrize(
    ("times", "mesh", "zero"),
    [(2.1, "dp_replicate=4", 0), (1.9, "dp_shard=4", 1), (0.6, "dp_shard=4", 3)],
)
def test_copies_come_first_and_then_shards_with_as_little_traffic_as_fits(times, mesh, zero):
    plan = chosen(round(times * STATE)).plan
    assert (plan.mesh.degrees, plan.zero_stage) == (given_plan(mesh, {}).mesh.degrees, zero)


def test_the_choice_says_why():
    assert chosen(4 * STATE).why.startswith("dp_replicate=4: 524.3 kB on a rank without activations, within half")
    why = chosen(STATE).why
    assert why.startswith("dp_shard=4 with ZeRO")
    assert why.endswith("; dp_replicate=4 would need 524.3 kB")


def test_a_plan_without_room_for_activations_is_taken_if_none_needs_less():
    found = chosen(round(0.4 * STATE))
    assert (found.plan.mesh.dp_shard, found.plan.zero_stage) == (4, 3)
    assert "more than half of its" in found.why
    with pytest.raises(
        ValueError, match=r"mesh: none of 4 ranks fits: dp_shard=4 needs .* take more ranks, or a smaller"
    ):
        chosen(round(0.1 * STATE))


def test_refused_plans_are_passed_over_and_the_first_reason_is_told():
    def refused(plan):
        return [f"dp={plan.mesh.dp} is too much"] if plan.mesh.dp > 2 else []

    found = chosen(4 * STATE, refused=refused, model=tasks.decoder())
    assert (found.plan.mesh.dp, found.plan.mesh.tp) == (2, 2)
    assert found.why.endswith("; dp_replicate=4 is refused: dp=4 is too much")
    with pytest.raises(ValueError, match="no loss"):
        chosen(4 * STATE, refused=lambda plan: ["no loss"])


def test_tp_never_crosses_machines_and_settings_of_the_site_hold():
    plans = []
    chosen(4 * STATE, ranks=8, here=2, refused=lambda plan: plans.append(plan) or ([] if len(plans) > 10 else ["no"]))
    assert {plan.mesh.tp for plan in plans} <= {1, 2}
    found = chosen(4 * STATE, settings={"zero": 3, "precision": "bf16"}).plan
    assert (found.zero_stage, found.precision) == (3, "bf16")
    with pytest.raises(ValueError, match=r"plan\.precision"):
        possible_plans(4, {"precision": "fp8"})


def test_settings_that_need_tp_between_machines_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"every mesh of 2 ranks has tp >= 2.* each with 1 rank; .*or name the mesh"):
        chosen(4 * STATE, ranks=2, here=1, settings={"loss_parallel": True})
    plan = chosen(4 * STATE, ranks=4, here=2, settings={"loss_parallel": True}, model=tasks.decoder()).plan
    assert plan.mesh.tp == 2


MESHES = ("dp=4", "dp_shard=4", "dp_replicate=2,dp_shard=2", "tp=2", "dp_shard=2,tp=2")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "optimizer"), table(MESHES, ["sgd", "adam"], days=2))
def test_the_need_is_that_of_the_engine_s_own_boxes_and_what_is_gathered(mesh, optimizer):
    """The tables of positions are held beside it, and what is gathered comes on top."""
    plan, local = given_plan(mesh, {"zero": 3} if "shard" in mesh else {}), tasks.Local(optimizer=optimizer)
    boxes = max(rank.peak for rank in needs_of_ranks(tasks.task, local, plan))
    tables = sum(buffer.numel() * buffer.element_size() for buffer in tasks.decoder().buffers())
    need = need_of(tasks.decoder(), plan, optimizer)
    gathered = 0 if not plan.is_sharded else need_of(tasks.decoder(), plan, "sgd") - 2 * _held(mesh, plan)
    assert need - gathered == pytest.approx(boxes - tables, rel=0.02)


def _held(mesh, plan):
    (most, *_) = sorted((rank.gradients for rank in needs_of_ranks(tasks.task, tasks.task.local, plan)), reverse=True)
    return most


def test_frozen_parameters_have_no_gradients_and_no_moments():
    model = layers()
    whole = need_of(model, given_plan("dp=2", {}), "adam")
    for layer in list(model)[1:]:
        layer.weight.requires_grad_(False)
    assert need_of(model, given_plan("dp=2", {}), "adam") == pytest.approx(whole * (4 + 12 / DEPTH) / 16, rel=0.01)


def test_the_memory_of_a_rank_is_the_least_limit_of_its_groups(tmp_path):
    of_process = tmp_path / "cgroup"
    of_process.write_text("0::/slice/job\n")
    job = tmp_path / "slice" / "job"
    job.mkdir(parents=True)
    whole = memory_of_host(tmp_path, of_process)
    assert whole == memory_of_host(tmp_path, tmp_path / "absent") > 2**30
    (job / "memory.max").write_text("max\n")
    assert memory_of_host(tmp_path, of_process) == whole
    (tmp_path / "slice" / "memory.max").write_text(str(2**30))
    assert memory_of_host(tmp_path, of_process) == 2**30
    assert machine_of("cpu", 4).memory == memory_of_host() // 4
