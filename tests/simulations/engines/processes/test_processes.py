import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Algorithm
from atoll.plugins.reference import load_module
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.engine import ClientFailed, Job, Trained, Training
from atoll.simulations.engines.processes.processes import Processes, WorkerDied
from atoll.simulations.engines.sequential import Sequential
from tests.process_table import is_running
from tests.simulations.engines.batched.test_hooks import (
    ByBatch,
    InPlaceShared,
    Momentum,
    Noted,
    Personal,
    Prepared,
    rounds,
    training_of,
)
from tests.simulations.engines.cases import (
    BATCHABLE,
    OTHERS,
    SIZES,
    all_trained,
    assert_same_bits,
    broad,
    first_version,
    one_by_one_task,
    picklable,
    two_rounds,
)
from tests.simulations.engines.processes import loading_task
from tests.simulations.engines.test_sequential import Counting
from tests.waiting import BOUND_S

CASES = {case.name: case for case in [*BATCHABLE, *OTHERS]}


@contextmanager
def processes(training: Training, **others: Any) -> Iterator[Processes]:
    engine = Processes(training, **others)
    try:
        yield engine
    finally:
        engine.close()


def trained(engine: Any, version: Any, jobs: list[Job]) -> list[Trained]:
    return all_trained(engine.train(version, jobs))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "mlp own head scaffold", "batchnorm cnn", "batchnorm cnn fedbn", "dropout"])
def test_every_bit_is_that_of_a_deployed_client(name: str, workers: int) -> None:
    case = CASES[name]
    training = case.training()
    with processes(training, workers=workers) as engine:
        for found, expected in two_rounds(case, lambda v, jobs: trained(engine, v, list(jobs)), training):
            assert_same_bits(found, expected)


def test_examples_that_are_read_one_by_one_draw_the_same_numbers() -> None:
    case = CASES["mlp two epochs"]
    training = replace(case.training(), task=one_by_one_task(case.task()))
    with processes(training, workers=2) as engine:
        for found, expected in two_rounds(case, lambda v, jobs: trained(engine, v, list(jobs)), training):
            assert_same_bits(found, expected)


def test_batched_in_several_processes_has_the_bits_of_batched_in_one() -> None:
    training = CASES["mlp all at once"].training()
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 3)]
    one = trained(Batched(training, at_once=2), version, jobs)
    for workers in (1, 2):
        with processes(training, workers=workers, batched=True, at_once=2) as engine:
            for ours, theirs in zip(trained(engine, version, jobs), one, strict=True):
                assert ours.client_id == theirs.client_id
                np.testing.assert_array_equal(ours.row, theirs.row)
                assert ours.statistics == theirs.statistics


@pytest.mark.parametrize("algorithm", [Momentum, ByBatch, Personal, Prepared, Noted, InPlaceShared])
def test_hooks_in_several_batched_processes_have_the_bits_of_one(algorithm: type[Algorithm]) -> None:
    """Three rounds, each with the state and the shared tensors of the one before."""
    training = training_of(algorithm(), {"max_steps": 3})
    one = Batched(training, at_once=2)
    for workers in (1, 2):
        with processes(training, workers=workers, batched=True, at_once=2) as engine:
            for ours, theirs in rounds(training, engine, one, 3):
                assert ours.own.keys() == theirs.own.keys()
                for name, array in (theirs.update | theirs.own).items():
                    np.testing.assert_array_equal((ours.update | ours.own)[name], array, err_msg=name)
                assert (ours.statistics, ours.report) == (theirs.statistics, theirs.report)


def test_a_task_in_arrays_too() -> None:
    with processes(Training(task=Counting()), workers=2) as engine:
        jobs = [Job("abc", seed=6, round_id=4), Job("ab", seed=1, round_id=5)]
        found = trained(engine, {"w": np.ones(2, np.float32)}, jobs)
    np.testing.assert_array_equal([each.update["w"] for each in found], [[4, 7], [5, 2]])
    assert [each.num_examples for each in found] == [3, 2]


def test_results_that_are_held_stay_and_others_are_written_over() -> None:
    training = CASES["mlp"].training()
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 8)]
    with processes(training, workers=2) as engine:
        expected = trained(engine, version, jobs)
        held = list(engine.train(version, jobs))
        other = trained(engine, version, [replace(job, seed=job.seed + 99) for job in jobs])
        for ours, theirs, third in zip(held, expected, other, strict=True):
            assert isinstance(ours, Trained)
            np.testing.assert_array_equal(ours.row, theirs.row)
            assert ours.client_id != "b" or not np.array_equal(third.row, theirs.row)
        del held, ours
        gc.collect()
        before = [len(worker._blocks._memory) for worker in engine._workers]
        for _ in range(3):
            for _ in engine.train(version, jobs):
                pass
        assert [len(worker._blocks._memory) for worker in engine._workers] == before


def test_a_cohort_that_nobody_takes_to_its_end_does_not_disturb_the_next() -> None:
    training = CASES["mlp"].training()
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(list(SIZES) * 8)]
    with processes(training, workers=2) as engine:
        expected = trained(engine, version, jobs)
        results = engine.train(version, jobs)
        next(results)
        results.close()  # type: ignore[attr-defined]
        for ours, theirs in zip(trained(engine, version, jobs), expected, strict=True):
            np.testing.assert_array_equal(ours.row, theirs.row)


def with_loss(loss: Any) -> Training:
    return replace(CASES["mlp"].training(), task=replace(CASES["mlp"].task(), loss=loss))


def test_what_a_worker_raises_is_told_in_its_words_and_it_goes_on() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) == 5:
            raise RuntimeError("no loss today")
        return torch.nn.functional.cross_entropy(outputs, targets)

    training = with_loss(loss)
    version = first_version(training)
    with processes(training, workers=2) as engine:
        with pytest.raises(ClientFailed, match=r"client c failed:\nTraceback[\s\S]*no loss today"):
            trained(engine, version, [Job("a", 1), Job("c", 1)])
        assert len(trained(engine, version, [Job("d", 1)])) == 1


@pytest.mark.parametrize("is_batched", [False, True])
def test_workers_of_a_fork_server_train_the_same(monkeypatch: pytest.MonkeyPatch, is_batched: bool) -> None:
    """A process with a GPU cannot be forked: the task is pickled, and the version's memory is sent."""
    training = replace(CASES["mlp"].training(), task=picklable())
    version = first_version(training)
    jobs = [Job(site, seed) for seed, site in enumerate(SIZES)]
    with processes(training, workers=1, batched=is_batched) as engine:
        expected = trained(engine, version, jobs)
    monkeypatch.setattr("atoll.simulations.engines.processes.processes._can_fork", lambda _: False)
    with processes(training, workers=1, batched=is_batched) as engine:
        for ours, theirs in zip(trained(engine, version, jobs), expected, strict=True):
            np.testing.assert_array_equal(ours.row, theirs.row)


@contextmanager
def killing_what_hangs() -> Iterator[None]:
    """Kill the workers after a while, so that a test fails instead of waiting for ever."""
    timer = threading.Timer(BOUND_S, lambda: [child.kill() for child in multiprocessing.active_children()])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_workers_of_several_threads_train_also_where_their_parent_has_had_several() -> None:
    """A forked child would wait for ever for the OpenMP threads of its parent."""
    training = replace(CASES["mlp"].training(), task=replace(picklable(), model=broad))
    version, jobs = first_version(training), [Job("b", 1)]
    expected = trained(Sequential(training, threads=2), version, jobs)
    with processes(training, workers=1, threads=2) as engine, killing_what_hangs():
        (found,) = trained(engine, version, jobs)
    np.testing.assert_array_equal(found.row, expected[0].row)


@pytest.mark.real
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.long)], ids=["fork", "fork server"])
def test_a_loop_of_the_task_s_own_may_read_its_data_in_processes(threads: int) -> None:
    """A daemon of multiprocessing may have no children; these end with the engine at the latest."""
    training = Training(task=loading_task.task)
    version, jobs = first_version(training), [Job("a", 1), Job("d", 2)]
    expected = trained(Sequential(training, threads=threads), version, jobs)
    with processes(training, workers=1, threads=threads) as engine, killing_what_hangs():
        found = trained(engine, version, jobs)
        (worker,) = (each.process.pid for each in engine._workers)
        left = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    until = time.monotonic() + BOUND_S  # a tracker of shared memory ends after its process
    while alive := [pid for pid in left if is_running(int(pid))]:
        assert time.monotonic() < until, f"{alive} still run"
        time.sleep(0.02)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.update.keys() == theirs.update.keys()
        for name, update in theirs.update.items():
            np.testing.assert_array_equal(ours.update[name], update)


TASK = """
import torch
from torch.utils.data import TensorDataset
import my_folder.loaded
from my_package.sizes import WIDTH

from atoll import Task

def model():
    return torch.nn.Linear(WIDTH, 3)

def data(site, split):
    from my_folder.late import COUNT
    from my_package.late import examples
    return TensorDataset(*examples(COUNT, WIDTH))

task = Task(model=model, data=data, sites=["a"], loss=torch.nn.functional.cross_entropy, metrics={})
"""
NEIGHBOURS = {
    "my_package/__init__.py": "",
    "my_package/sizes.py": "WIDTH = 6\n",
    "my_package/late.py": "import torch\n\ndef examples(m, n):\n    return torch.ones(m, n), torch.arange(m) % 3\n",
    "my_folder/loaded.py": "",
    "my_folder/late.py": "COUNT = 9\n",
}


def test_workers_of_a_fork_server_find_the_tasks_file_and_its_neighbours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in {"task.py": TASK, **NEIGHBOURS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    training = Training(task=load_module(f"{tmp_path}/task.py:task").task)
    version, jobs = first_version(training), [Job("a", 1)]
    monkeypatch.setattr("atoll.simulations.engines.processes.processes._can_fork", lambda _: False)
    with processes(training, workers=1) as engine:
        (found,) = trained(engine, version, jobs)
    (expected,) = trained(Sequential(training), version, jobs)
    np.testing.assert_array_equal(found.row, expected.row)


def test_a_task_that_cannot_be_pickled_is_told_where_it_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.simulations.engines.processes.processes._can_fork", lambda _: False)
    training = CASES["mlp"].training()
    with processes(training, workers=1) as engine:
        with pytest.raises(ClientFailed, match="the task cannot be sent to another process, as forkserver needs"):
            trained(engine, first_version(training), [Job("a", 1)])


def test_a_worker_that_is_killed_is_told_at_once() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("dead by now")

    training = with_loss(loss)
    version, began = first_version(training), time.monotonic()
    with processes(training, workers=2) as engine:
        with pytest.raises(WorkerDied, match=r"worker process \d+ was ended by signal 9"):
            trained(engine, version, [Job("a", 1), Job("c", 1)])
        assert engine._workers == []
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_the_whole_group_leaves_the_workers_to_whoever_began_them(number: signal.Signals) -> None:
    training = CASES["mlp"].training()
    version, jobs = first_version(training), [Job("a", 1), Job("c", 1)]
    with processes(training, workers=2) as engine:
        expected = [found.row.copy() for found in trained(engine, version, jobs)]
        for worker in engine._workers:
            os.kill(worker.process.pid, number)
        for before, found in zip(expected, trained(engine, version, jobs), strict=True):
            np.testing.assert_array_equal(found.row, before)


def test_a_worker_that_cannot_be_built_is_told_with_its_traceback() -> None:
    here = os.getpid()

    def model() -> torch.nn.Module:
        if os.getpid() != here:
            raise RuntimeError("not in a worker")
        return torch.nn.Linear(6, 3)

    training = replace(CASES["mlp"].training(), task=replace(CASES["mlp"].task(), model=model))
    version = first_version(training)
    with processes(training, workers=2) as engine:
        with pytest.raises(ClientFailed, match=r"Traceback[\s\S]*not in a worker"):
            trained(engine, version, [Job("a", 1)])


def test_closing_ends_the_workers_and_may_be_repeated() -> None:
    training = CASES["mlp"].training()
    engine = Processes(training, workers=2)
    trained(engine, first_version(training), [Job("a", 1)])
    pids = [worker.process.pid for worker in engine._workers]
    engine.close()
    engine.close()
    assert not [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]


ORPHANS = """
import time
from tests.simulations.engines.cases import Case, first_version
from atoll.simulations.engines.engine import Job
from atoll.simulations.engines.processes.processes import Processes
training = Case("mlp").training()
engine = Processes(training, workers=3)
list(engine.train(first_version(training), [Job("a", 1)]))
print(*[worker.process.pid for worker in engine._workers], flush=True)
time.sleep(60)
"""


def test_workers_end_when_their_parent_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    until = time.monotonic() + BOUND_S
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"{alive} still run"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_forked_process_frees_nothing_of_its_parents_connections() -> None:
    """Freed in a child, a channel of gRPC waits for threads that only the parent has, or ends the child."""
    command = [sys.executable, "-m", "tests.simulations.engines.processes.collecting_task"]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=BOUND_S)
    assert done.stdout == "2 trained\n", done.stderr
