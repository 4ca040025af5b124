"""A mesh over two machines that share a folder: two launchers as processes on loopback, of which one is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from benchmarks.processes import free_address
from tests.federation.crew.exact_task import SLOWED_BY, moved
from tests.federation.crew.test_federation import TASK
from tests.federation.processes import ROOT, federation
from tests.process_table import descendants

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1000"),
    *("--local-addr=127.0.0.1", "--monitor-interval=0.1"),
]
ENTRY = ["-m", "atoll.parallel.mesh_client"]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

SRUN = """
import subprocess, sys, time
both = [subprocess.Popen(sys.argv[1:]) for _ in range(2)]
while all(each.poll() is None for each in both):
    time.sleep(0.05)
for each in both:
    each.kill()
sys.exit(1)
"""
"""A stand-in for `srun --nodes=2 --kill-on-bad-exit=1`."""


def every_process(process):
    return [process, *descendants(process)]


def kill(processes):
    """Kill processes at once."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Machine:
    """The ranks of one machine under torchrun, which another system starts again when it has ended, as Kubernetes."""

    def __init__(self, command, log, environment):
        self._command, self._log, self._environment = command, log, {**os.environ, **LOOPBACK, **environment}
        self._is_over = threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def lose(self):
        """Kill every process of it at once."""
        kill(every_process(self.process.pid))

    def close(self):
        self._is_over.set()
        self.lose()
        self._keeper.join()

    def _start(self):
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)

    def _keep(self):
        while True:
            below = descendants(self.process.pid)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
                kill(below)  # a container ends with its first process
                if self._is_over.is_set():
                    return
                self._start()


@contextmanager
def machines(folder, logs, rendezvous, **environment):
    """Two machines, which end with the block."""
    found = []
    try:
        for number in (0, 1):
            command = [*TORCHRUN, *rendezvous(number), *ENTRY, str(folder)]
            found.append(Machine(command, logs / f"machine{number}.log", environment))
        yield found
    finally:
        for machine in found:
            machine.close()


def c10d(address):
    return lambda number: ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=crew"]


def static(address):
    host, _, port = address.rpartition(":")
    return lambda number: [f"--node-rank={number}", f"--master-addr={host}", f"--master-port={port}"]


def begin(it, slow, **crew):
    """Start a coordinator, a plain agent and one with a mesh over two machines."""
    it.coordinator(rounds=2, round__cohort_size=2, round__deadline=1200, coordinator__lease=300)
    it.agent("b", threads=1)
    crew = {"mesh": "dp_shard=2", "nodes": 2, "checkpoint_every": "4 steps", "max_restarts": 20, **crew}
    keys = {f"crew.{name}": json.dumps(value) if isinstance(value, list) else value for name, value in crew.items()}
    it.agent("a", environment={SLOWED_BY: str(slow), **LOOPBACK}, **keys)


def check(it):
    """Both rounds have one update of each client, and the exact model."""
    assert it.wait_for_end(timeout=600) == 0
    assert "the ranks start again (1 of 20)" in it.log("a")
    for number, record in enumerate(it.rounds(), start=1):
        assert sorted(record.clients) == ["a", "b"]
        assert record.num_reported == 2
        w = read(it.state / "runs" / "trouble-1" / "versions" / f"{number:06d}.safetensors")["w"]
        np.testing.assert_array_equal(w, number * moved().numpy())


@pytest.mark.parametrize(
    ("rendezvous", "lost", "environment"),
    [
        (c10d, 1, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        (static, 1, {}),
        (static, 0, {}),
    ],
)
def test_ranks_of_another_system_go_on_when_a_machine_is_lost_and_comes_back(tmp_path, rendezvous, lost, environment):
    folder, slow = tmp_path / "shared", tmp_path / "slow"
    folder.mkdir()
    slow.touch()
    place, environment = rendezvous(free_address()), {SLOWED_BY: str(slow), **environment}
    with federation(tmp_path, task=TASK) as it, machines(folder, tmp_path, place, **environment) as two:
        begin(it, slow, launch="external", listen=free_address(), folder=str(folder))
        it.wait_for(lambda: any((folder / "round").glob("*/step-*")), timeout=600)
        two[lost].lose()
        it.wait_for(lambda: "the ranks start again (1 of 20)" in it.log("a"), timeout=600)
        slow.unlink()
        check(it)


def test_a_command_of_the_agent_starts_both_machines_and_is_started_again_when_one_is_lost(tmp_path):
    folder, slow = tmp_path / "shared", tmp_path / "slow"
    slow.touch()
    (tmp_path / "srun.py").write_text(SRUN)
    torchrun = [*TORCHRUN, *c10d(free_address())(0), *ENTRY, "{folder}"]
    with federation(tmp_path, task=TASK) as it:
        command = ["{python}", str(tmp_path / "srun.py"), *torchrun]
        begin(it, slow, launch="command", command=command, listen="127.0.0.1:0", folder=str(folder))
        it.wait_for(lambda: any((folder / "round").glob("*/step-*")), timeout=600)
        [srun] = [each for each in descendants(it.running["a"].pid) if "srun.py" in cmdline(each)][:1]
        second = [each for each in descendants(srun) if "torch.distributed.run" in cmdline(each)][1]
        kill(every_process(second))
        it.wait_for(lambda: "the ranks start again (1 of 20)" in it.log("a"), timeout=600)
        slow.unlink()
        check(it)


def cmdline(process):
    with suppress(FileNotFoundError), open(f"/proc/{process}/cmdline") as file:
        return file.read().replace("\0", " ")
    return ""
