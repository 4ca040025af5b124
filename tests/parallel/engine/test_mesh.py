import pytest

from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.forked import RankFailed
from atoll.parallel.engine.mesh import AXES, Mesh, parse_mesh
from tests.parallel.forked import run_ranks
from tests.parallel.ranks import call_on_ranks
from tests.waiting import BOUND_S


def test_the_size_is_the_product_of_the_degrees() -> None:
    assert Mesh(pp=4, dp_shard=4, tp=4).size == 64
    assert Mesh(dp_replicate=2, dp_shard=3).dp == 6


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2,tp=2", Mesh(dp_shard=2, tp=2)),
        (" pp=4 , dp_replicate=2", Mesh(pp=4, dp_replicate=2)),
        ("", Mesh()),
    ],
)
def test_a_command_line_s_mesh(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh


def test_dp_keeps_whole_copies_under_ddp() -> None:
    assert parse_mesh("dp=4", replicate=True) == Mesh(dp_replicate=4)


def test_every_fault_of_a_mesh_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"'dpp=2'.*'tp=0'.*'pp=x'"):
        parse_mesh("dpp=2,tp=0,pp=x")
    with pytest.raises(ValueError, match="dp_shard is given twice"):
        parse_mesh("dp=2,dp_shard=2")
    with pytest.raises(ValueError, match=r"mesh.pp: .* got 0; mesh.tp: .* got 1.5"):
        Mesh(pp=0, tp=1.5)  # type: ignore[arg-type]


def test_a_mesh_that_does_not_multiply_says_its_product() -> None:
    with pytest.raises(ValueError, match=r"pp=2 x dp_replicate=1 x dp_shard=2 x tp=2 = 8 ranks, but there are 6"):
        Mesh(pp=2, dp_shard=2, tp=2).check_world(6)


def place() -> tuple[list[int], int, int]:
    axes = Axes(Mesh(pp=2, dp_replicate=2, tp=2), "cpu")
    return [axes.coordinates[axis] for axis in AXES], axes.dp_rank, axes.dp_group.size()


@pytest.mark.real
def test_tp_is_the_fastest_axis_and_pp_the_slowest() -> None:
    places = run_ranks(place, 8)
    assert [coordinates for coordinates, _, _ in places] == [
        [rank // 4, rank // 2 % 2, 0, rank % 2] for rank in range(8)
    ]
    assert [dp_rank for _, dp_rank, _ in places] == [rank // 2 % 2 for rank in range(8)]
    assert {size for _, _, size in places} == {2}


def part_of_the_batch() -> int:
    return Axes(Mesh(dp_replicate=2, dp_shard=2), "cpu").dp_rank


@pytest.mark.real
def test_the_parts_of_a_batch_lie_in_the_order_of_the_ranks() -> None:
    assert call_on_ranks(part_of_the_batch, 4) == [0, 1, 2, 3]


@pytest.mark.real
def test_ranks_of_another_number_than_the_mesh_s_do_not_hang() -> None:
    with pytest.raises(RankFailed, match="8 ranks, but there are 2"):
        call_on_ranks(place, 2, timeout_s=BOUND_S)
