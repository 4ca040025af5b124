"""Trainings in one folder whose ranks another launcher has started: the second one is refused by all of its ranks."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.operations.training.folder import folder_lock
from atoll.parallel.world import TIMEOUT_S
from tests.parallel.trainer import tasks
from tests.process_table import descendants
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[3]
TASK = f"{tasks.__name__}:slow"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2")
ANYWHERE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
STEPS = 800
"""Two minutes while the task is slowed."""

IN_USE = "is in use by another training"

pytestmark = pytest.mark.real


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


@contextmanager
def started(command: Sequence[object], errors: Path, **more: str) -> Iterator["subprocess.Popen[bytes]"]:
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdout=stream, stderr=stream, env=environment(**more)
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in [*descendants(process.pid), process.pid]:
                os.kill(each, 9)
        process.wait()


def training(out: Path) -> list[object]:
    return ["-m", "atoll", "train", TASK, "--out", out, f"--steps={STEPS}", "--set=train.log_every=1"]


def wait_for_step(out: Path, process: "subprocess.Popen[bytes]", errors: Path) -> None:
    until = time.monotonic() + BOUND_S
    while not (out / "log.jsonl").exists() or not tasks.losses(out):
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < until, errors.read_text()
        time.sleep(0.05)


@pytest.mark.long
def test_the_second_of_two_launches_by_torchrun_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    out, errors, slow = tmp_path / "out", tmp_path / "first", tmp_path / "slow"
    slow.touch()
    launch = [*TORCHRUN, *ANYWHERE, *training(out)]
    with started(launch, errors, **{tasks.SLOWED_BY: str(slow)}) as first:
        wait_for_step(out, first, errors)
        begun = time.monotonic()
        second = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, env=environment(), timeout=BOUND_S)
        assert time.monotonic() - begun < TIMEOUT_S / 2
        assert second.returncode != 0
        assert (second.stdout + second.stderr).count(IN_USE) == 1, second.stderr
        slow.unlink()
        assert first.wait(BOUND_S) == 0, errors.read_text()
    assert max(tasks.losses(out)) == STEPS


@pytest.mark.long
def test_every_rank_that_a_plain_launcher_has_started_exits_with_2(tmp_path: Path) -> None:
    """As `srun` or a shell starts them: nothing ends the other ranks when the first one is refused."""
    out, says = tmp_path / "out", []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with folder_lock(out):
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        ranks = []
        for rank in ("1", "0"):  # the first rank comes last
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, *map(str, training(out))]
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment(**where, **meet),
                )
            )
        try:
            says = [rank.communicate(timeout=BOUND_S)[0].decode() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [rank.returncode for rank in ranks] == [2, 2], says
    assert "".join(says).count(IN_USE) == 1
    assert says[0] == ""
    assert "Traceback" not in says[1]


def test_ranks_without_a_place_to_meet_are_refused_with_one_sentence(tmp_path: Path) -> None:
    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, *map(str, training(tmp_path / "out"))]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment(**where), timeout=BOUND_S, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert "atoll: set MASTER_ADDR and MASTER_PORT" in ended.stderr
    assert "Traceback" not in ended.stderr
