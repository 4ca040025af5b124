"""The cost of attacks for honest clients and for the coordinator, one attack at a time beside ten working clients.

    python -m benchmarks.hostile [--quick] [--seconds N] [--windows N] [--kinds KIND ...]

Ten whole agents take part in round after round, with a short pause between rounds. Windows without and with an attack
alternate, so that both see the same machine. The figure of a window is the p99 of its rounds, from the opening of each
to its commit on the coordinator's clock; an attack's ratio is that of the medians of its windows. Attackers
(`attackers`) write HTTP/2 by hand at the lowest priority, as outside of a test they would have their own processors.
All connections use mutual TLS; the attacker is a malicious member with its own certificate. Memory is the coordinator's
largest resident set relative to that before the first attack. Lost is a round that was abandoned, or an accepted update
that is in no model.
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

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import Fate, Phase, RunId
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History
from benchmarks.attackers import KINDS
from benchmarks.members import equip
from benchmarks.processes import NotMeasured, Processes, coordinator_command, wait_for_address
from benchmarks.report import Bar, conclude, percentile, say
from benchmarks.round_latency import connect, start_run

CLIENTS = 10
PAUSE_S = 0.05
QUICK_S = 1.0
"""Seconds of a window with `--quick`."""
WARM_UP_S = 3.0
SETTLE_S = 1.0
"""Seconds between an attack and the next window, so that the work an attack leaves is not in the baseline."""
MEMORY_BYTES = 256 * 2**20
RATIO = 2.0
ALL = (*KINDS, "half_open")


@dataclass
class Windows:
    """The begin and end of the windows, on the clock of the records, and the attackers' counts."""

    quiet: list[tuple[float, float]] = field(default_factory=list)
    attacked: list[tuple[float, float]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    cpu_quiet: list[float] = field(default_factory=list)
    """The share of one processor that the coordinator used in each quiet window."""
    cpu_attacked: list[float] = field(default_factory=list)


def attack(processes: Processes, kind: str, address: str, seconds: float, credential: Path) -> dict[str, int]:
    """Run one window of an attack, and return the attacker's counts."""
    where = [kind, address, str(seconds), str(credential)]
    command = [sys.executable, "-m", "benchmarks.attackers", *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise NotMeasured(f"{kind}: {done.stderr[-2000:]}")
    processes.usage("coordinator")  # fails if it has ended
    seen: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return seen


def measure(kinds: Sequence[str], seconds: float, num_windows: int, folder: Path) -> dict[str, Any]:
    """Run all attacks on one coordinator."""
    state = folder / "coordinator"
    with Processes(folder) as processes:
        settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0"}
        processes.start("coordinator", coordinator_command(**settings, coordinator__keep_rounds=1_000_000))
        address = wait_for_address(processes, "coordinator", state)
        connect(processes, address, state, CLIENTS)
        mallory = equip(state, folder / "mallory", Identity(Role.CLIENT, "mallory"))
        run_id = start_run(state, CLIENTS, 10_000_000, pause=PAUSE_S)
        time.sleep(min(WARM_UP_S, seconds))
        before = processes.usage("coordinator")
        windows = {kind: Windows() for kind in kinds}
        for kind in kinds:
            for _ in range(num_windows):
                one_pair(processes, kind, windows[kind], address, seconds, mallory)
        time.sleep(SETTLE_S)
        after = processes.usage("coordinator")
        for name in processes.running:
            if processes.running[name].poll() is not None:
                raise NotMeasured(f"{name} has ended:\n{processes.last_words(name)}")
        processes.stop("coordinator")
        records = History(state).rounds(RunId(run_id))
        log_bytes = processes.log("coordinator").stat().st_size
    return {
        "attacks": {kind: summary(records, windows[kind]) for kind in kinds},
        "rounds": len(records),
        "lost": lost(records),
        "memory_mb_before": round(before.rss_bytes / 1e6, 1),
        "memory_mb_max": round(after.rss_bytes_max / 1e6, 1),
        "grown_bytes": after.rss_bytes_max - before.rss_bytes,
        "incoming_bytes": sum(path.stat().st_size for path in state.glob("runs/*/incoming/*")),
        "log_bytes": log_bytes,
    }


def one_pair(processes: Processes, kind: str, windows: Windows, address: str, seconds: float, mallory: Path) -> None:
    """Run a window without the attack and one with it."""
    begun, used = time.time(), processes.usage("coordinator").cpu_s
    time.sleep(seconds)
    ended, now_used = time.time(), processes.usage("coordinator").cpu_s
    windows.quiet.append((begun, ended))
    windows.cpu_quiet.append((now_used - used) / (ended - begun))
    begun, used = ended, now_used
    seen = attack(processes, kind, address, seconds, mallory)
    ended, now_used = time.time(), processes.usage("coordinator").cpu_s
    windows.attacked.append((begun, ended))
    windows.cpu_attacked.append((now_used - used) / (ended - begun))
    for name, count in seen.items():
        windows.seen[name] = windows.seen.get(name, 0) + count
    time.sleep(SETTLE_S)


def summary(records: Sequence[RoundRecord], windows: Windows) -> dict[str, Any]:
    """Return the figures of one attack."""
    quiet, attacked = ([p99_ms(records, window) for window in w] for w in (windows.quiet, windows.attacked))
    return {
        "p99_ms_quiet": [round(value, 1) for value in quiet],
        "p99_ms_attacked": [round(value, 1) for value in attacked],
        "ratio": median(attacked) / median(quiet),
        "coordinator_cpu_quiet": round(median(windows.cpu_quiet), 3),
        "coordinator_cpu_attacked": round(median(windows.cpu_attacked), 3),
        "attacker": windows.seen,
    }


def p99_ms(records: Sequence[RoundRecord], window: tuple[float, float]) -> float:
    """Return the p99 of the rounds that ended in a window [ms]; without one, of the rounds that were open in it."""
    begin, end = window
    took = [(r.ended_at, 1e3 * (r.ended_at - r.opened_at)) for r in records if r.ended_at and r.ended_at >= begin]
    within = [ms for ended_at, ms in took if ended_at < end] or [ms for _, ms in sorted(took)[:1]]
    if not within:
        raise NotMeasured(f"no round ended in {end - begin:.1f} s")
    return percentile(within, 0.99)


def lost(records: Sequence[RoundRecord]) -> int:
    """Return the number of abandoned rounds and of accepted updates in no model; the open round does not count."""
    ended = [record for record in records if record.ended_at is not None]
    abandoned = sum(record.phase is not Phase.COMMITTED for record in ended)
    reported = (client for record in ended for _, client in record.with_fate(Fate.REPORTED))
    return abandoned + sum(client.used_in is None for client in reported)


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short window of each attack: a check that it works")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each window")
    parser.add_argument("--windows", type=int, default=5, help="number of windows with and without each attack")
    parser.add_argument("--kinds", nargs="+", choices=ALL, default=list(ALL), help="attacks to run")
    arguments = parser.parse_args()
    seconds, num_windows = (QUICK_S, 1) if arguments.quick else (arguments.seconds, arguments.windows)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        ours = measure(arguments.kinds, seconds, num_windows, Path(folder))
    for kind, found in ours["attacks"].items():
        say(f"  {kind}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    bars = [
        Bar.below("coordinator memory grows by [MiB]", ours["grown_bytes"] / 2**20, MEMORY_BYTES / 2**20),
        Bar.exactly("rounds and updates lost", ours["lost"], 0),
        Bar.exactly("bytes stored of hostile uploads", ours["incoming_bytes"], 0),
        *(
            Bar.at_most(f"p99 of a round, {kind}: times without", a["ratio"], RATIO)
            for kind, a in ours["attacks"].items()
        ),
    ]
    return conclude("hostile", bars, ours=ours, theirs=None, why_not="no peer limits the resources of one client")


if __name__ == "__main__":
    sys.exit(main())
