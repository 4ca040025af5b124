"""The gain of more aggregation ranks when the port of each rank is the bottleneck.

    python -m benchmarks.ranks [--quick] [--mib N] [--clients N] [--pairs N] [--port-mb-per-s N] [--parts N]

A coordinator, its ranks and the uploading clients are real processes; each rank's port is behind a proxy with a limit
of 50 MB/s (`throttle`). Clients are bare gRPC streams with prepared bytes (`uploaders`), so the figure is the intake of
the ranks, from the first byte to the last acceptance, every byte hashed, inspected and durable. Federations of one and
of four ranks take turns, round by round; one of two ranks runs for the comparison of bits. From the close of a round to
its commit the ranks exchange sums: the bytes that they send are compared with the optimum, (N-1) accumulators of 8
bytes for each element. Another measurement without the proxies' limit shows the distance to what the machine can do.

In the last one each of two uploading processes is one large client, whose update comes in parts that are spread over
the ranks: one client then has the ports of all ranks, and each rank receives as much as every other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from atoll.operations import admin
from atoll.protocol.identity.names import Identity, Role, aggregator
from atoll.protocol.vocabulary import RunId
from atoll.server.views.history import History
from benchmarks.members import equip
from benchmarks.processes import ATOLL, ROOT, NotMeasured, Processes, Usage, coordinator_command, free_address
from benchmarks.report import Bar, conclude, say, spread

TASK = "benchmarks.tasks:noise"
RUN = RunId("ranks-1")
UPLOADER_PROCESSES = 2
LIMIT_S = 120.0
MIB = 1 << 20
BAR_TIMES, BAR_COORDINATOR_BYTES, BAR_EXCHANGED, BAR_BALANCE = 3.6, 1e6, 1.01, 1.01


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one federation."""

    intake_s: float
    close_s: float  # from the close to the commit
    exchanged_bytes: int
    cpu_s: dict[str, float]


@dataclass
class Federation:
    """A coordinator with some ranks, each behind a proxy, and clients."""

    processes: Processes
    num_ranks: int
    num_elements: int
    num_clients: int
    bytes_per_s: float
    num_parts: int = 0
    """The parts of each update, spread over the ranks; 0: it is sent as a whole, to one."""
    rounds: list[Round] = field(default_factory=list)
    end: tuple[list[str], int] = ([], 0)
    """The digests of all versions, and the bytes of updates that the coordinator received."""
    received: list[int] = field(default_factory=list)
    """The bytes of updates that each rank received."""
    _spoken: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its folder and the prefix of its processes' names."""
        return f"{self.num_ranks}-{self.bytes_per_s / 1e6:g}"

    @property
    def state(self) -> Path:
        """The state directory of the coordinator."""
        return self.processes.folder / self.name / "coordinator"

    @property
    def update_bytes(self) -> int:
        """The bytes of one client's update."""
        return 4 * self.num_elements + 8

    def start(self) -> None:
        """Start all processes, and wait for the first invitation."""
        address = free_address()
        settings: dict[str, object] = {
            "name": "ranks",
            "seed": 7,
            "rounds": 1000,
            "evaluation__server_every": 0,
            "round__cohort_size": self.num_clients,
            "round__deadline": 3600.0,
            "coordinator__listen": address,
            "coordinator__state": self.state,
            "coordinator__aggregators": self.num_ranks,
            "coordinator__start_aggregators": False,
            "coordinator__keep_versions": 1,
            "coordinator__lease": 3600.0,  # the uploaders have no heartbeat
        }
        environment = {"ATOLL_BENCH_ELEMENTS": str(self.num_elements)}
        for client in range(self.num_clients):
            name = f"client-{client}"
            equip(self.state, self.state.parent / name, Identity(Role.CLIENT, name))
        self.processes.start(f"{self.name}.coordinator", coordinator_command(TASK, **settings), environment)
        for rank in range(self.num_ranks):
            place = ["--coordinator", address, "--rank", str(rank), "--of", str(self.num_ranks)]
            equip(self.state, self._rank(rank), aggregator(rank))
            command = [ATOLL, "aggregator", *place, "--state", str(self._rank(rank))]
            self.processes.start(f"{self.name}.rank{rank}", command)
        until = time.monotonic() + LIMIT_S
        while not all((self._rank(rank) / "address").exists() for rank in range(self.num_ranks)):
            self._check_time(until)
        ports = [(self._rank(rank) / "address").read_text() for rank in range(self.num_ranks)]
        ports = self._talk("throttle", "benchmarks.throttle", str(self.bytes_per_s), *ports).split()
        while not self._are_here():
            self._check_time(until)
        each = self.num_clients // UPLOADER_PROCESSES
        for number in range(UPLOADER_PROCESSES):
            whose = (str(self.state), str(number * each), str(each), str(self.num_parts))
            self._begin(f"uploader{number}", "benchmarks.uploaders", address, *whose, *ports)
        self._wait_for_invitations()

    def round(self) -> Round:
        """Let all clients upload at once, and wait for the commit."""
        before, exchanged = self._usages(), self._exchanged()
        uploaders = [self._spoken[f"uploader{number}"] for number in range(UPLOADER_PROCESSES)]
        for uploader in uploaders:
            assert uploader.stdin is not None
            uploader.stdin.write("go\n")
            uploader.stdin.flush()
        times = [json.loads(self._line(f"uploader{number}")) for number in range(UPLOADER_PROCESSES)]
        self._wait_for_invitations()
        record = [record for record in History(self.state).rounds(RUN) if record.ended_at is not None][-1]
        assert record.closed_at is not None
        assert record.ended_at is not None
        after = self._usages()
        found = Round(
            intake_s=max(t["last"] for t in times) - min(t["first"] for t in times),
            close_s=record.ended_at - record.closed_at,
            exchanged_bytes=self._exchanged() - exchanged,
            cpu_s={name: after[name] - before[name] for name in after},
        )
        self.rounds.append(found)
        return found

    @property
    def mb_per_s(self) -> list[float]:
        """Return the intake of the ranks in each measured round [MB/s]."""
        return [self.num_clients * self.update_bytes / 1e6 / found.intake_s for found in self.rounds]

    def finish(self) -> None:
        """Store the digests and byte counts to compare."""
        time.sleep(1.5)  # a rank reports once a second
        reply = admin.ranks(self.state)
        self.end = [row.digest for row in History(self.state).versions(RUN)], reply.received_bytes
        self.received = [row.received_bytes for row in reply.ranks]

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        gigabytes = self.num_clients * self.update_bytes / 1e9
        return {
            "ranks": self.num_ranks,
            "received_mb": [round(received / 1e6, 1) for received in self.received],
            "rounds": len(self.rounds),
            "mb_per_s": spread(self.mb_per_s, 1),
            "intake_s": spread([found.intake_s for found in self.rounds], 2),
            "close_to_commit_s": spread([found.close_s for found in self.rounds], 2),
            "exchanged_mb": round(median(found.exchanged_bytes for found in self.rounds) / 1e6, 2),
            "cpu_s_per_gb": {
                name: round(median(found.cpu_s[name] for found in self.rounds) / gigabytes, 2)
                for name in self.rounds[0].cpu_s
            },
        }

    # ------------------------------------------------------------ processes

    def _rank(self, rank: int) -> Path:
        return self.processes.folder / self.name / f"rank{rank}"

    def _begin(self, name: str, module: str, *arguments: str) -> None:
        with self.processes.log(f"{self.name}.{name}").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        self._spoken[name] = process
        self.processes.running[f"{self.name}.{name}"] = process  # type: ignore[assignment] - it ends like the others

    def _talk(self, name: str, module: str, *arguments: str) -> str:
        self._begin(name, module, *arguments)
        return self._line(name)

    def _line(self, name: str) -> str:
        stdout = self._spoken[name].stdout
        assert stdout is not None
        if not (line := stdout.readline()):
            raise NotMeasured(f"{name} has ended:\n{self.processes.last_words(f'{self.name}.{name}')}")
        return line

    def _wait_for_invitations(self) -> None:
        for number in range(UPLOADER_PROCESSES):
            self._line(f"uploader{number}")

    def _are_here(self) -> bool:
        try:
            return all(row.address for row in admin.ranks(self.state).ranks)
        except Exception:  # it does not listen yet
            return False

    def _check_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise NotMeasured(f"no start:\n{self.processes.last_words(f'{self.name}.coordinator')}")
        time.sleep(0.05)

    def _exchanged(self) -> int:
        return sum(row.exchanged_bytes for row in admin.ranks(self.state).ranks)

    def _usages(self) -> dict[str, float]:
        """Return the processor seconds of the parts so far."""
        found = dict.fromkeys(("ranks", "coordinator", "proxies", "uploaders"), 0.0)
        kinds = {"rank": "ranks", "coor": "coordinator", "thro": "proxies", "uplo": "uploaders"}
        for name, process in self.processes.running.items():
            folder, _, part = name.rpartition(".")
            if folder == self.name:
                found[kinds[part[:4]]] += Usage.of(process.pid).cpu_s
        return found


def measured(
    folder: Path, arguments: argparse.Namespace, num_ranks: Sequence[int], mb_per_s: float, num_parts: int = 0
) -> list[Federation]:
    """Run federations of these numbers of ranks in turns; the last of three runs only two rounds."""
    with Processes(folder) as processes:
        num_elements = arguments.mib * MIB // 4
        num_clients = UPLOADER_PROCESSES if num_parts else arguments.clients
        all_of_them = [
            Federation(processes, number, num_elements, num_clients, 1e6 * mb_per_s, num_parts) for number in num_ranks
        ]
        for federation in all_of_them:
            (folder / federation.name).mkdir()
            federation.start()
            federation.round()  # the first round warms up: code is loaded and compiled
            federation.rounds.clear()
        for pair in range(arguments.pairs):
            for federation in all_of_them[: 2 if pair else 3]:
                found = federation.round()
                rate = federation.num_clients * federation.update_bytes / 1e6 / found.intake_s
                parts = f", each update in {num_parts} parts" if num_parts else ""
                what = f"{federation.num_ranks} ranks, {mb_per_s:g} MB/s each{parts}: {rate:.0f} MB/s taken in"
                say(f"{what}, {found.close_s:.2f} s from the close to the commit")
        for federation in all_of_them:
            federation.finish()
    return all_of_them


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=48, help="size of the model and of each update [MiB]")
    parser.add_argument("--clients", type=int, default=8, help="clients in a round")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of rounds, one with one rank and one with four")
    parser.add_argument("--port-mb-per-s", type=float, default=50.0, help="limit of each rank's port [MB/s]")
    parser.add_argument("--parts", type=int, default=8, help="parts of an update of a large client")
    parser.add_argument("--quick", action="store_true", help="4 MiB, 4 clients, one pair, and only behind the proxies")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mib, arguments.clients, arguments.pairs = 4, 4, 1
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        limited = measured(Path(place), arguments, (1, 4, 2), arguments.port_mb_per_s)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        unlimited = [] if arguments.quick else measured(Path(place), arguments, (1, 4), 0.0)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        parted = measured(Path(place), arguments, (1, 4, 2), arguments.port_mb_per_s, arguments.parts)
    one, four, two = limited
    common = min(len(federation.end[0]) for federation in limited)
    different = {tuple(federation.end[0][:common]) for federation in limited}
    accumulator = 8 * one.num_elements
    ratio = median(four.mb_per_s) / median(one.mb_per_s)
    exchanged = max(found.exchanged_bytes for found in four.rounds) / (3 * accumulator)
    bars = [
        Bar.at_least("4 ranks take in, times what one does", ratio, BAR_TIMES),
        Bar.exactly(f"different models of 1, 2 and 4 ranks, {common} versions", len(different) - 1, 0),
        Bar.at_most("4 ranks: bytes exchanged against the optimum", exchanged, BAR_EXCHANGED),
        Bar.below(
            "update bytes received by the coordinator",
            max(federation.end[1] for federation in limited),
            BAR_COORDINATOR_BYTES,
        ),
        *bars_of_parts(parted),
    ]
    return conclude(
        "ranks",
        bars,
        ours={
            "update_mib": arguments.mib,
            "clients": arguments.clients,
            "port_mb_per_s": arguments.port_mb_per_s,
            "optimum_mb": {"2 ranks": accumulator / 1e6, "4 ranks": 3 * accumulator / 1e6},
            "limited": [federation.summary() for federation in (one, two, four)],
            "without_the_limit": [federation.summary() for federation in unlimited],
            "in_parts": [federation.summary() for federation in parted],
        },
        theirs=None,
        why_not="no peer shards the aggregation of one model over ranks that receive uploads",
    )


def bars_of_parts(parted: Sequence[Federation]) -> list[Bar]:
    """Return the bars of two large clients: their rate, the bits, and the balance of the ranks."""
    one, four, _ = parted
    common = min(len(federation.end[0]) for federation in parted)
    different = {tuple(federation.end[0][:common]) for federation in parted}
    ratio = median(four.mb_per_s) / median(one.mb_per_s)
    return [
        Bar.at_least("4 ranks take in of two clients in parts, times what one does", ratio, BAR_TIMES),
        Bar.exactly(f"parts: different models of 1, 2 and 4 ranks, {common} versions", len(different) - 1, 0),
        Bar.at_most("parts: bytes of the busiest of 4 ranks against their mean", balance(four), BAR_BALANCE),
    ]


def balance(federation: Federation) -> float:
    """Return the bytes of updates of the busiest rank, times the mean of all ranks."""
    return max(federation.received) / (sum(federation.received) / federation.num_ranks)


if __name__ == "__main__":
    sys.exit(main())
