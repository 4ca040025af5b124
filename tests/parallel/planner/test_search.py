from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.accounting import ACCOUNTINGS
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.cluster import CLUSTERS, Cluster
from atoll.parallel.planner.memory import worst
from atoll.parallel.planner.search import Wanted, complexity, lost, meshes, why
from atoll.parallel.planner.search import search as search_anew
from atoll.parallel.planner.shape import MODELS, ModelShape

search = cache(search_anew)  # several tests look at the same plans
SMALL = ModelShape(layers=8, hidden=512, heads=8, vocab=1024, sequence=256)
H100 = CLUSTERS["h100-80"]


def best(model: ModelShape, cluster: Cluster, batch: int) -> Mesh:
    return search(model, cluster, Wanted(batch=batch)).ranked[0].candidate.mesh


def test_every_mesh_of_a_world_is_tried_once() -> None:
    found = list(meshes(64))
    assert len(found) == len(set(found)) == 84  # ways to write 2^6 as a product of four powers of two: 9 choose 3
    assert {mesh.size for mesh in found} == {64}


@pytest.mark.slow
def test_of_what_fits_on_one_device_at_most_the_optimizer_is_sharded() -> None:
    """An update of 1.5 B parameters takes 31 ms of a step of 0.5 s on an A100, which ZeRO-1 divides by eight."""
    first = search(MODELS["gpt2-xl"], CLUSTERS["a100-80"], Wanted(batch=64)).ranked[0]
    assert (first.candidate.mesh.dp, first.candidate.plan.zero_stage) == (8, 1)
    assert best(MODELS["llama-1b"], H100, 64) == Mesh(dp_replicate=8)


@pytest.mark.slow
def test_what_does_not_is_shared_out() -> None:
    found = search(MODELS["turing-nlg"], replace(H100, nodes=2), Wanted(batch=128))
    plan = found.ranked[0].candidate.plan
    assert plan.mesh.pp * plan.mesh.dp_shard * plan.mesh.tp >= 4
    refused = [kind for kind, _, _ in found.refused]
    assert any("more memory than the 76.95 GB" in kind for kind in refused)


@pytest.mark.slow
def test_tensor_parallelism_stays_inside_a_node() -> None:
    found = search(MODELS["gpt3"], replace(CLUSTERS["h200-141"], nodes=8), Wanted(batch=512))
    assert max(one.candidate.mesh.tp for one in found.ranked) <= 8
    kinds = {kind: (count, example) for kind, count, example in found.refused}
    assert kinds["tensor parallelism would cross nodes"] == (9, "tp=16 with 8 devices in a node")


@pytest.mark.slow
def test_of_gpt_3_on_64_devices_tensor_parallelism_is_inside_and_the_pipeline_across() -> None:
    """The mesh is 4 x 4 x 4, which the engine fits into 141 GB and not into 80."""
    cluster = replace(CLUSTERS["h200-141"], nodes=8)
    mesh = best(MODELS["gpt3"], cluster, 512)
    assert mesh.tp > 1
    assert mesh.pp > 1
    cube = Mesh(pp=4, dp_shard=4, tp=4)
    (found,) = search(MODELS["gpt3"], cluster, Wanted(batch=512), only=cube).ranked
    assert found.candidate.mesh == cube
    assert found.memory.total < 0.9 * 150.7e9
    nothing = search(MODELS["gpt3"], replace(H100, nodes=8), Wanted(batch=512), only=cube)
    assert nothing.ranked == ()
    assert "more memory" in nothing.refused[0][0]


@pytest.mark.long
def test_slow_links_between_nodes_turn_sharding_into_a_pipeline_or_copies() -> None:
    slow = replace(H100, nodes=8, across=1e9)
    found = search(MODELS["llama-8b"], slow, Wanted(batch=256)).ranked[0].candidate.mesh
    assert found.dp_shard * found.tp <= 8


def test_reasons_name_the_number() -> None:
    found = search(MODELS["gpt2-xl"], replace(H100, nodes=2), Wanted(batch=6))
    reasons = {kind for kind, _, _ in found.refused}
    assert "tp does not divide heads=25" in reasons
    assert "dp does not divide the batch of 6 sequences" in reasons
    many = search(replace(SMALL, layers=2), replace(H100, nodes=8), Wanted(batch=64))
    assert "more stages than the 2 blocks" in {kind for kind, _, _ in many.refused}
    few = search(SMALL, H100, Wanted(batch=2), only=Mesh(pp=8))
    assert few.refused == (("fewer micro-batches than stages", 1, "pp=8: a batch of 2 sequences"),)


def test_a_mesh_of_another_size_than_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="= 4 ranks, but there are 8"):
        search(SMALL, H100, Wanted(batch=8), only=Mesh(pp=4))


@pytest.mark.slow
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 16, 24, 64]),
    st.sampled_from(["engine", *ACCOUNTINGS]),
    st.sampled_from(["bf16", "fp32"]),
)
@settings(deadline=None, max_examples=20)
def test_plans_fit_have_the_batch_and_are_in_order(nodes: int, batch: int, counted: str, precision: str) -> None:
    cluster = replace(H100, nodes=nodes, memory=4e9)
    found = search(SMALL, cluster, Wanted(batch=batch, counted=counted, precision=precision))
    assert len(found.ranked) + sum(count for _, count, _ in found.refused) == len(list(meshes(cluster.world)))
    for one in found.ranked:
        assert one.memory.total <= 0.9 * 4e9
        assert one.candidate.batch == batch
        assert 0 < one.mfu <= 1
    speeds = [one.tokens_per_s for one in found.ranked[1:]]
    assert speeds == sorted(speeds, reverse=True)
    if speeds:
        assert found.ranked[0].tokens_per_s >= 0.99 * speeds[0]


def test_of_equals_the_one_with_fewer_moving_parts_leads_and_the_others_are_told_why() -> None:
    found = search(MODELS["llama-1b"], H100, Wanted(batch=64)).ranked
    equals = [one for one in found[1:] if lost(one, found[0]).startswith("as fast")]
    assert equals
    assert all(complexity(one.candidate) >= complexity(found[0].candidate) for one in equals)
    slower = [lost(one, found[0]) for one in found[1:] if one not in equals]
    assert all("% slower: " in reason for reason in slower)


@pytest.mark.slow
def test_the_choice_is_explained_axis_by_axis() -> None:
    cluster = replace(CLUSTERS["h200-141"], nodes=8)
    found = search(MODELS["gpt3"], cluster, Wanted(batch=512))
    first, *axes = why(MODELS["gpt3"], cluster, found)
    assert "2794 GB, 20.6 times the 135.6 GB" in first
    named = [sentence.partition("=")[0] for sentence in axes]
    assert named == [axis for axis, degree in found.ranked[0].candidate.mesh.degrees.items() if degree > 1]
    assert all("without it" in sentence for sentence in axes)


def test_more_bandwidth_is_never_slower() -> None:
    for mesh in (Mesh(dp_shard=16), Mesh(pp=2, dp_shard=4, tp=2), Mesh(dp_replicate=4, tp=4)):
        steps = [
            search(SMALL, replace(H100, nodes=2, across=across, inside=8 * across), Wanted(batch=64), only=mesh)
            .ranked[0]
            .times.step
            for across in (1e8, 1e9, 1e10, 1e11)
        ]
        assert steps == sorted(steps, reverse=True)


def test_a_cluster_says_what_it_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"nodes: .* got 0\ncluster.memory: .* got -1\ncluster.usable: .*<= 1, got 2"):
        replace(H100, nodes=0, memory=-1, usable=2)
    assert not H100.spans_nodes(1, 8)
    assert H100.spans_nodes(1, 16)
    assert H100.spans_nodes(2, 8)


def test_the_rings_of_a_group_share_the_adapters_of_its_members_on_a_node() -> None:
    cluster = replace(H100, nodes=4, links=1.0, latency_across=1e-9)
    alone = cluster.seconds(1e9, 1, stride=8, degree=4)
    assert alone == pytest.approx(1e9 / 50e9, rel=1e-6)
    assert cluster.seconds(1e9, 1, stride=2, degree=8) == pytest.approx(alone / 4, rel=1e-6)
    assert cluster.seconds(1e9, 1, stride=1, degree=32) == pytest.approx(1e9 / 400e9, rel=1e-6)
    fast = replace(cluster, across=1e12)
    assert fast.seconds(1e9, 1, stride=1, degree=32) == pytest.approx(1e9 / 450e9, rel=1e-6)


def test_selective_recomputation_is_tried_between_none_and_full() -> None:
    room = {}
    for kind in ("none", "selective", "full"):
        plan = Plan(mesh=Mesh(dp_shard=8), zero=3, precision="bf16", recompute=kind)
        room[kind] = worst(MODELS["llama-8b"], Candidate(plan=plan)).total
    assert room["full"] < room["selective"] < room["none"]
    memory = (room["selective"] + room["none"]) / 2 / 0.9
    found = search(MODELS["llama-8b"], replace(H100, memory=memory), Wanted(batch=8), only=Mesh(dp_shard=8)).ranked[0]
    assert found.candidate.plan.recompute == "selective"


def test_a_batch_of_any_size_is_planned_at_once() -> None:
    """A micro-batch has at most `MICROBATCH_MAX` sequences: nothing looks at each number up to the batch."""
    found = search_anew(SMALL, H100, Wanted(batch=2**40 * 8))
    assert found.ranked[0].candidate.batch == 2**40 * 8
