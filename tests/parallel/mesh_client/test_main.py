"""The place of a rank: its device, and its plan."""

import pytest

from atoll.parallel.mesh_client.main import _device
from atoll.parallel.world import World
from atoll.task.errors import TaskBroken


def test_auto_is_a_gpu_where_there_are_enough_for_all_ranks_of_the_machine():
    assert _device("auto", World(), 0, {}) == "cpu"
    assert _device("auto", World(3, 3, 4), 4, {"LOCAL_WORLD_SIZE": "4"}) == "cuda"
    assert _device("cpu", World(3, 3, 4), 1, {"LOCAL_WORLD_SIZE": "4"}) == "cpu"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(device):
    with pytest.raises(TaskBroken, match=r"8 ranks on .* need as many GPUs, and it has 2; take a smaller mesh"):
        _device(device, World(0, 0, 8), 2, {"LOCAL_WORLD_SIZE": "8"})
    with pytest.raises(TaskBroken, match="4 ranks on "):
        _device(device, World(3, 3, 8), 2, {})
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}
    with pytest.raises(TaskBroken, match="4 ranks on "):
        _device(device, World(0, 0, 8), 2, {**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
