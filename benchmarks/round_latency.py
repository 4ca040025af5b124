"""How long a round takes when there is nothing to do: 10, 100 and 1,000 connected clients.

    python -m benchmarks.round_latency [--clients N ...] [--rounds N]

The coordinator is the real process with its journal on; the clients are whole agents with a connection each, many to a
process (`crowd`), whose training takes no time. The model has four numbers. A round is timed by its own record, from
its opening to its commit, both on the coordinator's clock; the gap between two rounds is reported beside it, so that
the rounds per second cannot flatter. The first rounds, in which every client fetches its first model, do not count.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.cli.looking import admin
from atoll.protocol.vocabulary import Phase, RunId, RunState
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History
from benchmarks.processes import NotMeasured, Processes, Usage, coordinator_command, toml, wait_for_address
from benchmarks.report import Bar, conclude, percentile, say

COHORTS = {10: 10, 100: 100, 1000: 100}
ROUNDS = {10: 200, 100: 60, 1000: 40}
WARM_UP = 5
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One scale."""

    num_clients: int
    cohort_size: int
    rounds: list[RoundRecord]  # after the warm-up
    before: Usage  # of the coordinator
    after: Usage
    clients_cpu_s: float  # of all client processes together, from the start of the run to its end

    @property
    def seconds(self) -> list[float]:
        """From the opening of each round to its commit."""
        return [_ended(record) - record.opened_at for record in self.rounds]

    def summary(self) -> dict[str, Any]:
        """For the last line."""
        gaps = [later.opened_at - _ended(earlier) for earlier, later in zip(self.rounds, self.rounds[1:], strict=False)]
        whole = _ended(self.rounds[-1]) - self.rounds[0].opened_at
        return {
            "clients": self.num_clients,
            "cohort": self.cohort_size,
            "rounds": len(self.rounds),
            "p50_ms": _ms(percentile(self.seconds, 0.5)),
            "p99_ms": _ms(percentile(self.seconds, 0.99)),
            "max_ms": _ms(max(self.seconds)),
            "gap_p50_ms": _ms(statistics.median(gaps)),
            "rounds_per_s": round(len(self.rounds) / whole, 2),
            "coordinator_cpu_ms_per_round": _ms((self.after.cpu_s - self.before.cpu_s) / (len(self.rounds) + WARM_UP)),
            "clients_cpu_ms_per_round": _ms(self.clients_cpu_s / (len(self.rounds) + WARM_UP)),
            "coordinator_rss_mb_before_the_run": round(self.before.rss_bytes / 1e6, 1),
            "coordinator_rss_mb_max": round(self.after.rss_bytes_max / 1e6, 1),
        }


def measure(num_clients: int, num_rounds: int, folder: Path) -> Measured:
    """Connect the clients, then start a run, and wait for its end."""
    cohort_size, state = COHORTS.get(num_clients, num_clients), folder / "coordinator"
    with Processes(folder) as processes:
        settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0"}
        processes.start("coordinator", coordinator_command(**settings, coordinator__keep_rounds=num_rounds + WARM_UP))
        address = wait_for_address(processes, "coordinator", state)
        connect(processes, address, state, num_clients)
        before, crowds_before = processes.usage("coordinator"), crowds_cpu_s(processes)
        run_id = start_run(state, cohort_size, num_rounds + WARM_UP)
        wait_for_end(processes, state)
        after, crowds_after = processes.usage("coordinator"), crowds_cpu_s(processes)
        records = History(state).rounds(RunId(run_id))
    if bad := [record for record in records if record.phase is not Phase.COMMITTED]:
        raise NotMeasured(f"round {bad[0].round_id} was abandoned: {bad[0].abandon_reason} {bad[0].detail}")
    return Measured(num_clients, cohort_size, records[WARM_UP:], before, after, crowds_after - crowds_before)


def connect(processes: Processes, address: str, state: Path, num_clients: int) -> None:
    """Start the clients in two to four processes; return when all of them are connected."""
    num_crowds = min(4, 2 + num_clients // 500)
    size, begun = num_clients // num_crowds, time.monotonic()
    for number in range(num_crowds):
        count = size if number else num_clients - size * (num_crowds - 1)
        first = 0 if not number else num_clients - size * (num_crowds - number)
        where = [address, str(state), str(processes.folder / "clients"), str(first), str(count)]
        processes.start(f"crowd-{number}", [sys.executable, "-m", "benchmarks.crowd", *where])
    names = [f"crowd-{number}" for number in range(num_crowds)]
    while not all("ready" in processes.log(name).read_text() for name in names):
        for name in names:
            if processes.running[name].poll() is not None or time.monotonic() - begun > LIMIT_S:
                raise NotMeasured(f"{name} does not connect:\n{processes.last_words(name)}")
        time.sleep(0.05)
    say(f"  {num_clients} clients in {num_crowds} processes connected in {time.monotonic() - begun:.1f} s")


def crowds_cpu_s(processes: Processes) -> float:
    """What all client processes have used so far."""
    return sum(processes.usage(name).cpu_s for name in processes.running if name != "coordinator")


def start_run(state: Path, cohort_size: int, num_rounds: int, *, pause: float = 0.0) -> str:
    """As `atoll run start` does."""
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
    """Look rarely: whoever looks takes the processor from those who are looked at."""
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
    arguments = parser.parse_args()
    results: dict[int, Measured] = {}
    for num_clients in arguments.clients:
        say(f"{num_clients} clients")
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            result = measure(num_clients, arguments.rounds or ROUNDS.get(num_clients, 30), Path(folder))
        say("  " + ", ".join(f"{name} {value}" for name, value in result.summary().items()))
        results[num_clients] = result
    p50_ms = {number: 1e3 * percentile(result.seconds, 0.5) for number, result in results.items()}
    bars = [
        Bar.below(f"p50 of an empty round, {number} clients [ms]", p50_ms[number], limit)
        for number, limit in ((10, 50.0), (1000, 1000.0))
        if number in p50_ms
    ]
    ours = {"scales": [result.summary() for result in results.values()], "journal": "on", "model": "four float32"}
    why = "Flower was measured once, with another load: 6.5 s a round for a 1 MB model and 2 clients, 15.7 s with 8"
    return conclude("round_latency", bars, ours=ours, theirs=None, why_not=why)


def _ended(record: RoundRecord) -> float:
    assert record.ended_at is not None
    return record.ended_at


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


if __name__ == "__main__":
    sys.exit(main())
