"""The needs of a site: each box leaves once, whatever the mesh, and the ranks load what they hold."""

from dataclasses import replace

import pytest

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.client import needs_of
from atoll.parallel.planner.shape import MODELS, ModelShape
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.names import parse_codec

LAYOUTS = [
    Mesh(),
    Mesh(dp_replicate=4),
    Mesh(dp_shard=4),
    Mesh(dp_shard=3),
    Mesh(tp=2),
    Mesh(dp_replicate=2, dp_shard=2, tp=2),
    Mesh(pp=2, dp_shard=2, tp=2),
]
SMALL = ModelShape(layers=6, hidden=64, heads=4, vocab=128, sequence=32)


def candidate(mesh: Mesh, optimizer: str = "adamw") -> Candidate:
    return Candidate(plan=Plan(mesh=mesh), optimizer=optimizer)


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_the_parts_of_all_ranks_are_one_model(mesh: Mesh) -> None:
    found = needs_of(SMALL, candidate(mesh))
    assert sum(len(each.ranks) * each.part for each in found.ranks) == found.up == 4 * SMALL.parameters
    assert sorted(rank for each in found.ranks for rank in each.ranks) == list(range(mesh.size))
    for each in found.ranks:
        assert each.held == each.memory.parameters
        assert each.part <= each.held


def test_a_codec_makes_the_way_up_shorter_and_not_the_way_down() -> None:
    plain, found = needs_of(SMALL, candidate(Mesh())), needs_of(SMALL, candidate(Mesh()), codec="qsgd8")
    sizes = [weight.size for weight in (*SMALL.embedding(), *SMALL.block() * SMALL.layers, *SMALL.head())]
    assert found.up == sum(encoded_bytes(parse_codec("qsgd8"), size) for size in sizes) < plain.up / 3.8
    assert found.down == plain.down
    assert found.disk["updates"] == 2 * found.up


def test_a_checkpoint_has_the_moments_of_the_optimizer() -> None:
    sizes = [needs_of(SMALL, candidate(Mesh(), name)).disk["checkpoints"] for name in ("sgd", "momentum", "adamw")]
    assert sizes == [2 * 4 * k * SMALL.parameters for k in (1, 2, 3)]


def test_adapters_alone_travel_and_the_base_lies_on_the_disk() -> None:
    """41,943,040 is what peft prints for Llama 3 8B with r=16 on all linear layers of its blocks."""
    model = MODELS["llama-8b"]
    found, whole = needs_of(model, candidate(Mesh(dp_shard=8)), lora=16), needs_of(model, candidate(Mesh(dp_shard=8)))
    assert found.down == found.up == 4 * 41_943_040
    assert found.disk["base"] == 4 * model.parameters
    for ours, theirs in zip(found.ranks, whole.ranks, strict=True):
        assert ours.held == theirs.held
        assert ours.memory.optimizer < theirs.memory.optimizer / 100


@pytest.mark.parametrize("rank", [-1, 65])
def test_a_rank_that_no_matrix_has_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"got {rank}; allowed: a rank of 1 to 64, the smallest side of a matrix"):
        needs_of(SMALL, candidate(Mesh()), lora=rank)


def test_a_tied_table_on_two_stages_is_loaded_by_both() -> None:
    tied = replace(SMALL, tied=True)
    found = needs_of(tied, candidate(Mesh(pp=2)))
    assert sum(each.held for each in found.ranks) == 4 * (tied.parameters + tied.vocab * tied.hidden)
    assert found.up == 4 * tied.parameters
