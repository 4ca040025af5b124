"""The time of a scrape of a coordinator's metrics, with its runs and clients in memory.

    python -m benchmarks.scrape [--clients N] [--runs N] [--scrapes N]

A real coordinator hosts the runs, each with all clients as members and two ended rounds; a thread scrapes its endpoint
over HTTP as Prometheus does. The figure is the median time from the request to the last byte; beside it, that of the
event loop for one reading, for which rounds wait.
"""

import argparse
import asyncio
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

from atoll.cli.serving.metrics import serve_coordinator
from atoll.protocol.vocabulary import ClientId, Fate, Phase, RoundId, RunId, Version
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.journal.rows import Batch, RecordRow
from atoll.server.members.member import Profile
from atoll.server.ports import Ports
from atoll.server.process import host
from atoll.server.rounds.events import ClientJoined
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.telemetry.coordinator import CoordinatorReadings
from atoll.telemetry.instruments import Process
from atoll.telemetry.start import Telemetry
from benchmarks.report import Bar, conclude, say, spread

CLIENTS, RUNS, SCRAPES = 1_000, 20, 40
TASK = str(Path(__file__).parents[1] / "tests" / "wire" / "tasks" / "four_numbers_task.py") + ":task"
LIMIT_MS = 20.0


def scraped(address: str) -> tuple[float, int]:
    """Return the milliseconds of one scrape, and its bytes."""
    begun = time.perf_counter()
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        size = len(answer.read())
    return 1e3 * (time.perf_counter() - begun), size


async def fill(coordinator: Coordinator, num_runs: int, num_clients: int) -> None:
    """Add the runs, and all clients to each."""
    for number in range(num_runs):
        run_id = await coordinator.add_run(RunConfig(task=TASK, name=f"run-{number}", rounds=1000))
        run = coordinator.runs[run_id]
        assert isinstance(run, RunDriver)
        for client in range(num_clients):
            joined = run.post(ClientJoined(ClientId(f"site-{client:05}"), "session", Profile(10)))
        await joined
        for listener in coordinator.on_commit:
            listener(Batch(records=[ended_round(run_id, number) for number in (1, 2)]), 0.001)


def ended_round(run_id: RunId, number: int) -> RecordRow:
    """Return the record of a round with a client of each fate, as a group commit has it."""
    clients = {ClientId(f"site-{fate}"): ClientRecord(0.0, fate, 1.0) for fate in Fate}
    record = RoundRecord(RoundId(number), Version(number - 1), 0.0, 8, 8, 8, phase=Phase.COMMITTED, clients=clients)
    record.closed_at, record.ended_at, record.version = 5.0, 6.0, Version(number)
    return RecordRow(run_id, "", record)


async def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[float], list[float], int]:
    """Return the milliseconds of each scrape and of each reading on the event loop, and the bytes of a scrape."""
    config = CoordinatorConfig(state=folder / "state", insecure=True, listen="127.0.0.1:0", max_runs=arguments.runs)
    started: asyncio.Future[tuple[Coordinator, Ports]] = asyncio.get_running_loop().create_future()
    hosting = asyncio.ensure_future(
        host(config, stay=True, on_ready=lambda coordinator, ports: started.set_result((coordinator, ports)))
    )
    coordinator, ports = await started
    with Telemetry(Process.COORDINATOR, "127.0.0.1:0") as telemetry:
        serve_coordinator(telemetry, coordinator, ports)
        await fill(coordinator, arguments.runs, arguments.clients)
        say(f"  {arguments.runs} runs with {arguments.clients} clients each")
        times, size = [], 0
        for _ in range(arguments.scrapes):
            took, size = await asyncio.to_thread(scraped, telemetry.address)
            times.append(took)
        readings, of_loop = CoordinatorReadings(coordinator, ports), []
        for _ in range(arguments.scrapes):
            begun = time.perf_counter()
            readings.read()
            of_loop.append(1e3 * (time.perf_counter() - begun))
    hosting.cancel()
    await asyncio.wait({hosting})
    return times, of_loop, size


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scrape", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS, help="members of each run")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of the coordinator")
    parser.add_argument("--scrapes", type=int, default=SCRAPES, help="scrapes that are measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        times, of_loop, size = asyncio.run(measure(arguments, Path(name)))
    num_bytes = f"{size // 1000} kB"
    say(f"  scrape {median(times):.1f} ms, of which {median(of_loop):.2f} ms on the event loop; {num_bytes}")
    bars = [Bar.at_most("median time of a scrape [ms]", median(times), LIMIT_MS)]
    return conclude(
        "scrape", bars, ours={"scrape_ms": spread(times, 2), "loop_ms": spread(of_loop, 3), "bytes": size}, theirs={}
    )


if __name__ == "__main__":
    raise SystemExit(main())
