"""Latency of empty rounds, with 10, 100 and 1,000 connected clients.

    python -m benchmarks.round_latency [--clients N ...] [--rounds N] [--turns N]

The coordinator is the real process with its journal on; the clients are whole agents with a connection each, many to a
process (`crowd`), whose training takes no time. The model has four numbers. A round is timed by its own record, from
its opening to its commit, both on the coordinator's clock; the gap between two rounds is reported beside it, so that
the rounds per second cannot flatter. The first rounds of each run, in which every client fetches its first model, do
not count.

Theirs is `tight_rounds`: the same commits, messages, hashes and synced files by hand. Both sides are connected all the
time and take turns: a run of ours, then as many rounds of theirs. A turn's ratio is that of the medians of its rounds;
the median of the turns counts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.operations import admin
from atoll.protocol.vocabulary import Phase, RunId, RunState
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History
from benchmarks.data_plane import Talker
from benchmarks.processes import NotMeasured, Processes, Usage, coordinator_command, toml, wait_for_address
from benchmarks.report import Bar, conclude, percentile, say, spread
from benchmarks.tight_rounds import prepare

COHORTS = {10: 10, 100: 100, 1000: 100}
ROUNDS = {10: 200, 100: 60, 1000: 40}
TURNS = 10
WARM_UP = 5
LIMIT_S = 300.0
LIMITS_MS = {10: 50.0, 1000: 1000.0}
LIMITS_OF_TIGHT = {10: 6.0, 1000: 6.0}


@dataclass(slots=True)
class Measured:
    """The measurement with one number of clients."""

    num_clients: int
    cohort_size: int
    before: Usage  # of the coordinator
    after: Usage
    runs: list[list[RoundRecord]] = field(default_factory=list)  # of each turn, after the warm-up
    cpu_s: float = 0.0  # of the coordinator, in all turns of ours
    clients_cpu_s: float = 0.0  # of all client processes together, in the same
    tight: list[list[float]] = field(default_factory=list)  # of each turn: seconds of the rounds by hand
    tight_commits: list[int] = field(default_factory=list)  # of each round by hand

    @property
    def seconds(self) -> list[float]:
        """The time of each round, from its opening to its commit [s]."""
        return [seconds for run in self.runs for seconds in _seconds(run)]

    @property
    def ratios(self) -> list[float]:
        """The median of our rounds over that of the rounds by hand, of each turn."""
        pairs = zip(self.runs, self.tight, strict=True)
        return [statistics.median(_seconds(ours)) / statistics.median(theirs) for ours, theirs in pairs]

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        pairs = [pair for run in self.runs for pair in pairwise(run)]
        gaps = [later.opened_at - _ended(earlier) for earlier, later in pairs]
        whole = sum(_ended(run[-1]) - run[0].opened_at for run in self.runs)
        num_run = len(self.seconds) + WARM_UP * len(self.runs)
        return {
            "clients": self.num_clients,
            "cohort": self.cohort_size,
            "rounds": len(self.seconds),
            "p50_ms": _ms(percentile(self.seconds, 0.5)),
            "p99_ms": _ms(percentile(self.seconds, 0.99)),
            "max_ms": _ms(max(self.seconds)),
            "gap_p50_ms": _ms(statistics.median(gaps)),
            "rounds_per_s": round(len(self.seconds) / whole, 2),
            "coordinator_cpu_ms_per_round": _ms(self.cpu_s / num_run),
            "clients_cpu_ms_per_round": _ms(self.clients_cpu_s / num_run),
            "coordinator_rss_mb_before_the_run": round(self.before.rss_bytes / 1e6, 1),
            "coordinator_rss_mb_max": round(self.after.rss_bytes_max / 1e6, 1),
            "times_the_tight_loop": spread(self.ratios, 2),
        }

    def summary_of_tight(self) -> dict[str, Any]:
        """Summarise the rounds by hand, for the last line."""
        seconds = [seconds for turn in self.tight for seconds in turn]
        return {
            "clients": self.num_clients,
            "p50_ms": _ms(percentile(seconds, 0.5)),
            "p99_ms": _ms(percentile(seconds, 0.99)),
            "commits_per_round": statistics.median(self.tight_commits),
        }


def measure(num_clients: int, num_rounds: int, turns: int, folder: Path) -> Measured:
    """Connect the clients of both sides, then let them take turns."""
    cohort_size, state = COHORTS.get(num_clients, num_clients), folder / "coordinator"
    with Processes(folder) as processes:
        settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0"}
        processes.start("coordinator", coordinator_command(**settings, coordinator__keep_rounds=num_rounds + WARM_UP))
        address = wait_for_address(processes, "coordinator", state)
        connect(processes, address, state, num_clients)
        tight = connect_tight(processes, num_clients, cohort_size)
        usage = processes.usage("coordinator")
        measured = Measured(num_clients, cohort_size, before=usage, after=usage)
        for turn in range(turns):
            count = num_rounds // turns + (turn < num_rounds % turns)
            run_ours(processes, state, count, measured)
            said = json.loads(tight.ask(str(count)))
            measured.tight.append(said["seconds"])
            measured.tight_commits += said["commits"]
            say(f"  turn {turn + 1}: {measured.ratios[-1]:.2f} times the tight loop")
        measured.after = processes.usage("coordinator")
        tight.close()
    return measured


def run_ours(processes: Processes, state: Path, num_rounds: int, measured: Measured) -> None:
    """Run the warm-up and `num_rounds` rounds, and add them to the measurement."""
    cpu_s, clients_cpu_s = processes.usage("coordinator").cpu_s, crowds_cpu_s(processes)
    run_id = start_run(state, measured.cohort_size, num_rounds + WARM_UP)
    wait_for_end(processes, state)
    measured.cpu_s += processes.usage("coordinator").cpu_s - cpu_s
    measured.clients_cpu_s += crowds_cpu_s(processes) - clients_cpu_s
    records = History(state).rounds(RunId(run_id))
    if bad := [record for record in records if record.phase is not Phase.COMMITTED]:
        raise NotMeasured(f"round {bad[0].round_id} was abandoned: {bad[0].abandon_reason} {bad[0].detail}")
    measured.runs.append(records[WARM_UP:])


def connect(processes: Processes, address: str, state: Path, num_clients: int) -> None:
    """Start the clients in two to four processes; return when all of them are connected."""
    where = [address, str(state), str(processes.folder / "clients")]
    crowd(processes, "crowd", num_clients, lambda *numbers: ["benchmarks.crowd", *where, *numbers])


def connect_tight(processes: Processes, num_clients: int, cohort_size: int) -> Talker:
    """Start the side by hand in as many processes, and return its server."""
    folder = processes.folder
    prepare(folder)
    server = Talker(processes, "tight", "benchmarks.tight_rounds", "serve", folder, cohort_size)
    attend = ["benchmarks.tight_rounds", "attend", str(folder), server.first_line]
    crowd(processes, "tight-crowd", num_clients, lambda *numbers: [*attend, *numbers])
    return server


def crowd(processes: Processes, name: str, num_clients: int, command: Callable[[str, str], Sequence[str]]) -> None:
    """Start clients in two to four processes; `command` gives module and arguments, from first client and count."""
    num_crowds, first, begun = min(4, 2 + num_clients // 500), 0, time.monotonic()
    names = [f"{name}-{number}" for number in range(num_crowds)]
    for number, one in enumerate(names):
        count = num_clients // num_crowds + (number < num_clients % num_crowds)
        processes.start(one, [sys.executable, "-m", *command(str(first), str(count))])
        first += count
    while not all("ready" in processes.log(one).read_text() for one in names):
        for one in names:
            if processes.running[one].poll() is not None or time.monotonic() - begun > LIMIT_S:
                raise NotMeasured(f"{one} does not connect:\n{processes.last_words(one)}")
        time.sleep(0.05)
    say(f"  {name}: {num_clients} clients in {num_crowds} processes connected in {time.monotonic() - begun:.1f} s")


def crowds_cpu_s(processes: Processes) -> float:
    """Return the processor seconds of all our client processes so far."""
    return sum(processes.usage(name).cpu_s for name in processes.running if name.startswith("crowd-"))


def start_run(state: Path, cohort_size: int, num_rounds: int, *, pause: float = 0.0) -> str:
    """Start a run, as `atoll run start` does, and return its id."""
    settings = {
        "task": "benchmarks.tasks:empty",
        "name": "latency",
        "rounds": num_rounds,
        "evaluation.server_every": 0,
        "round.cohort_size": cohort_size,
        "pause": pause,
    }
    text = "\n".join(f"{key} = {toml(value)}" for key, value in settings.items())
    return str(admin.start(state, text).run_id)


def wait_for_end(processes: Processes, state: Path) -> None:
    """Wait until the run has ended, with rare looks: each takes processor time from the measured processes."""
    begun = time.monotonic()
    while (run := History(state).runs()[-1]).state in (RunState.QUEUED, RunState.RUNNING):
        if time.monotonic() - begun > LIMIT_S:
            raise NotMeasured(f"no end in {LIMIT_S:g} s:\n{processes.last_words('coordinator')}")
        for name, process in processes.running.items():
            if process.poll() is not None:
                raise NotMeasured(f"{name} has ended:\n{processes.last_words(name)}")
        time.sleep(0.25)
    if run.state is not RunState.FINISHED:
        raise NotMeasured(f"the run is {run.state}: {run.cause}")


def main() -> int:
    """Measure each scale."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.round_latency", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--clients", type=int, nargs="+", default=list(COHORTS), metavar="N", help="connected clients")
    parser.add_argument("--rounds", type=int, help="measured at each scale, instead of the default")
    parser.add_argument("--turns", type=int, default=TURNS, help="in which both sides alternate")
    arguments = parser.parse_args()
    results: dict[int, Measured] = {}
    for num_clients in arguments.clients:
        say(f"{num_clients} clients")
        num_rounds = arguments.rounds or ROUNDS.get(num_clients, 30)
        turns = max(1, min(arguments.turns, num_rounds // 2))  # a gap needs two rounds
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            result = measure(num_clients, num_rounds, turns, Path(folder))
        say("  " + ", ".join(f"{name} {value}" for name, value in result.summary().items()))
        results[num_clients] = result
    ours = {"scales": [result.summary() for result in results.values()], "journal": "on", "model": "four float32"}
    theirs = {
        "what": "tight_rounds: sqlite3, grpc.aio, raw bytes; the same commits, messages, hashes and synced files",
        "scales": [result.summary_of_tight() for result in results.values()],
        "flower": "measured once, with another load: 6.5 s a round for a 1 MB model and 2 clients, 15.7 s with 8",
    }
    return conclude("round_latency", bars_of(results), ours=ours, theirs=theirs)


def bars_of(results: dict[int, Measured]) -> list[Bar]:
    """Return the bars of the times, and of their ratios to the tight loop, which the machine moves less."""
    bars = []
    for number, result in results.items():
        if number in LIMITS_MS:
            p50_ms = 1e3 * percentile(result.seconds, 0.5)
            bars.append(Bar.below(f"p50 of an empty round, {number} clients [ms]", p50_ms, LIMITS_MS[number]))
        if number in LIMITS_OF_TIGHT:
            times = statistics.median(result.ratios)
            bars.append(
                Bar.at_most(f"p50 times that of the tight loop, {number} clients", times, LIMITS_OF_TIGHT[number])
            )
    return bars


def _seconds(run: Sequence[RoundRecord]) -> list[float]:
    return [_ended(record) - record.opened_at for record in run]


def _ended(record: RoundRecord) -> float:
    assert record.ended_at is not None
    return record.ended_at


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


if __name__ == "__main__":
    sys.exit(main())
