"""The jobs in a real worker process: a fault of the task becomes a reason, and the next job runs."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from atoll.client.disk.state_directory import StateDirectory
from atoll.client.work.runner import EvaluateOrder, MaskOrder, PartToMask, RunnerFailed, TrainOrder
from atoll.client.work.worker import DataAway, WorkerRunner, workers_of
from atoll.ground.printable import conclusion
from atoll.operations.faults import code_of
from atoll.parallel.mesh_client.supervisor.crew import Crew, RanksLost
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import ExitCode
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.safetensors_file import read, write
from tests.client.fake_coordinator import live, until

TROUBLE = str(Path(__file__).parents[2] / "training" / "troublesome_task.py") + ":task"


@asynccontextmanager
async def runner(tmp_path, *, lease=5.0, settings=None, **tasks):
    """Return a runner of the troublesome task, and a function that trains with it."""
    state = StateDirectory(tmp_path / "state")
    write(tmp_path / "model", {"w": np.zeros(3, np.float32)})
    tasks = tasks or {"trouble": TROUBLE}
    running = WorkerRunner(
        tasks, workers_of(tasks, site="here", state=state, settings=settings), state=state, lease=lease
    )

    async def train(do="work", *, budget=30.0, task="trouble", model="model"):
        local = {"do": do, "file": str(tmp_path / "mark")}
        out = state.work / "update.safetensors"
        order = TrainOrder(
            task=task,
            model=tmp_path / model,
            out=out,
            own_out=state.work / "own.safetensors",
            round_id=3,
            seed=9,
            local=local,
            budget=budget,
        )
        return await running.train(order), out

    try:
        yield running, train
    finally:
        await running.close()
        state.close()


@live
async def test_worker_describes_trains_and_evaluates(tmp_path):
    async with runner(tmp_path) as (running, train):
        assert await running.describe() == 5
        trained, out = await train()
        np.testing.assert_array_equal(read(out)["w"], np.full(3, 9, np.float32))
        assert [piece.tensor for piece in trained.pieces] == ["w"]
        assert (trained.num_examples, trained.work) == (5, 1.0)
        assert trained.statistics == {"steps": (3.0, 1.0)}
        order = EvaluateOrder(task="trouble", model=tmp_path / "model", local={}, budget=5.0)
        assert await running.evaluate(order) is None


@live
async def test_trouble_becomes_a_reason_and_the_next_job_runs(tmp_path):
    async with runner(tmp_path) as (_, train):
        for deed, reason, words in (
            ("exit", "worker_crashed", "the worker exited with code 3; its log ends: farewell"),
            ("segfault", "worker_crashed", "the worker was ended by SIGSEGV"),
            ("raise", "training_failed", "KeyError"),
            ("nan", "not_finite", "w"),
            ("shape", "task_mismatch", "w"),
            ("full", "disk_full", ""),
        ):
            with pytest.raises(RunnerFailed) as caught:
                await train(deed)
            assert caught.value.reason == reason, deed
            assert words in conclusion(caught.value.detail)
        await train("work")


@live
async def test_hanging_worker_is_killed_after_its_lease(tmp_path):
    async with runner(tmp_path, lease=0.3) as (running, train):
        await running.describe()
        with pytest.raises(RunnerFailed) as caught:
            await train("gil", budget=1.0)  # it hangs for ten minutes
        assert caught.value.reason == "worker_hung"
        await train("work")


@live
async def test_stop_ends_a_training_early_with_what_there_is(tmp_path):
    async with runner(tmp_path) as (running, train):
        training = asyncio.ensure_future(train("wait"))
        await until(lambda: (tmp_path / "mark").exists())
        await asyncio.sleep(0.05)
        running.stop()
        trained, _ = await training
        assert 0 < trained.work < 0.5


@live
async def test_stop_before_the_worker_is_up_is_not_lost(tmp_path):
    async with runner(tmp_path) as (running, train):
        training = asyncio.ensure_future(train("wait"))
        await asyncio.sleep(0.01)
        running.stop()
        with pytest.raises(RunnerFailed, match="the job was stopped before it began"):
            await training


@live
async def test_deadline_that_moves_reaches_the_worker(tmp_path):
    async with runner(tmp_path) as (running, train):
        training = asyncio.ensure_future(train("wait", budget=60.0))
        await until(lambda: (tmp_path / "mark").exists())
        running.extend(0.2)
        trained, _ = await training
        assert 0 < trained.work < 0.5


@live
async def test_killed_job_fails_and_the_next_one_is_not_hit(tmp_path):
    async with runner(tmp_path) as (running, train):
        training = asyncio.ensure_future(train("sleep"))
        await until(lambda: (tmp_path / "mark").exists())
        running.kill()
        with pytest.raises(RunnerFailed) as caught:
            await training
        assert caught.value.reason == "worker_crashed"
        await train("work")


@live
async def test_of_two_tasks_only_the_one_in_use_has_a_process(tmp_path):
    async with runner(tmp_path, trouble=TROUBLE, second=TROUBLE) as (running, train):
        await running.describe()
        await train(task="trouble")
        assert [worker.alive for worker in running._workers.values()] == [True, False]
        await train(task="second")
        assert [worker.alive for worker in running._workers.values()] == [False, True]


def test_all_mistakes_in_the_settings_of_all_tasks_are_told_at_once(tmp_path):
    text = "import copy\nfrom tests.training import troublesome_task\ntask = copy.copy(troublesome_task.task)\n"
    for name in "ab":
        (tmp_path / f"{name}.py").write_text(text + "task.settings = {'unit': 1.0, 'file': ''}\n")

    @live
    async def scenario():
        tasks = {name: f"{tmp_path / name}.py:task" for name in "ab"}
        async with runner(tmp_path, settings={"unit": "x", "file": 3}, **tasks) as (running, _):
            with pytest.raises(ConfigError) as caught:
                await running.describe()
            told = [fault.partition(" (details")[0] for fault in caught.value.faults]
            faults = ("task.unit: expected float, got 'x'", "task.file: expected str, got 3")
            assert told == [f"{tasks[name]}: the task cannot be used: {fault}" for name in "ab" for fault in faults]

    scenario()


def test_data_that_are_missing_may_come_back_so_the_agent_is_started_again(tmp_path):
    (tmp_path / "mounted.py").write_text(
        "from tests.training.troublesome_task import task\nopen('/nowhere/data.bin')\n"
    )

    @live
    async def scenario():
        async with runner(tmp_path, bad=f"{tmp_path / 'mounted.py'}:task") as (running, _):
            with pytest.raises(DataAway) as caught:
                await running.describe()
            (fault,) = caught.value.faults
            assert "No such file or directory: '/nowhere/data.bin'" in fault
            assert code_of(caught.value) == ExitCode.AWAY

    scenario()


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere.py:task", "there is no file"),
        (str(Path(__file__).parents[1] / "fake_coordinator.py") + ":model", "is a function"),
        (str(Path(__file__).parents[2] / "training" / "troublesome_task.py") + ":half", "float64"),
    ],
)
def test_task_that_does_not_load_is_the_operators_mistake(tmp_path, reference, words):
    @live
    async def scenario():
        async with runner(tmp_path, bad=reference) as (running, _):
            with pytest.raises(ConfigError) as caught:
                await running.describe()
            (fault,) = caught.value.faults
            assert words in fault
            assert "Traceback" not in fault
            assert "\n" not in fault

    scenario()


class Resting(Crew):
    """A crew without processes, whose ranks mask or are lost."""

    def __init__(self, is_ready=True, error=None):
        self.ready, self.error, self.requests = is_ready, error, []

    def call_at_rest(self, op, timeout_s, **args):
        if not self.ready:
            return None
        self.requests.append((op, args))
        if self.error is not None:
            raise self.error
        return {"parts": [[*part["pieces"]] for part in args["parts"]]}

    def kill(self):
        pass

    def close(self):
        pass


ORDER = MaskOrder(
    task="trouble",
    layout=(Tensor("w", "I32", (2,)),),
    parts=(PartToMask(Path("encoded"), Path("out"), (Piece("w", "I32", (0,), (2,), "aa"),)),),
    streams=((bytes(range(32)), -1),),
)


@pytest.mark.parametrize(
    ("crew", "is_at_work", "masks"),
    [
        (Resting(), False, True),
        (Resting(), True, False),
        (Resting(is_ready=False), False, False),
        (Resting(error=RanksLost("the ranks were lost 4 times")), False, False),
        (object(), False, False),
    ],
)
@live
async def test_ranks_mask_that_are_ready_and_at_rest(tmp_path, caplog, crew, is_at_work, masks):
    state = StateDirectory(tmp_path / "state")
    running = WorkerRunner({"trouble": TROUBLE}, {"trouble": crew}, state=state, lease=5.0)
    running._current = crew if is_at_work else None
    assert await running.mask(ORDER) == ((ORDER.parts[0].pieces,) if masks else None)
    state.close()
    if masks:
        ((op, request),) = crew.requests
        assert (op, request["streams"]) == ("mask", [(bytes(range(32)).hex(), -1)])
    elif getattr(crew, "error", None):
        assert "the ranks have not masked the update, so this process does: the ranks were lost 4 times" in caplog.text
        assert bytes(range(32)).hex() not in caplog.text
    else:
        assert getattr(crew, "requests", []) == []
