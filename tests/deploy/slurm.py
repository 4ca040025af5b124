"""The batch scripts of deploy/slurm under a real Slurm of two nodes on loopback (`make slurm-test`)."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.processes import free_address
from tests.debian import missing
from tests.waiting import BOUND_S

if lacking := missing("munged", "slurmctld", "slurmd", "sbatch"):
    pytest.skip(lacking, allow_module_level=True)
if os.geteuid() != 0:
    pytest.skip("slurmd starts jobs as their users, so it needs root", allow_module_level=True)

pytestmark = pytest.mark.timeout(1200)

SCRIPTS = Path(__file__).parents[2] / "deploy/slurm"
ATOLL = str(Path(sys.executable).with_name("atoll"))
LIMIT_S = 2 * BOUND_S
CONF = """
ClusterName=atoll
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={here}/munge/sock,cred_expire=10
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.%n.pid
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=15
InactiveLimit=0
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=a,b Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
# cred_expire: a requeued job waits for so many seconds, and for 120 s by default.


def until(condition, what, seconds=LIMIT_S):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.3)
    return found


class Slurm:
    """A slurmctld and two slurmd, and the commands of their cluster."""

    def __init__(self, here: Path):
        self.here, self._processes = here, []
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(here / "slurm.conf"),
            "PATH": f"{Path(ATOLL).parent}:{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "lo",  # both nodes are this machine
            "OMP_NUM_THREADS": "1",
        }

    def start(self):
        for folder in ("state", "spool/a", "spool/b", "munge"):
            (self.here / folder).mkdir(parents=True)
        (self.here / "munge").chmod(0o711)
        host = socket.gethostname().partition(".")[0]
        ports = [free_address().rpartition(":")[2] for _ in range(3)]
        (self.here / "slurm.conf").write_text(CONF.format(host=host, here=self.here, ports=ports))
        key = self.here / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        munge = [
            f"--{name}={self.here}/munge/{file}"
            for name, file in (
                ("key-file", "key"),
                ("socket", "sock"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
        ]
        self._run("munged", "--foreground", "--force", *munge)
        until((self.here / "munge/sock").exists, "munged does not listen")
        self._run("slurmctld", "-c", "-D")
        for node in "ab":
            self._run("slurmd", "-N", node, "-D")
        until(lambda: self.said("sinfo", "-h", "-o", "%D %t", check=False) == "2 idle", self.logs)

    def _run(self, program, *arguments):
        with (self.here / f"{program}{len(self._processes)}.out").open("wb") as log:
            command = [shutil.which(program), *arguments]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment))

    def logs(self):
        return "\n".join(f"{path}: {path.read_text()[-1500:]}" for path in self.here.glob("*.out"))

    def said(self, *command, check=True, cwd=None, **environment):
        done = subprocess.run(
            command, capture_output=True, text=True, env={**self.environment, **environment}, cwd=cwd, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout.strip()

    def submit(self, folder, script, *arguments, options=(), **environment):
        command = ("sbatch", "--parsable", *options, str(SCRIPTS / script), *arguments)
        return self.said(*command, cwd=folder, **environment).partition(";")[0]

    def state_of(self, job):
        """Return the states of a job and of its array tasks."""
        shown = self.said("scontrol", "show", "job", job, "-o", check=False)
        return set(re.findall(r"JobState=(\w+)", shown))

    def end(self):
        """End the jobs, the daemons, and what a step may have left, each by its process number."""
        self.said("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root", check=False)
        self.said("scancel", "--user=root", check=False)
        with suppress(AssertionError):
            until(lambda: not self.said("squeue", "-h", check=False), "", 30)
        for process in reversed(self._processes):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, word=""):
        """Return the process numbers of this cluster's steps, whose command has the word."""
        mark = f"SLURM_CONF={self.here}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_of_it = int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes()
                if is_of_it and word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found


@pytest.fixture
def slurm(tmp_path):
    cluster = Slurm(tmp_path / "slurm")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
    assert not cluster.processes()


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    subprocess.run([ATOLL, "new", str(folder)], check=True, capture_output=True)
    return folder


def committed(folder):
    done = subprocess.run(
        [ATOLL, "round", "list", "--state", "atoll-state", "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return len(re.findall(r'"committed"', done.stdout))


def invite(folder, name, *options):
    command = [ATOLL, "client", "invite", name, "--state", "atoll-state", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split()[-1]


@contextmanager
def process(folder, name, *arguments):
    with (folder / f"{name}.log").open("ab") as log:
        started = subprocess.Popen([ATOLL, *arguments], cwd=folder, stdout=log, stderr=log)
    try:
        yield started
    finally:
        started.terminate()
        with suppress(subprocess.TimeoutExpired):
            started.wait(30)
        started.kill()
        started.wait()


def test_a_site_of_two_nodes_survives_a_lost_rank_and_a_requeue_and_ends_by_scancel(slurm, project):
    shutil.copy(SCRIPTS / "agent.toml", project)
    log = project / "atoll-site.log"
    chosen = {"rounds": 1000, "round.cohort_size": 1, "round.quorum": 1, "coordinator.listen": free_address()}
    chosen["coordinator.enrol"] = free_address()
    overrides = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]

    def said():
        texts = [path.read_text()[-3000:] for path in (log, project / "hub.log") if path.exists()]
        return "\n".join([*texts, slurm.said("squeue", check=False), slurm.logs()])

    def more(number):
        before = committed(project)
        until(lambda: committed(project) >= before + number, said)

    with process(project, "hub", "coordinator", "run.toml", *overrides):
        (project / "code").write_text(invite(project, "north"))
        job = slurm.submit(project, "site.sh", ATOLL_JOIN="code")
        more(2)
        nodes = slurm.said("scontrol", "show", "job", job, "-o")
        assert "NumNodes=2" in nodes

        ranks = until(lambda: slurm.processes("mesh_client"), said)
        os.kill(ranks[-1], signal.SIGKILL)
        more(2)
        assert slurm.state_of(job) == {"RUNNING"}

        slurm.said("scontrol", "requeue", job)
        until(lambda: slurm.state_of(job) == {"PENDING"}, said)
        until(lambda: "stopped by SIGTERM" in log.read_text(), said)
        until(lambda: slurm.state_of(job) == {"RUNNING"}, said)
        more(2)

        slurm.said("scancel", job)
        until(lambda: slurm.state_of(job) == {"CANCELLED"}, said)
        until(lambda: log.read_text().count("stopped by SIGTERM") == 2, said)
        until(lambda: not slurm.processes("mesh_client"), said)


def test_a_coordinator_with_ranks_is_a_job(slurm, project):
    log = project / "atoll-coordinator.log"
    settings = ("--set", "rounds=2", "--set", "round.cohort_size=2", "--set", f"coordinator.enrol={free_address()}")
    environment = {"ATOLL_PUBLIC": "127.0.0.1", "ATOLL_LISTEN": free_address()}
    job = slurm.submit(project, "coordinator.sh", "run.toml", *settings, options=["--cpus-per-task=2"], **environment)
    until(lambda: log.exists() and "listen" in log.read_text(), lambda: slurm.logs() + log.read_text())
    ended = lambda: slurm.state_of(job) == {"COMPLETED"}  # noqa: E731
    with process(project, "a", "agent", "task.py:task", "--site", "north", "--join", invite(project, "north")):
        with process(project, "b", "agent", "task.py:task", "--site", "south", "--join", invite(project, "south")):
            until(ended, lambda: log.read_text()[-3000:] + slurm.logs())
    assert committed(project) == 2
    ranks = subprocess.run(
        [ATOLL, "rank", "list", "--state", "atoll-state"], cwd=project, capture_output=True, text=True, check=False
    )
    assert len(list((project / "atoll-state/aggregators").iterdir())) == 2, ranks


def test_a_sweep_is_a_job_array(slurm, project):
    (project / "grid.toml").write_text('task = "task.py:task"\nrounds = 1\n[grid]\n"local.epochs" = [1, 2]\n')
    options = ["--array=3-4", "--cpus-per-task=1"]
    job = slurm.submit(project, "sweep.sh", "grid.toml", options=options)

    def logs():
        return "\n".join(path.read_text()[-2000:] for path in project.glob("atoll-sweep-*.log")) + slurm.logs()

    until(lambda: slurm.state_of(job) == {"COMPLETED"}, logs)
    for seed in (3, 4):
        results = list((project / f"sweep-{seed}").glob("*/result.json"))
        assert len(results) == 2, logs()
        for path in results:
            json.loads(path.read_text())
