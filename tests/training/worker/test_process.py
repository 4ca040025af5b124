"""Real worker processes. Most load a task without torch, because that starts in a fifth of a second."""

import math
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece
from atoll.training.worker.process import Environment, RunTerms, Worker, WorkerCrashed, WorkerError, WorkerHung
from tests.waiting import BOUND_S

HERE = Path(__file__).parents[1]
TROUBLE = f"{HERE}/troublesome_task.py:task"

Make = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    workers: list[Worker] = []

    def make(task: str = TROUBLE, site: str | None = "here", **more: Any) -> Worker:
        workers.append(Worker(task, site=site, log_path=tmp_path / "worker.log", **more))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    safetensors_file.write(tmp_path / "version", {"w": np.ones(3, np.float32)})
    return tmp_path / "version"


def train(
    worker: Worker, version: Path, do: str = "work", *, timeout_s: float = BOUND_S, **more: Any
) -> dict[str, Any]:
    local = {"do": do, "file": str(version.with_name("mark"))}
    fields = {"model": str(version), "out": str(version.with_name("update")), "seed": 7, "round_id": 1, "local": local}
    return worker.call("train", timeout_s, **(fields | more))


def in_background(worker: Worker, version: Path, do: str, **more: Any) -> "Background":
    background = Background(lambda: train(worker, version, do, **more))
    wait_for(version.with_name("mark"))
    return background


class Background(threading.Thread):
    """A call in another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._outcome: Any = None
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._outcome = error

    def outcome(self) -> Any:
        self.join(BOUND_S)
        assert not self.is_alive()
        return self._outcome


def wait_for(path: Path) -> None:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path.name} did not appear")


def wait_for_end(pid: int) -> None:
    """Wait until the process has ended, whatever its parent."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], BOUND_S)[0], f"process {pid} still lives after {BOUND_S} s"
    finally:
        os.close(fd)


def test_worker_answers_and_stays_warm(make: Make, version: Path, tmp_path: Path) -> None:
    worker = make()
    assert not worker.alive
    described = worker.call("describe", 60)
    assert (described["num_examples"], described["layout"]) == (5, [["w", "F32", [3]]])
    pid = worker.pid
    for seed in (3, 4):
        trained = train(worker, version, seed=seed)
        assert (trained["num_examples"], trained["work"], trained["stopped"]) == (5, 1.0, False)
        assert trained["statistics"] == {"steps": [1.0, 1.0]}
        assert 0 <= trained["seconds"] < 10
        assert safetensors_file.read(tmp_path / "update")["w"].tolist() == [seed] * 3
    [piece] = [Piece(name, dtype, tuple(o), tuple(n), sha) for name, dtype, o, n, sha in trained["pieces"]]
    assert (piece.tensor, piece.lengths, len(piece.sha256)) == ("w", (3,), 64)
    worker.call("initial", 60, seed=9, out=str(tmp_path / "initial"))
    assert safetensors_file.read(tmp_path / "initial")["w"].tolist() == [9.0] * 3
    assert worker.pid == pid


def test_worker_evaluates_every_split(make: Make, version: Path) -> None:
    worker = make()
    splits = {
        split: worker.call("evaluate", 60, model=str(version), split=split) for split in ("train", "test", "server")
    }
    assert [splits[split]["statistics"] for split in splits] == [{"sum": [3.0, 2.0]}, None, {"sum": [3.0, 1.0]}]
    values = worker.call("values", 60, statistics={"sum": [3.0, 2.0], "none": [0.0, 0.0]})["values"]
    assert values == {"sum": 1.5, "none": None}
    with pytest.raises(WorkerError, match="split 'dev' is not one of train, test, server"):
        worker.call("evaluate", 60, model=str(version), split="dev")


def test_worker_without_a_site_evaluates_and_refuses_to_train(make: Make, version: Path) -> None:
    worker = make(site=None)
    assert worker.call("describe", 60)["num_examples"] is None
    assert worker.call("evaluate", 60, model=str(version), split="train")["statistics"] is None
    assert worker.call("evaluate", 60, model=str(version), split="server")["statistics"] == {"sum": [3.0, 1.0]}
    with pytest.raises(WorkerError, match=r"task_broken: .*without a site"):
        train(worker, version)


def test_worker_quits_and_comes_back(make: Make, version: Path) -> None:
    worker = make()
    worker.start()
    first = worker.pid
    worker.call("quit", 10)
    assert not worker.alive
    train(worker, version)
    assert worker.pid not in (None, first)


@pytest.mark.usefixtures("cold_start")
@pytest.mark.parametrize(
    ("do", "exit_code", "words"),
    [
        ("exit", 3, "exited with code 3; the end of its log:\nfarewell"),
        ("segfault", -signal.SIGSEGV, "was ended by SIGSEGV.*Segmentation fault"),
        ("abort", -signal.SIGABRT, "was ended by SIGABRT"),
    ],
)
def test_a_crash_is_told_and_the_next_call_starts_anew(
    make: Make, version: Path, do: str, exit_code: int, words: str
) -> None:
    worker = make()
    with pytest.raises(WorkerCrashed, match=f"(?s){words}") as caught:
        train(worker, version, do)
    assert caught.value.exit_code == exit_code
    assert not worker.alive
    assert train(worker, version)["num_examples"] == 5


@pytest.mark.parametrize(
    ("do", "kind", "detail"),
    [
        ("raise", "training_failed", "KeyError: 'missing'"),
        ("sys.exit", "training_failed", "SystemExit: enough"),
        ("full", "disk_full", "No space left on device"),
        ("nan", "not_finite", r"^the update has NaN or infinite values in w$"),
        ("shape", "task_mismatch", r"^w is F32 \(4,\), expected F32 \(3,\)$"),
        ("float64", "task_mismatch", r"^w is float64 \(3,\), expected F32 \(3,\)$"),
        ("nothing", "training_failed", "train must return a Trained, got NoneType"),
        (
            "counts",
            "training_failed",
            r"num_examples: a weight must be .* got 0; work must be in \(0, 1\], got 2.0; metric m",
        ),
    ],
)
def test_an_error_of_the_task_has_a_kind_and_costs_no_process(
    make: Make, version: Path, do: str, kind: str, detail: str
) -> None:
    worker = make()
    worker.start()
    pid = worker.pid
    with pytest.raises(WorkerError) as caught:
        train(worker, version, do)
    assert caught.value.kind == kind
    assert caught.value.detail.count("\n") < 12
    assert re.search(detail, caught.value.detail), caught.value.detail
    assert train(worker, version)["work"] == 1.0
    assert worker.pid == pid


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (f"{HERE}/nowhere.py:task", "task_broken: .*there is no file"),
        (f"{HERE}/troublesome_task.py:tusk", r"task_broken: .*there is no tusk in .* \(tasks there: task, half\)"),
        (f"{HERE}/tasks.py:data", "task_broken: .*data is a function"),
    ],
)
def test_an_unknown_task_is_said_at_the_start(make: Make, reference: str, words: str) -> None:
    worker = make(reference)
    with pytest.raises(WorkerError, match=words):
        worker.start()
    assert not worker.alive


def test_a_task_with_faults_tells_them_all(make: Make, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("from atoll import Task\ntask = Task(model=1, data=2, loss=len)\n")
    with pytest.raises(
        WorkerError, match=r"(?s)task_broken.*model must be callable, got 1; Task: data must be callable, got 2"
    ):
        make(f"{tmp_path}/bad.py:task").start()


def test_parameters_that_may_not_travel_are_refused_with_advice(make: Make) -> None:
    with pytest.raises(WorkerError, match=r"task_broken: w is float64 \(allowed: float32, .*astype"):
        make(f"{HERE}/troublesome_task.py:half").call("describe", 60)


def test_what_the_task_prints_goes_to_the_log(make: Make, version: Path) -> None:
    worker = make()
    assert train(worker, version, "print")["work"] == 1.0
    log = version.with_name("worker.log").read_text()
    for words in ('"an answer"}', "to stderr", "to fd 1", "from a child"):
        assert words in log


def test_a_full_disk_of_the_log_hides_no_fault_and_ends_no_training(make: Make, version: Path) -> None:
    version.with_name("worker.log").symlink_to("/dev/full")
    worker = make()
    assert train(worker, version, "say")["work"] == 1.0
    pid = worker.pid
    with pytest.raises(WorkerError, match=r"KeyError: 'missing'") as caught:
        train(worker, version, "raise")
    assert (caught.value.kind, worker.pid) == ("training_failed", pid)


def test_a_long_log_is_put_aside(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.ground.process.log_streams.LOG_BYTES_MAX", 10)
    (tmp_path / "worker.log").write_text("x" * 11)
    make().start()
    assert (tmp_path / "worker.log.1").read_text() == "x" * 11


def test_the_end_of_a_log_that_became_another_file_is_told(make: Make, version: Path) -> None:
    log = version.with_name("worker.log")
    log.write_text("of an earlier worker\n" * 100)
    worker = make()
    worker.start()
    os.truncate(log, 0)
    with pytest.raises(WorkerCrashed) as caught:
        train(worker, version, "exit")
    assert caught.value.log_tail == "farewell"


@pytest.mark.parametrize("do", ["sleep", "gil"])
def test_a_hang_is_ended_by_the_supervisor(make: Make, version: Path, do: str) -> None:
    worker = make()
    worker.start()
    with pytest.raises(WorkerHung, match="no answer to train in time"):
        train(worker, version, do, timeout_s=0.3)
    assert not worker.alive


def test_training_knows_its_deadline(make: Make, version: Path) -> None:
    trained = train(make(), version, "wait", budget_s=1.0, lease_s=BOUND_S)
    assert 0 < trained["work"] < 1
    assert 1.0 <= trained["seconds"] < 20, "all of its steps take as long"
    assert not trained["stopped"]


def test_a_deadline_that_has_passed_is_out_of_time(make: Make, version: Path) -> None:
    with pytest.raises(WorkerError, match="out_of_time: the deadline passed before the training began"):
        train(make(), version, budget_s=0.0, lease_s=30.0)


def test_a_stop_ends_the_training_with_what_there_is(make: Make, version: Path) -> None:
    worker = make()
    call = in_background(worker, version, "wait", budget_s=math.inf)
    worker.tell("stop", round_id=99)  # of another round: nobody's business here
    worker.tell("stop", round_id=1)
    trained = call.outcome()
    assert trained["stopped"]
    assert 0 < trained["work"] < 1
    worker.tell("stop")  # nothing runs, so it means nothing to the next training
    assert not train(worker, version)["stopped"]


def test_an_extended_deadline_moves_the_lease_and_the_patience(make: Make, version: Path) -> None:
    worker = make()
    call = in_background(worker, version, "wait", budget_s=2.0, lease_s=1.0, timeout_s=3.1)
    worker.tell("extend", budget_s=3.2)
    trained = call.outcome()
    assert 3.2 <= trained["seconds"] < 20
    assert 0 < trained["work"] < 1
    time.sleep(1.1)  # the lease is over, and so is what it was for
    assert worker.alive


def test_the_lease_ends_a_worker_that_holds_the_gil(make: Make, version: Path) -> None:
    with pytest.raises(WorkerHung, match="train outlived its deadline and its lease"):
        train(make(), version, "gil", budget_s=1.0, lease_s=0.2)


def test_kill_from_another_thread_ends_the_call(make: Make, version: Path) -> None:
    worker = make()
    call = in_background(worker, version, "sleep")
    worker.kill()
    error = call.outcome()
    assert isinstance(error, WorkerCrashed)
    assert error.exit_code == -signal.SIGKILL
    assert train(worker, version)["work"] == 1.0


def test_kill_takes_what_the_task_has_started_along(make: Make, version: Path) -> None:
    worker = make()
    train(worker, version, "child")
    worker.kill()
    wait_for_end(int(version.with_name("mark").read_text()))


def test_a_closed_worker_stays_closed(make: Make, version: Path) -> None:
    worker = make()
    call = in_background(worker, version, "sleep")
    worker.close()
    assert isinstance(call.outcome(), WorkerCrashed)
    with pytest.raises(RuntimeError, match="the worker is closed"):
        worker.start()
    assert not worker.alive


def test_overrides_of_the_start_and_of_the_round_reach_the_task(make: Make, version: Path) -> None:
    worker = make(run=RunTerms({"do": "raise"}))
    with pytest.raises(WorkerError, match="KeyError"):
        train(worker, version, local={})
    assert train(worker, version, local={"do": "work"})["work"] == 1.0


@pytest.mark.parametrize(
    ("deed", "budget_s", "lease_s"),
    [
        ("sleep", 600.0, 600.0),  # the end of its stdin ends it at once
        ("gil", 2.0, 0.5),  # it cannot see that end, and the kernel's alarm ends it
    ],
)
def test_a_worker_does_not_outlive_a_killed_supervisor(
    version: Path, tmp_path: Path, deed: str, budget_s: float, lease_s: float
) -> None:
    arguments = [version, tmp_path / "update", tmp_path / "mark", deed, budget_s, lease_s, tmp_path / "log"]
    supervisor = subprocess.Popen([sys.executable, f"{HERE}/supervisor.py", *map(str, arguments)])
    wait_for(tmp_path / "mark")
    pid = int((tmp_path / "mark").read_text())
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    wait_for_end(pid)  # both sleep four times as long


def test_losing_contact_alone_kills_nothing(version: Path, tmp_path: Path) -> None:
    """A supervisor that is silent, here because it is frozen, is not a supervisor that is gone."""
    arguments = [version, tmp_path / "update", tmp_path / "mark", "wait", 2.0, BOUND_S, tmp_path / "log"]
    supervisor = subprocess.Popen([sys.executable, f"{HERE}/supervisor.py", *map(str, arguments)])
    wait_for(tmp_path / "mark")
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        wait_for(tmp_path / "update")
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert supervisor.wait(BOUND_S) == 0


def test_a_task_that_needs_longer_to_load_is_named_with_the_limit_the_setting_and_the_log(
    make: Make, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(WorkerHung) as raised:
        make(f"{slow}:task", environment=Environment(load_timeout_s=0.5)).start()
    assert str(raised.value) == (
        f"the task {slow}:task was not loaded within 0.5 s: raise the setting load_timeout, if it needs more; its "
        f"output is in {tmp_path / 'worker.log'}"
    )
