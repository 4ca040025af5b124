"""The cost of a dashboard: what five readers take from the rounds of a run, and its memory.

    python -m benchmarks.dashboard [--rounds N] [--turns N] [--clients N]

The coordinator, its journal and the agents of ten clients are those of `round_latency`. In each turn a run is timed
without a dashboard and another with one, beside which five readers do what tabs of five browsers do: each has a stream
of the run's news, and reads the run's page at news, at most four times a second. The order of the two changes from
turn to turn. A turn's ratio is that of the medians of its rounds; the median of the turns counts. The readers run at
the lowest priority, as browsers run on other machines. Then 1,000 clients are connected, and the readers walk through
all pages at each news; the figure is the dashboard's largest resident set.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from atoll.protocol.vocabulary import RunId
from atoll.server.views.history import History
from benchmarks.data_plane import Talker
from benchmarks.pages import Session, crawled, start_dashboard
from benchmarks.processes import Processes, coordinator_command, wait_for_address
from benchmarks.report import Bar, conclude, interval, percentile, say, spread
from benchmarks.round_latency import WARM_UP, connect, start_run, wait_for_end

CLIENTS, COHORT, READERS = 10, 10, 5
ROUNDS, TURNS = 120, 10
MANY_CLIENTS, MANY_COHORT, MANY_ROUNDS = 1_000, 100, 30
RATIO_MAX, MEGABYTES_MAX = 1.02, 150.0
PAGE_S = 0.25
"""Least seconds between two reads of a page by one reader, as in `live.js`."""

SIDES = ("without", "with")


def read(link: str, is_walking: bool) -> None:
    """Read as five browsers do: a line of standard input names the next run, and is answered by pages read so far."""
    os.nice(19)
    session = Session(link)
    print("ready", flush=True)
    count, known = [0], dict[str, list[str]]()

    def one(run: str) -> None:
        line, page = session.stream(run), f"/runs/1/{run}"
        while got := line():
            if got.startswith(b"data: "):
                for address in known[run] if is_walking else [page]:
                    session.read(address)
                    count[0] += 1
                time.sleep(PAGE_S)

    for text in sys.stdin:
        if run := text.strip():
            known[run] = crawled(session.read) if is_walking else []
            for _ in range(READERS):
                threading.Thread(target=one, args=(run,), daemon=True).start()
        print(count[0], flush=True)


def readers(processes: Processes, name: str, link: str, *, is_walking: bool = False) -> Talker:
    """Start the readers of a dashboard."""
    return Talker(processes, name, "benchmarks.dashboard", "--read", link, *(["--walk"] if is_walking else []))


def timed(processes: Processes, state: Path, num_rounds: int, side: str, number: int) -> tuple[list[float], int]:
    """Return the seconds of each round of a run, and how many pages were read meanwhile."""
    name, pages = f"dashboard-{number}", 0
    if side == "with":
        talker = readers(processes, f"readers-{number}", start_dashboard(processes, name, state))
    run = start_run(state, COHORT, num_rounds + WARM_UP)
    if side == "with":
        talker.ask(run)
    wait_for_end(processes, state)
    if side == "with":
        pages = int(talker.ask(""))
        for one in (f"readers-{number}", name):
            processes.running[one].terminate()
            processes.running.pop(one).wait(30)
    records = History(state).rounds(RunId(run))[WARM_UP:]
    return [record.ended_at - record.opened_at for record in records if record.ended_at is not None], pages


def latency(folder: Path, num_rounds: int, turns: int) -> tuple[list[float], dict[str, Any]]:
    """Return the ratio of each turn, and the figures of both sides."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    ratios, pages = list[float](), 0
    with Processes(folder) as processes:
        state = started(processes, CLIENTS, (num_rounds + WARM_UP) * 2 * turns)
        for turn in range(turns):
            found = {}
            for side in SIDES if turn % 2 else SIDES[::-1]:
                times, read_now = timed(processes, state, num_rounds, side, turn)
                found[side], pages = statistics.median(times), pages + read_now
                seconds[side] += times
            ratios.append(found["with"] / found["without"])
            say(f"  turn {turn + 1}: {ratios[-1]:.3f} ({1e3 * found['with']:.1f}, {1e3 * found['without']:.1f} ms)")
    p50 = {f"p50_ms_{side}": round(1e3 * percentile(seconds[side], 0.5), 2) for side in SIDES}
    low, high = interval(ratios)
    return ratios, p50 | {"pages_read": pages, "times": spread(ratios), "interval": [round(low, 3), round(high, 3)]}


def memory(folder: Path, num_clients: int) -> dict[str, Any]:
    """Return the largest memory of a dashboard while a run of many clients is read, and what was read."""
    with Processes(folder) as processes:
        state = started(processes, num_clients, MANY_ROUNDS)
        link = start_dashboard(processes, "dashboard", state)
        talker = readers(processes, "readers", link, is_walking=True)
        run = start_run(state, min(MANY_COHORT, num_clients), MANY_ROUNDS, pause=0.5)
        talker.ask(run)
        wait_for_end(processes, state)
        pages, usage = int(talker.ask("")), processes.usage("dashboard")
    return {"clients": num_clients, "megabytes": round(usage.rss_bytes_max / 1e6, 1), "pages_read": pages}


def started(processes: Processes, num_clients: int, keep_rounds: int) -> Path:
    """Start a coordinator and connect the clients; return its state directory."""
    state = processes.folder / "coordinator"
    settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0"}
    processes.start("coordinator", coordinator_command(**settings, coordinator__keep_rounds=keep_rounds))
    connect(processes, wait_for_address(processes, "coordinator", state), state, num_clients)
    return state


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds of each run")
    parser.add_argument("--turns", type=int, default=TURNS, help="in which both sides alternate")
    parser.add_argument("--clients", type=int, default=MANY_CLIENTS, help="connected while memory is measured")
    parser.add_argument("--read", metavar="LINK", help=argparse.SUPPRESS)
    parser.add_argument("--walk", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read, arguments.walk)
        return 0
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        ratios, rounds = latency(Path(folder), arguments.rounds, arguments.turns)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        large = memory(Path(folder), arguments.clients)
    say(f"  {large['megabytes']} MB with {arguments.clients} clients")
    bars = [
        Bar.at_most(
            "p50 of a round with a dashboard and five readers, times without", statistics.median(ratios), RATIO_MAX
        ),
        Bar.at_most(f"memory of a dashboard, {arguments.clients} clients [MB]", large["megabytes"], MEGABYTES_MAX),
    ]
    return conclude("dashboard", bars, ours={"rounds": rounds, "memory": large}, theirs={"what": "no dashboard"})


if __name__ == "__main__":
    sys.exit(main())
