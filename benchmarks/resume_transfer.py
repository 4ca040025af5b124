"""The bytes that travel twice when a transfer is interrupted at each tenth of its way.

    python -m benchmarks.resume_transfer [--mib N]

A coordinator and one agent are real processes, connected through a proxy on loopback that counts every byte. In one
round the agent downloads a version of 64 MiB and uploads an update of the same size. At 10 %, 20 %, ... 90 % of each
transfer comes one of these interruptions:

    cut             the connection is closed
    coordinator     the coordinator is killed with SIGKILL and restarted
    agent           the agent is killed with SIGKILL and restarted

The bytes that an interruption sends again are all bytes that had left the sender, minus the position from which the
next connection continues: the length of the file that grows at the receiver. Their sum is checked against the proxy
alone: all bytes sent, minus the size of the transfer. Both contain the overhead of HTTP/2 and gRPC. Undisturbed
transfers are timed without the proxy: a download by the agent, an upload from its begin to its acceptance, checked and
durable.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import ClientId, RunState
from benchmarks.evidence import look
from benchmarks.members import equip
from benchmarks.processes import NotMeasured, Processes, agent_command, coordinator_command, free_address
from benchmarks.proxy import Crossing, Proxy, Way
from benchmarks.report import Bar, conclude, say, spread

MIB = 2**20
BAR_MIB = 8
BULK_BYTES = 4096
TENTHS = range(1, 10)
SITE = "a"
NAMES = {Way.DOWN: "download", Way.UP: "upload"}
KINDS = ("cut", "coordinator", "agent")
LIMIT_S = 300.0


@dataclass
class Transfer:
    """One direction of one round, with its interruptions."""

    size: int
    position: int = 0  # where the present connection has begun
    thresholds: list[int] = field(default_factory=list)  # of what is still to happen
    resent: list[int] = field(default_factory=list)  # by each interruption
    num_bytes: int = 0  # in all, by the proxy, over connections that are gone

    @property
    def excess(self) -> int:
        """The bytes sent beyond the size."""
        return self.num_bytes - self.size


class Scene:
    """The counter of the traffic, which interrupts it at the next threshold."""

    def __init__(self, folder: Path, size: int, interrupt: Callable[[Crossing], None]) -> None:
        self._folder, self._interrupt = folder, interrupt
        self._lock = threading.Lock()
        self._crossing: Crossing | None = None
        self._interrupted: Transfer | None = None
        marks = [size * tenth // 10 for tenth in TENTHS]
        self.transfers = {way: Transfer(size, thresholds=list(marks)) for way in Way}

    def count(self, crossing: Crossing, way: Way) -> None:
        """Count bytes that have come, and interrupt when they reach the next threshold."""
        transfer = self.transfers[way]
        with self._lock:
            if crossing is not self._crossing and not self._takes_over(crossing, way):
                return
            if crossing.is_cut or not transfer.thresholds:
                return
            if transfer.position + crossing.num_bytes[way] < transfer.thresholds[0]:
                return
            transfer.thresholds.pop(0)
            self._interrupted = transfer
            self._interrupt(crossing)
            crossing.cut()

    def end(self, crossings: Iterable[Crossing]) -> None:
        """Settle at the end of the round, and count what all connections have carried."""
        with self._lock:
            self._settle()
            for crossing in crossings:
                for way, transfer in self.transfers.items():
                    transfer.num_bytes += crossing.num_bytes[way]

    def _takes_over(self, crossing: Crossing, way: Way) -> bool:
        """Return whether this connection carries the transfer, which has bulk on it; others come and go after a cut."""
        if crossing.num_bytes[way] < BULK_BYTES:
            return False
        self._settle()
        self._crossing = crossing
        return True

    def _settle(self) -> None:
        """Account for the closed connection, and find the position from which the next one continues."""
        for way, transfer in self.transfers.items():
            kept = self._kept(way)
            if transfer is self._interrupted and self._crossing is not None:
                transfer.resent.append(transfer.position + self._crossing.num_bytes[way] - kept)
            transfer.position = kept
        self._interrupted = None

    def _kept(self, way: Way) -> int:
        """Return the bytes of a transfer that its receiver has on disk."""
        where = "coordinator/runs/*/incoming/*.bin" if way is Way.UP else f"{SITE}/models/*.part"
        return max((path.stat().st_size for path in self._folder.glob(where)), default=0)


@dataclass
class Session:
    """A coordinator and an agent in one folder."""

    folder: Path
    processes: Processes
    num_elements: int
    num_rounds: int
    address: str = field(default_factory=free_address)
    join: str = ""

    def start(self, name: str) -> None:
        """Start a process, or restart it."""
        state = self.folder / name
        if name == "coordinator":
            command = coordinator_command(
                "benchmarks.tasks:noise",
                name="transfer",
                rounds=self.num_rounds,
                evaluation__server_every=0,
                round__cohort_size=1,
                round__deadline=3600.0,
                coordinator__listen=self.address,
                coordinator__state=state,
            )
        else:
            equip(self.folder / "coordinator", state, Identity(Role.CLIENT, name))
            join = self.join or self.address
            waits = {"reconnect_min": 0.05, "reconnect_max": 0.5}
            command = agent_command(
                "benchmarks.tasks:noise", site=name, coordinator=join, state=state, exit_when_done=True, **waits
            )
        self.processes.start(name, command, {"ATOLL_BENCH_ELEMENTS": str(self.num_elements)})

    def wait(self) -> None:
        """Wait until the run has ended, and restart every killed process."""
        until = time.monotonic() + LIMIT_S
        while self.processes.running["coordinator"].poll() != 0:
            if time.monotonic() > until:
                raise NotMeasured(f"no end in {LIMIT_S:g} s:\n{self.processes.last_words(SITE)}")
            for name in ("coordinator", SITE):
                if self.processes.died(name):
                    self.start(name)
            time.sleep(0.01)
        if (end := look(self.folder / "coordinator")).state is not RunState.FINISHED:
            raise NotMeasured(f"the run is {end.state}: {end.cause}")


def interrupted(kind: str, num_elements: int) -> dict[Way, Transfer]:
    """Run one round in which each transfer is interrupted nine times."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
        session = Session(Path(place), processes, num_elements, num_rounds=1)

        def interrupt(crossing: Crossing) -> None:
            if kind != "cut":
                processes.running[SITE if kind == "agent" else kind].kill()

        scene = Scene(Path(place), 4 * num_elements, interrupt)
        with Proxy(session.address, on_bytes=scene.count) as proxy:
            session.join = proxy.address
            session.start("coordinator")
            session.start(SITE)
            session.wait()
            scene.end(proxy.crossings)
    for way, transfer in scene.transfers.items():
        if len(transfer.resent) != len(TENTHS):
            raise NotMeasured(f"{kind}: {len(transfer.resent)} of {len(TENTHS)} interruptions of the {NAMES[way]}")
        worst, excess = max(transfer.resent) / MIB, transfer.excess / MIB
        say(f"{kind}: {NAMES[way]}: sent again at most {worst:.2f} MiB after an interruption, {excess:.2f} MiB in all")
    return scene.transfers


def undisturbed(num_elements: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the bytes per second of whole transfers, without the proxy."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
        session = Session(Path(place), processes, num_elements, num_rounds)
        session.start("coordinator")
        session.start(SITE)
        session.wait()
        clients = [record.clients[ClientId(SITE)] for record in look(Path(place) / "coordinator").records]
    size = 4 * num_elements / 1e6
    rates = {
        "download_mb_per_s": [size / client.download_seconds for client in clients],
        "upload_mb_per_s": [size / (client.fate_at - (client.upload_begun_at or 0.0)) for client in clients],
    }
    for name, values in rates.items():
        say(f"undisturbed: {name} {spread(values, 1)}")
    return rates


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume_transfer", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the version and of the update [MiB]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of interruptions")
    arguments = parser.parse_args()
    num_elements = arguments.mib * MIB // 4
    rates = undisturbed(num_elements, 7)
    results = {kind: interrupted(kind, num_elements) for kind in arguments.kinds}
    bars = [
        Bar.at_most(f"{kind}, {NAMES[way]}: sent again by one interruption [MiB]", max(transfer.resent) / MIB, BAR_MIB)
        for kind, transfers in results.items()
        for way, transfer in transfers.items()
    ]
    return conclude(
        "resume_transfer",
        bars,
        ours={
            "size_mib": arguments.mib,
            **{name: {**spread(values, 1), "count": len(values)} for name, values in rates.items()},
            "resent_mib": {kind: _resent(transfers) for kind, transfers in results.items()},
        },
        theirs=None,
        why_not="no peer resumes a transfer after one of its sides has died",
    )


def _resent(transfers: dict[Way, Transfer]) -> dict[str, Any]:
    return {
        NAMES[way]: {
            "at_each_tenth": [round(num_bytes / MIB, 2) for num_bytes in transfer.resent],
            "in_all_by_the_proxy": round(transfer.excess / MIB, 2),
        }
        for way, transfer in transfers.items()
    }


if __name__ == "__main__":
    sys.exit(main())
