from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.simulations.engines.processes.placement import faults_of, placed, share_of_gpu, visible
from atoll.simulations.engines.processes.processes import Processes
from tests.simulations.engines.cases import Case


@given(st.integers(1, 200), st.lists(st.integers(0, 31), min_size=1, max_size=16, unique=True))
def test_workers_take_turns_on_the_devices(workers: int, devices: list[int]) -> None:
    found = placed(workers, devices)
    counts = Counter(dict.fromkeys(devices, 0)) + Counter()
    counts.update(found)
    assert len(found) == workers
    assert set(found) <= set(devices)
    each = [found.count(device) for device in devices]
    assert max(each) - min(each) <= 1


@given(st.integers(1, 5_000), st.integers(1, 64))
def test_the_workers_of_a_gpu_never_need_more_than_it_and_all_find_a_place(workers: int, gpus: int) -> None:
    share = share_of_gpu(workers, gpus)
    of_fullest = -(-workers // gpus)
    assert 0 < share <= 1
    assert share * of_fullest <= 1 + 1e-9
    assert gpus * int(1 / share + 1e-9) >= workers
    assert round(share * 10_000) == pytest.approx(share * 10_000)


def test_two_workers_on_each_of_two_gpus_have_a_half() -> None:
    assert placed(4, [0, 1]) == [0, 1, 0, 1]
    assert share_of_gpu(4, 2) == 0.5
    assert share_of_gpu(3, 2) == 0.5
    assert share_of_gpu(2, 4) == 1.0
    assert share_of_gpu(3, 1) == 0.3333


def test_a_process_sees_its_gpu_alone_by_the_name_that_this_process_has_for_it() -> None:
    assert visible(1, None) == "1"
    assert visible(1, "") == "1"
    assert visible(1, "4, 6") == "6"
    assert visible(0, "GPU-8f1b,MIG-2") == "GPU-8f1b"


def test_the_faults_of_the_setting_name_what_is_allowed() -> None:
    assert faults_of([], "cpu", 0) == []
    assert faults_of([1, 0], "cuda", 2) == []
    assert faults_of([0], "cpu", 2) == [
        'simulation.devices: got [0], which are GPUs, and simulation.device is "cpu"; set "cuda"'
    ]
    assert faults_of([2], "cuda", 2) == ["simulation.devices: got 2; allowed here: 0 to 1, the GPUs that torch finds"]
    assert faults_of([0, 0], "cuda", 2) == [
        "simulation.devices: got [0, 0]; allowed: each GPU once (more workers than GPUs share them)"
    ]


def test_workers_on_the_cpu_keep_their_environment() -> None:
    engine = Processes(Case("mlp").training(), workers=3)
    assert engine._seen == [{}, {}, {}]
