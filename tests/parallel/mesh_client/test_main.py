"""The place of a rank: its device, and its plan."""

import threading

import pytest

from atoll.parallel.mesh_client.main import _device, _Member
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


class Noted:
    """Orders, a bench and a line in one, which note what they are given."""

    steps = 0
    describe = evaluate = statistics = None

    def __init__(self, *requests):
        self.requests, self.orders, self.trained, self.sent = requests, [], [], []

    def give(self, request):
        self.orders.append(dict(request))

    def vote(self, fault):
        return [] if fault is None else [fault]

    def messages(self):
        yield from self.requests
        threading.Event().wait()  # the agent stays

    def send(self, answer):
        self.sent.append(answer)

    def mask(self, request, streams):
        self.trained.append((request, streams))
        return {}


def test_the_store_of_orders_gets_no_key(tmp_path):
    noted = Noted({"op": "mask", "parts": [], "streams": [["5ec7", 1]], "noise": "a5ec"}, {"op": "quit"})
    member = _Member(tmp_path, World(), noted, None, None)
    member._bench = noted
    member.lead(noted)
    assert noted.orders == [{"op": "mask", "parts": []}, {"op": "quit"}]
    assert noted.trained == [({"op": "mask", "parts": [], "noise": "a5ec"}, [["5ec7", 1]])]
    assert len(noted.sent) == 1
