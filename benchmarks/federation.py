"""A federation of real processes that are killed on purpose and restarted until the run has ended."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.ground.process import crash_points
from atoll.parallel.mesh_client import crash_points as rank_crash_points
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.signals import ExitCode
from atoll.protocol.vocabulary import RunState
from atoll.server.journal.holder import running_coordinator
from atoll.server.views.history import History
from benchmarks.dividing import VARIABLE
from benchmarks.evidence import Ledger, Promise, Verdict, accepted_in_logs, judge, look
from benchmarks.lying_member import VARIABLE as LIE
from benchmarks.members import equip
from benchmarks.processes import ATOLL, NotMeasured, Processes, agent_command, coordinator_command, free_address
from benchmarks.small_disk import SmallDisk
from benchmarks.sums_evidence import Trained, by_moves, by_noise, judge_sums
from benchmarks.tasks import Noise

COORDINATOR = "coordinator"
SITES = ("a", "b", "c")
TASK, MEASURED_TASK = "benchmarks.tasks:noise", "benchmarks.tasks:measured"
MESH_TASK, MESH_TASK_IN_SUMS = "benchmarks.crew_task:task", "benchmarks.crew_task:moves"
RANK = "rank"
"""A rank of the client with a mesh, among the processes that die."""
AGGREGATOR = "aggregator"
"""The aggregation ranks, among the processes that die: each at its step; the coordinator starts them again."""
CHECKPOINT_EVERY = "2 steps"
HANG_S = 20.0
HEALS = ("crew.filling", "crew.filled", "crew.mid_step", "crew.stepped", "crew.saving", "crew.saved")
"""The steps of a rank after whose death the same training makes another step."""
LIMIT_S = 300.0
AGAIN_S = 0.3
"""Wait before a process starts again that has found no room."""
RANK_DIED = "has ended with exit code -9"
"""What the coordinator says of an aggregation rank that was killed."""
NO_ROOM = re.compile("no room|No space left|waits for space|does not fit")
FREE_MIN = 2**20
FULL_S, FULL_MAX_S = 2.0, 60.0
"""Seconds for which a disk stays full after the second death, and after the first one if nothing meets it."""
LEASE_S = 300.0
"""Lease of a client, longer than any restart: on busy cores an agent with a mesh takes more than the default."""
POLL_S = 0.01
LOOK_S = 0.1

NAME, SEED = "crash", 7
EXAMPLES_MAX = 500
SUMS: dict[str, object] = {
    "secure__clip_norm": 2000.0,
    "secure__bits": 64,
    "secure__examples_max": EXAMPLES_MAX,
    "secure__stage_timeout": 15.0,
    "round__quorum": 3,
    "round__retry_wait": 0.5,
    "model__keep_versions": 100,
}
"""The settings of secure sums: no update is cut, and the weights are of more than one kind."""


SUMS_OF_A_MESH: dict[str, object] = {"secure__stage_timeout": 90.0}
"""A mesh that masks has time to start its ranks again."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the model and of the rounds, which decides where a kill can hit."""

    rounds: int = 4
    num_elements: int = 750_000  # 3 MB: three chunks, and a fold of three blocks
    train_s: float = 0.05
    upload_limit: int = 20_000_000  # bytes per second: an upload is under way for a good part of a round
    divided: str = ""  # kind and number of the parts of each update, as in `benchmarks.dividing`
    mesh: str = ""  # of the first client, which trains on ranks
    in_sums: int = 0  # number of sites whose updates come in secure sums; 0: three, with plain updates
    evaluates: bool = False  # whether the sites measure each version, in secure sums
    ranks: int = 0  # aggregation ranks
    liars: tuple[str, int] = (
        "",
        0,
    )  # kind of a lie, as in `benchmarks.lying_member`, and the number of liars, the last
    free: int = -1  # bytes left on the disk of the first process that dies, from its death on; -1: its disk has room

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites."""
        return (*SITES, "d", "e")[: self.in_sums] if self.in_sums else SITES


@dataclass(slots=True)
class Recovery:
    """A restart: seconds until the process was back, and until the next round was committed."""

    of: str
    step: str
    back_s: float | None = None
    commit_s: float | None = None


@dataclass(slots=True)
class _Watch:
    """A recovery in progress."""

    recovery: Recovery
    begun: float
    num_committed: int
    log_bytes: int


@dataclass
class Federation:
    """A coordinator and three agents in one folder.

    Args:
        folder: the folder, for this federation only.
        shape: the shape of the run.
        crash_at: the process, and the value of ATOLL_CRASH_AT in its first life; of a rank, its planned end.
        more_deaths: those of other processes, or of its second life, in the same way.
    """

    folder: Path
    shape: Shape
    crash_at: tuple[str, str] | None = None
    more_deaths: dict[str, str] = field(default_factory=dict)
    num_kills: int = 0
    num_at_steps: int = 0
    """Processes that have died at the step that was planned for them."""
    recoveries: list[Recovery] = field(default_factory=list)
    end: Ledger = field(default_factory=Ledger)
    _promised: set[tuple[Promise, str]] = field(default_factory=set)
    _watches: list[_Watch] = field(default_factory=list)
    _address: str = field(default_factory=free_address)
    _looked_at: float = 0.0
    _planned: dict[str, str] = field(default_factory=dict)
    _disk: "_FullDisk | None" = None

    def run(self, disturb: Callable[["Federation", Processes], None] = lambda federation, processes: None) -> Verdict:
        """Run to the end, and restart every killed process; `disturb` is called on each pass of the loop."""
        with self._on_a_small_disk(), Processes(self.folder) as processes:
            begun = time.monotonic()
            for name in (COORDINATOR, *self.shape.sites):
                self._start(processes, name)
            while True:
                if self._disk is not None:
                    self._disk.attend(self, processes)
                if time.monotonic() - begun > LIMIT_S:
                    logs = (f"{name}:\n{processes.last_words(name)}" for name in (COORDINATOR, *self.shape.sites))
                    raise NotMeasured("\n".join([f"no end in {LIMIT_S:g} s", *logs]))
                disturb(self, processes)
                if self._has_ended(
                    processes
                ):  # otherwise a coordinator that died just after its run would begin another
                    break
                self._restart_the_dead(processes)
                self._watch(processes)
                time.sleep(POLL_S)
            if self.shape.in_sums:
                self._wait_for_the_sites(processes)
            in_logs = accepted_in_logs((site, processes.log(site)) for site in self.shape.sites)
            logs = {name: processes.log(name).read_text(errors="replace") for name in processes.running}
            self._look_for_a_dead_rank()
            self._look_for_dead_aggregators(logs)
            self.end = look(self.state)
            if self.shape.in_sums:
                return self._judged_sums(in_logs, logs)
            return judge(self.end, self._promised, in_logs)

    @property
    def met_no_room(self) -> bool:
        """Whether the process whose disk was full has said so."""
        return self._disk is not None and self._disk.is_met

    @contextmanager
    def _on_a_small_disk(self) -> Iterator[None]:
        """Mount the disk that will be full for the block, if there is one."""
        if self.shape.free < 0:
            yield
            return
        assert self.crash_at is not None
        of = SITES[0] if self.crash_at[0] == RANK else self.crash_at[0]
        place = self.state / "aggregators" if of == AGGREGATOR else self.folder / of
        self._disk = _FullDisk(of, SmallDisk(place), self.shape.free)
        try:
            yield
        finally:
            self._disk.disk.unmount()

    def _wait_for_the_sites(self, processes: Processes) -> None:
        """Wait until every agent has ended by itself, so that it has deleted what it held."""
        until = time.monotonic() + 30
        while any(processes.running[site].poll() is None for site in self.shape.sites) and time.monotonic() < until:
            if self._disk is not None:
                self._disk.attend(self, processes)
            self._restart_the_dead(processes, self.shape.sites)
            time.sleep(POLL_S)
        for site in self.shape.sites:
            if processes.running[site].poll() is None:
                raise NotMeasured(f"{site} does not end after the run:\n{processes.last_words(site)}")

    def _judged_sums(self, in_logs: set[Promise], logs: dict[str, str]) -> Verdict:
        history = History(self.state)
        run = history.runs()[-1].run_id
        return judge_sums(
            self.end,
            in_logs,
            versions=self._exported() if self.shape.ranks else self.state / "runs" / run / "versions",
            trained=self._trained(),
            examples_max=EXAMPLES_MAX,
            states={site: self.folder / site for site in self.shape.sites},
            logs=logs,
            evaluations=history.evaluations(run) if self.shape.evaluates else None,
        )

    def _trained(self) -> Trained:
        size = self.shape.num_elements
        return by_moves(size) if self.shape.mesh else by_noise(Noise({"ATOLL_BENCH_ELEMENTS": str(size)}), SEED, NAME)

    def _exported(self) -> Path:
        """Put the versions together whose parts the aggregation ranks have, as an operator does."""
        folder = self.folder / "exported"
        folder.mkdir()
        for version in self.end.models:
            out = folder / f"{version:06d}.safetensors"
            command = [
                ATOLL,
                "model",
                "export",
                str(version),
                "--run",
                NAME,
                "--out",
                str(out),
                "--state",
                str(self.state),
            ]
            if (ended := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
                raise NotMeasured(f"version {version} cannot be exported: {ended.stderr}")
        return folder

    @property
    def state(self) -> Path:
        """The state directory of the coordinator."""
        return self.folder / COORDINATOR

    def kill(self, processes: Processes, name: str) -> None:
        """Send SIGKILL to a process, and begin to measure its recovery."""
        processes.kill(name)
        self._planned.pop(name, None)
        self.num_kills += 1

    # ------------------------------------------------------------ processes

    def _start(self, processes: Processes, name: str) -> None:
        environment = {
            "ATOLL_BENCH_ELEMENTS": str(self.shape.num_elements),
            "ATOLL_BENCH_TRAIN_S": str(self.shape.train_s),
        }
        if step := self._planned_death(name):
            environment[crash_points.VARIABLE] = step
        if name == SITES[0] and self.shape.mesh:
            environment |= self._of_the_mesh()
        command = self._command(name)
        if self.shape.divided and name != COORDINATOR:
            environment[VARIABLE] = self.shape.divided
            command = [sys.executable, "-m", "benchmarks.dividing", *command[1:]]
        lie, liars = self.shape.liars
        if name in self.shape.sites[len(self.shape.sites) - liars :]:
            environment[LIE] = lie
            command = [sys.executable, "-m", "benchmarks.lying_member", *command[1:]]
        processes.start(name, command, environment)

    def awaits_death_of(self, name: str) -> bool:
        """Return whether a process dies at a step in its present life."""
        return bool(self._planned.get(name))

    def _planned_death(self, name: str) -> str:
        """Return the step at which a process dies in its next life; empty: at none."""
        first = self.crash_at or ("", "")
        who = AGGREGATOR if name == COORDINATOR and first[0] == AGGREGATOR else name  # the ranks inherit the variable
        if first[0] == who:
            self.crash_at = None
            step = first[1]
        else:
            step = self.more_deaths.pop(name, "")
        self._planned[who] = step
        return step

    def _of_the_mesh(self) -> dict[str, str]:
        """Write the planned end of a rank, if there is one; return the environment of the client with a mesh."""
        plan = self.folder / "plan"
        if self.crash_at is not None and self.crash_at[0] == RANK:
            plan.write_text(self.crash_at[1], "ascii")
            self.crash_at = None
        return {rank_crash_points.VARIABLE: str(plan), "ATOLL_BENCH_STEPS": str(self.folder / "steps")}

    def _look_for_a_dead_rank(self) -> None:
        """Note the death of a rank at its step, and the seconds from it to the next step of its training."""
        done = self.folder / "plan.done"
        if not done.exists():
            return
        self.num_kills += 1
        self.num_at_steps += 1
        planned, at = rank_crash_points.PlannedEnd.parse(done.read_text()), done.stat().st_ctime
        healed = _first_step(self.folder / "steps") if planned.step in HEALS and not planned.is_stop else at
        self.recoveries.append(Recovery(RANK, planned.step, healed - at or None))

    def _look_for_dead_aggregators(self, logs: dict[str, str]) -> None:
        """Count the aggregation ranks that the coordinator has started again."""
        deaths = logs[COORDINATOR].count(RANK_DIED)
        self.num_kills += deaths
        if deaths and self._planned.get(AGGREGATOR):
            self.num_at_steps += 1

    def _command(self, name: str) -> list[str]:
        of_mesh = MESH_TASK_IN_SUMS if self.shape.in_sums else MESH_TASK
        task = of_mesh if self.shape.mesh else MEASURED_TASK if self.shape.evaluates else TASK
        if name == COORDINATOR:
            return coordinator_command(
                task,
                name=NAME,
                seed=SEED,
                rounds=self.shape.rounds,
                evaluation__server_every=0,
                evaluation__clients_every=int(self.shape.evaluates),
                round__cohort_size=len(self.shape.sites),
                round__deadline=300.0,
                round__outage_max=300.0,
                coordinator__listen=self._address,
                coordinator__state=self.state,
                coordinator__lease=LEASE_S,
                **((SUMS | SUMS_OF_A_MESH if self.shape.mesh else SUMS) if self.shape.in_sums else {}),
                **({"coordinator__aggregators": self.shape.ranks} if self.shape.ranks else {}),
                **({"coordinator__disk_free_min": FREE_MIN} if self.shape.free >= 0 else {}),
            )
        equip(self.state, self.folder / name, Identity(Role.CLIENT, name))
        crew: dict[str, object] = {}
        if self.shape.mesh and name == SITES[0]:
            crew = {"crew__mesh": self.shape.mesh, "crew__checkpoint_every": CHECKPOINT_EVERY}
            crew |= {"crew__collective_timeout": HANG_S, "crew__max_restarts": 100}
        return agent_command(
            task,
            site=name,
            coordinator=self._address,
            state=self.folder / name,
            upload_limit=self.shape.upload_limit,
            reconnect_min=0.05,
            reconnect_max=0.5,
            threads=1,
            exit_when_done=True,
            **crew,
        )

    def _has_ended(self, processes: Processes) -> bool:
        """Return whether the coordinator has ended well, or has died after the end of the run was on disk."""
        code = processes.running[COORDINATOR].poll()
        if code is None or self._finds_no_room(processes, COORDINATOR):
            return False
        if code == 0:
            return True
        if not processes.died(COORDINATOR) or look(self.state).state is not RunState.FINISHED:
            return False
        self._died_at_its_step(COORDINATOR)
        return True

    def _died_at_its_step(self, name: str) -> str:
        """Return the crash point at which a process has died; empty: it was killed from outside."""
        if step := self._planned.pop(name, ""):
            self.num_kills += 1
            self.num_at_steps += 1
        return step

    def _finds_no_room(self, processes: Processes, name: str) -> bool:
        """Return whether a process has ended because its disk is full: a service manager starts it again."""
        is_small = self._disk is not None and self._disk.of == name
        return is_small and processes.running[name].poll() == ExitCode.AWAY

    def _restart_the_dead(self, processes: Processes, names: Sequence[str] = ()) -> None:
        for name in names or (COORDINATOR, *self.shape.sites):
            if self._finds_no_room(processes, name):
                time.sleep(AGAIN_S)
                self._start(processes, name)
                continue
            if not processes.died(name):
                continue
            if self._disk is not None and self._disk.of == name:
                self._disk.fill_once(processes.log(name))
            ledger = look(self.state)
            self._promised |= set(ledger.accepted.items())
            step = self._died_at_its_step(name) or "from outside"
            log_bytes = processes.log(name).stat().st_size
            self._start(processes, name)
            self.recoveries.append(recovery := Recovery(name, step))
            self._watches = [watch for watch in self._watches if watch.recovery.of != name]
            self._watches.append(_Watch(recovery, time.monotonic(), ledger.num_committed, log_bytes))

    # ------------------------------------------------------------ recoveries

    def _watch(self, processes: Processes) -> None:
        for watch in self._watches:
            if watch.recovery.back_s is None and self._is_back(processes, watch):
                watch.recovery.back_s = time.monotonic() - watch.begun
        if not self._watches or time.monotonic() - self._looked_at < LOOK_S:
            return
        num_committed = look(self.state).num_committed
        self._looked_at = time.monotonic()
        for watch in self._watches:
            if num_committed > watch.num_committed:
                watch.recovery.commit_s = self._looked_at - watch.begun
        self._watches = [watch for watch in self._watches if watch.recovery.commit_s is None]

    def _is_back(self, processes: Processes, watch: _Watch) -> bool:
        """Return whether the coordinator listens, after recovering its run, or the agent is connected."""
        name = watch.recovery.of
        if name == COORDINATOR:
            coordinator = running_coordinator(self.state)
            return coordinator is not None and coordinator.pid == processes.running[name].pid
        with processes.log(name).open("rb") as log:
            log.seek(watch.log_bytes, os.SEEK_SET)
            return b"connected to" in log.read()


@dataclass
class _FullDisk:
    """The disk of one process, which is full from its first death on.

    The process dies once more when it has said so, and there is room again some seconds later.
    """

    of: str
    disk: SmallDisk
    free: int
    is_met: bool = False
    _log: Path | None = None
    _log_bytes: int = 0
    _until: float = math.inf

    def fill_once(self, log: Path) -> None:
        """Fill the disk, unless that was done at an earlier death."""
        if self._log is None:
            self.disk.fill(self.free)
            self._log, self._log_bytes = log, log.stat().st_size
            self._until = time.monotonic() + FULL_MAX_S

    def attend(self, federation: "Federation", processes: Processes) -> None:
        """Fill the disk, kill the process that has no room, or make room, if it is time."""
        if self._log is None:
            log = processes.log(COORDINATOR)
            if self.of == AGGREGATOR and RANK_DIED in log.read_text(errors="replace"):
                self.fill_once(log)
            elif (federation.folder / "plan.done").exists():  # a rank of the mesh has died, and its agent lives
                self.fill_once(processes.log(self.of))
            return
        if not self.is_met and NO_ROOM.search(self._said()):
            self.is_met, self._until = True, time.monotonic() + FULL_S
            if not federation.awaits_death_of(self.of):
                self._kill(federation, processes)
        if time.monotonic() > self._until:
            self.disk.make_room()
            self._until = math.inf

    def _said(self) -> str:
        assert self._log is not None
        with self._log.open("rb") as log:
            log.seek(self._log_bytes)
            return log.read().decode(errors="replace")

    def _kill(self, federation: "Federation", processes: Processes) -> None:
        if self.of != AGGREGATOR:
            if processes.running[self.of].poll() is None:
                federation.kill(processes, self.of)
            return
        lock = next(iter(sorted(self.disk.folder.glob("*/lock"))))
        with suppress(ProcessLookupError):
            os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)


@dataclass
class Killer:
    """Kills from outside at random times of a seed, up to a number of kills or the end of the run.

    Half of them hit the coordinator, the others an agent; of a client with a mesh every other one hits a process below
    the agent: a rank, its fork server or their launcher.
    """

    rng: random.Random
    most: int
    pause_s: tuple[float, float]
    _due: float = 0.0

    def __call__(self, federation: Federation, processes: Processes) -> None:
        """Kill one process if a kill is due."""
        now = time.monotonic()
        if not self._due:
            self._due = now + self.rng.uniform(*self.pause_s)
        if federation.num_kills >= self.most or now < self._due:
            return
        name = COORDINATOR if self.rng.random() < 0.5 else self.rng.choice(SITES)
        self._due = now + self.rng.uniform(*self.pause_s)
        if processes.running[name].poll() is not None:
            return
        below = descendants(processes.running[name].pid) if federation.shape.mesh and name == SITES[0] else []
        if below and self.rng.random() < 0.5:
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(below), signal.SIGKILL)
                federation.num_kills += 1
        else:
            federation.kill(processes, name)


def _first_step(file: Path) -> float:
    """Return the time of the first step of the newest rank 0, of the ranks that replaced the dead [s since 1970].

    The rank 0 of the dead ones may make another step after the death of the other, before it waits for that one.
    """
    steps = [line.split() for line in file.read_text("ascii").splitlines()]
    return min(float(at) for at, process in steps if process == steps[-1][1])


def descendants(process: int) -> list[int]:
    """Return the processes that a process has started, directly or not."""
    found: list[int] = []
    with suppress(FileNotFoundError):  # it has ended
        for thread in Path(f"/proc/{process}/task").glob("*/children"):
            found += [int(child) for child in thread.read_text().split()]
    return found + [below for child in found for below in descendants(child)]
