"""A crew of real ranks: requests, answers, and what becomes of them when ranks die, hang or fail."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from atoll.parallel.engine.plan import given_plan
from atoll.parallel.launch.launcher import Launcher, elastic
from atoll.parallel.launch.spec import Spec
from atoll.parallel.mesh_client.supervisor.crew import PING_S, Crew, CrewTerms, RanksLost
from atoll.parallel.mesh_client.supervisor.interval import Interval
from atoll.parallel.mesh_client.supervisor.terms import Terms
from atoll.training.worker.process import WorkerError, WorkerHung
from tests.process_table import is_running
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[4]
SECRET = "a-secret-of-the-agent"


@contextmanager
def crew(folder, *, size=2, timeout=60.0, **changes):
    """A crew of counting ranks in a folder."""
    folder.mkdir(exist_ok=True)
    terms = CrewTerms(
        folder=folder,
        ranks=Terms(collective_timeout=timeout, log=str(folder / "worker")),
        plan=asdict(given_plan(f"dp={size}", {})),
        num_ranks=size,
        checkpoint_every=Interval(steps=5),
    )

    def start(on_end):
        spec = Spec(
            entry="tests.parallel.mesh_client.counting:rank",
            args=(str(folder),),
            nproc=size,
            max_restarts=10**6,
            folder=str(folder),
            preload=("atoll.parallel.mesh_client.main",),
            is_bound=True,
        )
        command, environment = elastic(spec)
        with (folder / "launcher.log").open("ab") as log:
            return Launcher(command, {**environment, "PYTHONPATH": str(ROOT)}, log=log, on_end=on_end)

    it = Crew(str(ROOT / "tests/parallel/mesh_client/a_task.py") + ":task", replace(terms, **changes), start, site="a")
    try:
        yield it
    finally:
        it.close()


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A crew that outlives each fault of it."""
    with crew(tmp_path_factory.mktemp("crew")) as it:
        yield it


def train(it, folder, *, budget=BOUND_S, **local):
    given = {"steps": 20, "file": str(folder / "deed"), **local}
    request = {"round_id": 1, "model": str(folder), "out": str(folder / "out"), "local": given}
    return it.call("train", budget + 10.0, budget_s=budget, lease_s=5.0, **request)


def until(condition):
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def steps_of(folder):
    """The steps that were made so far, and when the last one was."""
    path = folder / "deed.step"
    steps, at = (path.read_text() if path.exists() else "").split() or (0, 0.0)
    return int(steps), float(at)


def test_a_message_of_a_server_program_is_an_error_and_the_ranks_live_on(it, tmp_path):
    it.start()
    before = it.pid
    with pytest.raises(
        WorkerError, match="a mesh of ranks does not support 'message'; allowed: train, describe"
    ) as caught:
        it.call("message", 60.0, budget_s=BOUND_S, lease_s=5.0, kind="query")
    assert caught.value.kind == "task_mismatch"
    assert it.call("evaluate", 60.0, budget_s=BOUND_S, lease_s=5.0)["restarts"] == 0
    assert it.pid == before


@pytest.mark.usefixtures("cold_start")  # its modules are counted
def test_ranks_answer_and_have_no_grpc_no_credential_and_no_port_of_the_agent(tmp_path):
    with crew(tmp_path / "c") as it:
        found = it.call("describe", BOUND_S)
        assert (found["num_examples"], found["plan"], len(found["ranks"])) == (7, "dp_replicate=2", 2)
        secret = (tmp_path / "c" / "line.json").read_text()
        for rank in found["ranks"]:
            assert not [name for name in rank["modules"] if name.startswith(("grpc", "atoll.client", "atoll.protocol"))]
            assert not [path for path in rank["open"] if "identity" in path or path.endswith(".pem")]
            assert not [value for value in rank["environment"].values() if value in secret and len(value) > 20]
        assert train(it, tmp_path)["total"] == 60
        pids = [it.pid, *(rank["pid"] for rank in found["ranks"])]
        assert all(map(is_running, pids))
    until(lambda: not any(map(is_running, pids)))


def test_the_keys_of_streams_reach_rank_0_that_of_noise_every_rank_and_none_a_file_or_log(tmp_path):
    """A rank that dies gets the order again, with the keys."""
    key, noise = "5ec7e7" * 10, "a5ec7e" * 10
    order = {"file": str(tmp_path / "died"), "parts": [], "noise": noise}
    with crew(tmp_path / "c") as it:
        assert it.call_at_rest("mask", BOUND_S, streams=[(key, -1)], **order) is None, "no rank is started for it"
        it.start()
        with it._calls:  # as a training has it
            assert it.call_at_rest("mask", BOUND_S, streams=[(key, -1)], **order) is None
        found = it.call_at_rest("mask", BOUND_S, streams=[(key, -1)], **order)
        assert found["restarts"] == 1
        assert [rank["streams"] for rank in found["ranks"]] == [[[key, -1]], []]
        assert [sorted(rank["request"]) for rank in found["ranks"]] == [["file", "noise", "op", "parts"]] * 2
        assert {rank["request"]["noise"] for rank in found["ranks"]} == {noise}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("rank1" in path.name for path in files)
    for secret in (key, noise):
        assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("deed", "rank"), [("kill", 1), ("exit", 0), ("raise once", 1), pytest.param("kill", 0, marks=pytest.mark.long)]
)
def test_a_lost_rank_heals(it, tmp_path, deed, rank):
    found = train(it, tmp_path, deed=deed, step=13, rank=rank)
    assert (found["total"], found["steps"], found["restarts"]) == (60, 20, 1)
    assert found["begun"] == 10, "from the checkpoint of step 10"


def test_ranks_that_were_lost_between_two_requests_are_there_again(it, tmp_path):
    pids = [rank["pid"] for rank in it.call("describe", BOUND_S)["ranks"]]
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not is_running(pids[0]))
    assert train(it, tmp_path)["total"] == 60


def test_a_killed_launcher_is_started_again(it, tmp_path):
    threading.Timer(0.0, lambda: (until(lambda: steps_of(tmp_path)[0] > 30), os.kill(it.pid, signal.SIGKILL))).start()
    assert train(it, tmp_path, steps=100)["total"] == 300


@pytest.mark.parametrize(
    ("deed", "kind"), [("raise", "training_failed"), pytest.param("mismatch", "task_mismatch", marks=pytest.mark.long)]
)
def test_a_fault_that_repeats_at_one_step_is_the_task_s(it, tmp_path, deed, kind):
    """A rank alone fails, and the others wait for it: the second time it is sure; an error of ours is at once."""
    began = [rank["pid"] for rank in it.call("describe", BOUND_S)["ranks"]]
    with pytest.raises(WorkerError) as caught:
        train(it, tmp_path, deed=deed, step=7, rank=1)
    assert caught.value.kind == kind
    assert "odd data in batch 7" in caught.value.detail or "the tensors do not fit" in caught.value.detail
    assert "rank 1" in caught.value.detail
    assert train(it, tmp_path, steps=3)["total"] == 9, "the next request"
    assert began != [rank["pid"] for rank in it.call("describe", BOUND_S)["ranks"]]


def test_an_error_of_all_ranks_costs_no_restart(it, tmp_path):
    began = [rank["pid"] for rank in it.call("describe", BOUND_S)["ranks"]]
    with pytest.raises(WorkerError, match="odd data in batch 7"):
        train(it, tmp_path, deed="raise", step=7)
    assert began == [rank["pid"] for rank in it.call("describe", BOUND_S)["ranks"]]


def test_a_stop_and_an_extension_reach_all_ranks(it, tmp_path):
    def stop():
        until(lambda: steps_of(tmp_path)[0] > 10)
        it.tell("extend", budget_s=BOUND_S)
        it.tell("stop")

    threading.Thread(target=stop).start()
    found = train(it, tmp_path, steps=10**6, budget=20.0)
    assert 10 < found["steps"] < 10**6
    assert found["stopped"]


def test_an_earlier_agent_s_order_goes_on_from_its_checkpoint_and_another_one_does_not(it, tmp_path):
    threading.Timer(0.0, lambda: (until(lambda: steps_of(tmp_path)[0] > 30), it.kill())).start()
    with pytest.raises(RanksLost, match="killed"):
        train(it, tmp_path, steps=200)
    again = train(it, tmp_path, steps=200)
    assert again["begun"] >= 30
    assert again["total"] == 600
    assert train(it, tmp_path, steps=201)["begun"] == 0


@pytest.mark.long
def test_a_hung_rank_is_noticed(tmp_path):
    with crew(tmp_path / "c", timeout=3.0) as it:
        assert train(it, tmp_path, deed="hang", step=13, rank=1)["total"] == 60


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_killed(tmp_path, rank):
    """Rank 0 has the store of all ranks, and the line: both are silent."""
    with crew(tmp_path / "c", timeout=3.0) as it:
        assert train(it, tmp_path, deed="stop", step=13, rank=rank)["total"] == 60


@pytest.mark.long
def test_a_rank_0_that_was_stopped_between_two_requests_is_killed(tmp_path):
    with crew(tmp_path / "c", timeout=3.0) as it:
        first = it.call("describe", BOUND_S)["ranks"][0]["pid"]
        os.kill(first, signal.SIGSTOP)
        found = train(it, tmp_path)
        assert (found["total"], found["restarts"]) == (60, 1)
        assert not is_running(first)


@pytest.mark.long
def test_pings_do_not_end_a_rank_that_is_at_work(tmp_path):
    with crew(tmp_path / "c", timeout=30.0) as it:
        found = train(it, tmp_path, steps=700)
        assert (found["steps"], found["restarts"]) == (700, 0)
        assert found["seconds"] > PING_S


def test_a_crew_gives_up_after_its_restarts_and_at_the_end_of_its_time(tmp_path):
    with crew(tmp_path / "c", max_restarts=0) as it:
        with pytest.raises(RanksLost, match="lost 1 time, and may start again 0"):
            train(it, tmp_path, deed="kill", step=2, rank=1)
        (tmp_path / "deed").unlink()
        began = time.monotonic()
        with pytest.raises(WorkerHung, match="no answer to train in time"):
            train(it, tmp_path, deed="hang", step=0, budget=-9.0)
        assert time.monotonic() - began < BOUND_S
