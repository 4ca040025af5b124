"""The probe of the shared folder, with ranks as threads that have one folder or two."""

import threading

import pytest
import torch.distributed as dist

from atoll.parallel.mesh_client.supervisor.crew import prepare_folder
from atoll.parallel.mesh_client.supervisor.shared_folder import check_shared
from atoll.parallel.world import World
from atoll.task.errors import TaskBroken


def faults(folders, timeout_s):
    """What each rank finds."""
    store, found = dist.HashStore(), {}

    def rank(number):
        try:
            check_shared(folders[number], store, World(number, number, len(folders)), timeout_s)
        except TaskBroken as fault:
            found[number] = str(fault)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(folders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_folder_is_shared_and_nothing_is_left_in_it(tmp_path):
    assert faults([tmp_path] * 3, 60.0) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_another_folder_is_named_with_its_ranks(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    found = faults([here, here, there], 0.3)
    assert sorted(found) == [0, 2]
    assert "does not see in" in found[0]
    assert "rank 2 (" in found[0]
    assert "rank 0 (" in found[2]
    assert [*here.iterdir(), *there.iterdir()] == []


@pytest.mark.parametrize(
    ("changed", "stays"),
    [({}, True), ({"budget_s": 3.0, "out": "b"}, True), ({"seed": 8}, False), ({"local": {"lr": 1}}, False)],
)
def test_checkpoints_stay_for_the_very_same_order(tmp_path, changed, stays):
    request = {"op": "train", "model": "m/abc", "seed": 7, "local": {}, "out": "a", "budget_s": 60.0}
    prepare_folder(tmp_path / "round", request)
    (tmp_path / "round" / "step-1").mkdir()
    prepare_folder(tmp_path / "round", request | changed)
    assert (tmp_path / "round" / "step-1").exists() == stays
