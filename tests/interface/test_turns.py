"""Trainings take turns in a process, and leave it as the caller had it."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import atoll
from tests.simulations.federation import line_task

SETTINGS = {"simulation.engine": "sequential"}
task = line_task.task


def digest(seed: int) -> str:
    return atoll.simulate(task, rounds=3, set=SETTINGS | {"seed": seed}, progress=False).digest


@pytest.mark.slow
def test_threads_that_simulate_at_once_end_at_the_digests_of_one_after_the_other() -> None:
    """torch has one generator for all threads: their draws would mix."""
    seeds = range(4)
    expected = [digest(seed) for seed in seeds]
    with ThreadPoolExecutor(len(seeds)) as pool:
        assert list(pool.map(digest, seeds)) == expected


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CALLS: dict[str, Callable[[], object]] = {
    "simulate": lambda: digest(1),
    "train": lambda: atoll.train(task, steps=1, progress=False),
    "sweep": lambda: atoll.sweep({"seed": range(1, 3)}, task, set=SETTINGS | {"rounds": 1}, progress=False),
    "compare": lambda: atoll.compare(task, rounds=np.int64(1), set=SETTINGS | {"train.epochs": 1}, progress=False),
}


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_sets_generators_and_threads_back(call: str) -> None:
    def found() -> tuple[object, ...]:
        of_torch = torch.get_rng_state().tolist(), torch.get_num_threads()
        return random.getstate(), str(np.random.get_state()), *of_torch

    before = found()
    CALLS[call]()
    assert found() == before
