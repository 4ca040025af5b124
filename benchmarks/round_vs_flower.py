"""A round without training, against Flower's: its duration, and the memory of the servers.

    python -m benchmarks.round_vs_flower [--shapes 8x1 4x100] [--rounds N] [--passes N] [--quick]

The exchange is the same on both sides, N clients x M MB in ten float32 tensors: the model goes to every client, each
returns the model plus a random number (one pass over the model; different on every client, as Flower stores equal
content once), and the weighted mean is the next model. Ours: `atoll coordinator` and an agent for each client, with
mutual TLS, journal, every update durable before it is acknowledged, and a warm worker process. Theirs: a SuperLink in
memory and a SuperNode for each client, subprocess isolation, without TLS, at the best of a printed sweep of its
settings. The sides take turns. Our round is timed from its opening to its commit, Flower's from its begin to its end;
the first round of each pass, in which processes start, does not count. Memory is the sum over the kinds of server
processes (SuperLink and ServerApp; coordinator and its worker) of the largest VmHWM.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import Phase, RunId, RunState
from atoll.server.views.history import History
from benchmarks.flower_peer import Flower, check_installed
from benchmarks.members import equip
from benchmarks.memory_watch import Peaks
from benchmarks.processes import NotMeasured, Processes, agent_command, coordinator_command, wait_for_address
from benchmarks.report import Bar, conclude, say, spread

TASK = "benchmarks.tasks:plus"
BARS = {(8, 1): 50.0, (4, 100): 5.0}
SWEEP: Mapping[str, Mapping[str, str]] = {
    "as it comes": {},
    "8 objects at once": {"FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "8", "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": "8"},
    "chunks of 20 MiB": {"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(20 << 20)},
}
THEIR_SERVER = ("superlink", "serverapp")
LIMIT_S = 600.0


@dataclass
class Side:
    """The seconds of one side's rounds, and the peak memory of its processes by their kind [bytes]."""

    seconds: list[float] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: list[float], peaks: Mapping[str, int]) -> None:
        """Add one pass without its first round."""
        self.seconds += seconds[1:]
        self.peaks = {kind: max(self.peaks.get(kind, 0), peaks.get(kind, 0)) for kind in {*self.peaks, *peaks}}

    def server_mb(self, *kinds: str) -> float:
        """Return the peak memory of the processes whose kind contains one of these words [MB]."""
        return sum(peak for kind, peak in self.peaks.items() if any(word in kind for word in kinds)) / 1e6

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        peaks = {kind: round(peak / 1e6) for kind, peak in sorted(self.peaks.items())}
        return {"round_s": spread(self.seconds, 3), "rounds": len(self.seconds), "vm_hwm_mb": peaks}


def our_pass(num_clients: int, num_elements: int, num_rounds: int) -> tuple[list[float], dict[str, int]]:
    """Return the seconds of our rounds, and the memory of our processes."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
        state, environment = Path(place) / "state", {"ATOLL_BENCH_ELEMENTS": str(num_elements)}
        command = coordinator_command(
            TASK,
            name="exchange",
            rounds=num_rounds,
            evaluation__server_every=0,
            round__cohort_size=num_clients,
            round__min_available=num_clients,
            round__deadline=LIMIT_S,
            coordinator__listen="127.0.0.1:0",
            coordinator__admin="127.0.0.1:0",
            coordinator__state=state,
        )
        processes.start("coordinator", [*command, "--stay"], environment)
        address = wait_for_address(processes, "coordinator", state)
        for number in range(num_clients):
            folder = Path(place) / f"site{number}"
            equip(state, folder, Identity(Role.CLIENT, folder.name))
            agent = agent_command(TASK, site=folder.name, coordinator=address, state=folder)
            processes.start(f"agent{number}", agent, environment)
        with Peaks({name: process.pid for name, process in processes.running.items()}) as peaks:
            _wait(History(state), processes)
        records = History(state).rounds(RunId("exchange-1"))
        seconds = [record.ended_at - record.opened_at for record in records if record.ended_at is not None]
        if any(record.phase is not Phase.COMMITTED for record in records) or len(seconds) != num_rounds:
            raise NotMeasured(f"not every round was committed:\n{processes.last_words('coordinator')}")
    return seconds, peaks.greatest


def _wait(history: History, processes: Processes) -> None:
    until = time.monotonic() + LIMIT_S
    while history.run("exchange-1").state is not RunState.FINISHED:
        if time.monotonic() > until:
            raise NotMeasured(f"no end in {LIMIT_S:g} s:\n{processes.last_words('coordinator')}")
        time.sleep(0.1)


def their_pass(
    num_clients: int, num_elements: int, num_rounds: int, settings: Mapping[str, str]
) -> tuple[list[float], dict[str, int]]:
    """Return the seconds of Flower's rounds, and the memory of its processes."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
        return Flower(processes, num_clients, num_elements, settings).run(num_rounds, LIMIT_S)


def sweep(num_clients: int, num_elements: int) -> str:
    """Return Flower's best settings for a shape, by the median of a few rounds."""
    found = {}
    for name, settings in SWEEP.items():
        seconds, _ = their_pass(num_clients, num_elements, 3, settings)
        found[name] = median(seconds[1:])
        say(f"Flower, {num_clients} clients x {num_elements * 4 / 1e6:g} MB, {name}: {found[name]:.1f} s a round")
    return min(found, key=lambda name: found[name])


def measure(shape: tuple[int, int], passes: int, rounds: int, best: str) -> tuple[Side, Side]:
    """Measure both sides in turns."""
    num_clients, mb = shape
    num_elements, ours, theirs = mb * 1_000_000 // 4, Side(), Side()
    for number in range(passes):
        ours.add(*our_pass(num_clients, num_elements, 1 + 4 * rounds))
        theirs.add(*their_pass(num_clients, num_elements, 1 + rounds, SWEEP[best]))
        taken = f"ours {median(ours.seconds):.3f} s, Flower {median(theirs.seconds):.2f} s a round"
        say(f"{num_clients} clients x {mb} MB, pass {number + 1}: {taken}")
    return ours, theirs


def bars_of(shape: tuple[int, int], ours: Side, theirs: Side) -> list[Bar]:
    """Return the bars of one shape."""
    name = f"{shape[0]} clients x {shape[1]} MB"
    ratio = median(theirs.seconds) / median(ours.seconds)
    bars = [Bar.at_least(f"{name}: Flower's round over ours", ratio, BARS.get(shape, 5.0))]
    if shape[1] >= 100:
        memory = ours.server_mb("atoll coordinator", "worker"), theirs.server_mb(*THEIR_SERVER)
        bars.append(Bar.below(f"{name}: our server's peak memory over Flower's", memory[0] / memory[1], 1.0))
    return bars


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_vs_flower", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", nargs="+", default=["8x1", "4x100"], help="clients x MB")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of Flower in a pass, after the first; 4 x for ours"
    )
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 clients x 1 MB, one pass: a check that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.rounds, arguments.passes = ["2x1"], 1, 1
    shapes = [(int(clients), int(mb)) for clients, _, mb in (shape.partition("x") for shape in arguments.shapes)]
    try:
        check_installed()
    except NotMeasured as why:
        return conclude("round_vs_flower", [], ours="not measured", theirs=None, why_not=str(why))
    bars: list[Bar] = []
    our_side, their_side = {}, {}
    for shape in shapes:
        best = "as it comes" if arguments.quick else sweep(shape[0], shape[1] * 250_000)
        ours, theirs = measure(shape, arguments.passes, arguments.rounds, best)
        bars += bars_of(shape, ours, theirs)
        name = f"{shape[0]} x {shape[1]} MB"
        our_side[name], their_side[name] = ours.summary(), {**theirs.summary(), "settings": best}
    return conclude(
        "round_vs_flower",
        bars,
        ours={"runs_with": "mutual TLS, journal, and fdatasync of every update", **our_side},
        theirs={"runs_with": "flwr 1.41 over HTTP, no TLS, state in memory, nothing durable", **their_side},
    )


if __name__ == "__main__":
    sys.exit(main())
