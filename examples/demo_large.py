"""`make demo-large`: two plain sites and one that is a mesh of four ranks, in which processes are killed.

The sites train a language model on the sources of Python's library. One rank of the mesh is killed (SIGKILL) in the
middle of a round, and the coordinator in the middle of the next one. The coordinator sees a slower client: every round
is committed with one update of each site. The tables have the restarted rank, the bytes that each rank sent, and the
private memory of each rank beside that of the process that trains the whole model at a plain site.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from atoll.ground.printable import printable_size
from atoll.operations import admin
from atoll.protocol.identity.names import Role
from atoll.protocol.vocabulary import Fate, Phase, RunState
from atoll.server.journal.holder import running_coordinator
from atoll.server.rounds.record import RoundRecord
from examples.demo import Processes, free_address
from examples.demo_course import Course, conduct

HERE = Path(__file__).parent / "large"
PLAIN, CLUSTER, NUM_RANKS = ["north", "south"], "cluster", 4
KILLED_RANK, KILL_RANK_IN, KILL_COORDINATOR_IN = 2, 2, 3
LIMIT_S = 600.0


class Federation(Processes):
    """The processes of the demo."""

    def start_coordinator(self) -> None:
        """Start the coordinator, or restart it: its state directory has the run."""
        self.start("coordinator", "coordinator", str(HERE / "run.toml"), "--state", str(self.state), *self.ports)

    def start_agent(self, site: str, *join: str) -> None:
        """Start the agent of a site; `join` has its join code."""
        crew = ["--config", str(HERE / "agent.toml")] if site == CLUSTER else []
        self.start(
            site,
            *("agent", str(HERE / "task.py:task"), "--site", site, *join, *crew, "--state", str(self.folder / site)),
            *("--set", "exit_when_done=true", "--set", "threads=1", "--set", "reconnect_max=1.0"),
        )


@dataclass
class Memory:
    """The private memory of each process, by a name for people [bytes]: before the first round, and the largest."""

    idle: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """The process of each rank that lives now."""

    def look(self, processes: Federation, *, is_idle: bool) -> None:
        """Measure all processes of the sites and the coordinator."""
        self.ranks = {}
        for site in (*PLAIN, CLUSTER, "coordinator"):
            for process in family(processes.running[site].pid):
                if name := self._name(site, process, is_first=process == processes.running[site].pid):
                    self.peak[name] = max(self.peak.get(name, 0), private_bytes(process))
        if is_idle:
            self.idle = dict(self.peak)

    def growth(self, name: str) -> int:
        """Return how much larger a process was than before the first round."""
        return self.peak.get(name, 0) - self.idle.get(name, 0)

    def _name(self, site: str, process: int, *, is_first: bool) -> str:
        with suppress(OSError):
            comm = Path(f"/proc/{process}/comm").read_text().strip()
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if comm.startswith("atoll rank "):
                rank = int(comm.rpartition(" ")[2])
                self.ranks[rank] = process
                return f"rank {rank} of {CLUSTER}"
            if b"atoll.training.worker.main" in command:
                return f"worker of {site}" if site in PLAIN else ""
            if is_first:
                return site if site == "coordinator" else f"agent of {site}"
        return ""


def family(process: int) -> Iterator[int]:
    """Yield a process and all of its descendants."""
    yield process
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def private_bytes(process: int) -> int:
    """Return the memory that a process shares with no other one, or 0 if it has ended."""
    with suppress(OSError):
        rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith("Private_"))
    return 0


@dataclass
class Demo(Course):
    """The course of the demo."""

    limit_s = LIMIT_S
    memory: Memory = field(default_factory=Memory)
    healed: dict[int, str] = field(default_factory=dict)
    """The restarted process and the seconds until it was there again, by round."""
    sent: dict[int, int] = field(default_factory=dict)
    """The size of each rank's part of the newest update [bytes], by rank."""

    def look(self) -> None:
        """Read the run's records, and measure memory."""
        before = len(self._committed())
        self.read("text")
        for record in self._committed()[before:]:
            names = ", ".join(client for client, _ in record.with_fate(Fate.REPORTED))
            seconds = (record.ended_at or 0) - record.opened_at
            self.say(f"round {record.round_id} is committed after {seconds:.1f} s with one update each of {names}")
        self._look_at_the_parts()
        self.memory.look(self.processes, is_idle=not any(record.clients for record in self.records))
        self.wait()

    def _look_at_the_parts(self) -> None:
        """Measure the parts of an update in the spool, where they lie until the coordinator has accepted them."""
        with suppress(OSError):
            for root in self.processes.folder.glob(f"{CLUSTER}/spool/*/root.json"):
                parts = [part for part in sorted(root.parent.glob("part.*")) if part.suffix != ".json"]
                self.sent = {int(part.suffix[1:]): part.stat().st_size for part in parts}

    def _committed(self) -> list[RoundRecord]:
        return [record for record in self.records if record.phase is Phase.COMMITTED]

    def open_round(self, number: int) -> RoundRecord | None:
        """Return the round of a number while it collects updates."""
        last = self.records[-1] if self.records else None
        return last if last is not None and last.round_id == number and last.phase is Phase.COLLECTING else None

    def run(self) -> None:
        """Run the federation to its end, with both faults on the way."""
        self.processes.start_coordinator()
        for site in (*PLAIN, CLUSTER):
            code = admin.invite(self.processes.state, Role.CLIENT, site, lifetime_s=LIMIT_S).join_code
            self.processes.start_agent(site, "--join", code)
        agent = "$ atoll agent examples/large/task.py:task --join CODE --site"
        self.say(f"{agent} {PLAIN[0]}   # the same at {PLAIN[1]}")
        self.say(f"{agent} {CLUSTER} --mesh dp_shard={NUM_RANKS}")
        self._kill_a_rank()
        self._kill_the_coordinator()
        while self.state in (RunState.QUEUED, RunState.RUNNING):
            self.look()

    def _kill_a_rank(self) -> None:
        while self.open_round(KILL_RANK_IN) is None or KILLED_RANK not in self.memory.ranks or not self._has_saved():
            self.look()
        killed = self.memory.ranks[KILLED_RANK]
        os.kill(killed, signal.SIGKILL)
        at = time.monotonic()
        self.say(f"kill -9 of rank {KILLED_RANK} of {CLUSTER} in round {KILL_RANK_IN}")
        while self.memory.ranks.get(KILLED_RANK, killed) == killed or len(self.memory.ranks) < NUM_RANKS:
            self.look()
        seconds = time.monotonic() - at
        self.healed[KILL_RANK_IN] = f"rank {KILLED_RANK} of {CLUSTER}, {seconds:.1f} s"
        self.say(f"its {NUM_RANKS} ranks are there again after {seconds:.1f} s: they go on at their checkpoint")

    def _has_saved(self) -> bool:
        """Return whether the mesh has made steps of this round, and their checkpoint."""
        return any(self.processes.folder.glob(f"{CLUSTER}/**/.metadata"))

    def _kill_the_coordinator(self) -> None:
        while (record := self.open_round(KILL_COORDINATOR_IN)) is None or not record.num_reported:
            self.look()
        accepted = [client for client, _ in record.with_fate(Fate.REPORTED)]
        self.processes.kill("coordinator")
        self.say(f"kill -9 of the coordinator in round {record.round_id}: it had accepted the update of {accepted[0]}")
        at = time.monotonic()
        self.processes.start_coordinator()
        while running_coordinator(self.processes.state) is None:
            self.look()
        self.healed[record.round_id] = f"coordinator, {time.monotonic() - at:.1f} s"

    # ------------------------------------------------------------ the end

    def show(self) -> None:
        """Print the rounds, and the bytes and the memory of each process."""
        table = Table(title="Rounds", title_justify="left")
        for column in ("round", "state", "updates", "healed", f"sent by {PLAIN[0]}", f"sent by {CLUSTER}", "loss"):
            table.add_column(column, justify="left" if column in ("state", "updates", "healed") else "right")
        for record in self.records:
            sent = {str(client): printable_size(row.num_bytes) for client, row in record.with_fate(Fate.REPORTED)}
            loss = self.loss.get(record.version if record.version is not None else -1)
            figures = (*(sent.get(site, "") for site in (PLAIN[0], CLUSTER)), "" if loss is None else f"{loss:.3f}")
            healed = self.healed.get(record.round_id, "")
            table.add_row(str(record.round_id), str(record.phase), ", ".join(sent), healed, *figures)
        self.console.print(table)
        table = Table(title="Bytes of an update, and private memory", title_justify="left")
        for column in ("process", "sent", "before round 1", "largest", "growth"):
            table.add_column(column, justify="left" if column == "process" else "right")
        for name, peak in sorted(self.memory.peak.items()):
            sizes = (self.memory.idle.get(name, 0), peak, max(0, self.memory.growth(name)))
            table.add_row(name, self._sent_by(name), *map(printable_size, sizes))
        self.console.print(table)

    def _sent_by(self, name: str) -> str:
        """Return the bytes of the newest update that a process has made."""
        kind, _, rest = name.partition(" ")
        rows = self.records[-1].clients if self.records else {}
        if kind == "rank":
            return printable_size(self.sent.get(int(rest.split()[0]), 0))
        sizes = [row.num_bytes for client, row in rows.items() if name == f"worker of {client}"]
        return printable_size(sizes[0]) if sizes else ""

    def broken(self) -> list[str]:
        """Return the promises that are broken."""
        faults = [f"the run is {self.state}, not finished"] if self.state is not RunState.FINISHED else []
        for record in self.records:
            missing = {*PLAIN, CLUSTER} - {client for client, _ in record.with_fate(Fate.REPORTED)}
            if record.phase is not Phase.COMMITTED or missing:
                faults.append(f"round {record.round_id} is {record.phase}, without {', '.join(missing) or 'nobody'}")
        sizes = {row.num_bytes for record in self.records for _, row in record.with_fate(Fate.REPORTED)}
        if len(self.sent) != NUM_RANKS or sizes != {sum(self.sent.values())}:
            parts, updates = (", ".join(map(str, numbers)) for numbers in (self.sent.values(), sorted(sizes)))
            faults.append(f"the parts of the ranks have {parts or 0} bytes, the updates of the sites {updates}")
        if sorted(self.healed) != [KILL_RANK_IN, KILL_COORDINATOR_IN]:
            faults.append(f"healed: {'; '.join(self.healed.values()) or 'nothing'}, not a rank and the coordinator")
        whole = max(self.memory.growth(f"worker of {site}") for site in PLAIN)
        rank = max(self.memory.growth(f"rank {rank} of {CLUSTER}") for rank in range(NUM_RANKS))
        if rank >= whole:
            faults.append(f"a rank grew by {printable_size(rank)}, a whole-model client by {printable_size(whole)}")
        return faults


def main() -> int:
    """Run the demo, and return the exit code."""
    return conduct(
        "make demo-large",
        (__doc__ or "").splitlines()[0],
        lambda folder, console: Demo(Federation(folder, free_address()), console),
        width=120,
        kept="nothing was lost: every round has one update of each site",
    )


if __name__ == "__main__":
    sys.exit(main())
