"""A million clients in the coordinator's machine and journal; ten thousand histories in which everything goes wrong.

    python -m benchmarks.scale [--clients N] [--histories N] [--pairs N] [--quick]

Part 1: each client is registered through the membership machine into the journal on disk, then rounds with a cohort of
1,000 and no training; after round 10 the process is killed (SIGKILL) and another one recovers the run from its last
snapshot and the entries since, a tenth of the clients comes back, and it continues to round 20. Seconds count from the
start of the first process to the end of the second, their imports included; `cpu_s` is what both had of a processor.

Part 2: seeded histories with the standard faults, each judged by every check, on all processors. An event is one that a
machine decided about: the coordinator's, or an agent's session.

Theirs is the same by hand: `tight_million` writes and reads the same entries with JSON, dicts and `sqlite3`,
`tight_histories` lets as many events happen, replays and compares them. Both sides alternate, the histories in as many
parts as there are pairs. Seconds are the median of the pairs (of the histories: the sum of the parts), a ratio is the
median of those of the pairs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import ROOT, NotMeasured
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.tight_histories import histories as tight_histories
from tests.histories.soak import Tally, soak

COHORT, ROUNDS, KILLED_AFTER = 1_000, 20, 10
CLIENTS, HISTORIES = 1_000_000, 10_000
CLIENTS_QUICK, HISTORIES_QUICK = 20_000, 300
CLIENTS_MIN = 10 * COHORT
PAIRS = 3
OURS, THEIRS = "benchmarks.million", "benchmarks.tight_million"
TIMES_RUN, TIMES_RECOVERY, TIMES_HISTORIES = 4.0, 5.0, 40.0
"""Most seconds of ours, in times of the tight loop's."""


@contextmanager
def process(module: str, folder: Path, clients: int) -> Iterator["subprocess.Popen[str]"]:
    """One process of a side; it does not outlive the block."""
    numbers = map(str, (clients, COHORT, ROUNDS))
    command = [sys.executable, "-m", module, str(folder), *numbers]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def lines_of(child: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    """Yield the lines of a child process as it prints them."""
    assert child.stdout is not None
    for line in child.stdout:
        said = json.loads(line)
        say(f"  {line.strip()}")
        yield said


def million(clients: int, module: str = OURS) -> dict[str, Any]:
    """Measure part 1 by one side."""
    begun = time.perf_counter()
    found: dict[str, Any] = {"clients": clients, "cohort": COHORT, "rounds": ROUNDS}
    heard: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as directory:
        folder = Path(directory) / "state"
        with process(module, folder, clients) as child:
            for said in lines_of(child):
                heard.append(said)
                if said.get("committed") == KILLED_AFTER:
                    break
            child.kill()
        num_first, found["killed_after_s"] = len(heard), round(time.perf_counter() - begun, 3)
        with process(module, folder, clients) as child:
            heard += lines_of(child)
        found["state_bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found["seconds"] = round(time.perf_counter() - begun, 3)
    if not heard or heard[-1].get("ended") != "finished":
        raise NotMeasured(f"the run did not end: {heard[-1:]}")
    [recovered] = [said for said in heard if "recovered" in said]
    memory = [said["peak"] - said["before"] for said in heard if "peak" in said]
    if memory:
        found["bytes_per_client"] = round(max(memory) / clients, 1)
    return {
        **found,
        "cpu_s": round(heard[num_first - 1]["cpu_s"] + heard[-1]["cpu_s"], 1),
        "joined_s": next(said["seconds"] for said in heard if "joined" in said),
        "recovered": recovered["recovered"],
        "recovered_entries": recovered["entries"],
        "recovery_s": round(recovered["seconds"], 3),
    }


@dataclass(slots=True)
class Histories:
    """Part 2: the tally of all histories, and the seconds of each part by either side."""

    tally: Tally = field(default_factory=Tally)
    seconds: list[float] = field(default_factory=list)
    tight_seconds: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """The ratio of ours to theirs, of each part."""
        return [ours / theirs for ours, theirs in zip(self.seconds, self.tight_seconds, strict=True)]


def histories(count: int, pairs: int) -> Histories:
    """Measure part 2."""
    found, jobs = Histories(), len(os.sched_getaffinity(0))
    for part in range(pairs):
        first, end = count * part // pairs, count * (part + 1) // pairs
        begun = time.perf_counter()
        tally = soak(first, end - first, jobs=jobs)
        found.seconds.append(time.perf_counter() - begun)
        counts = list(zip(tally.num_events, tally.num_agent_events, strict=True))
        begun = time.perf_counter()
        num_events = tight_histories(first, counts, jobs)
        found.tight_seconds.append(time.perf_counter() - begun)
        assert num_events == sum(map(sum, counts))
        found.tally.merge(tally)
    say(found.tally.text(sum(found.seconds)))
    for _, text in sorted(found.tally.bad.items())[:3]:
        say(text)
    return found


def millions(clients: int, pairs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure part 1 `pairs` times by each side; the sides take turns in going first."""
    found: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for pair in range(pairs):
        for module in (OURS, THEIRS) if pair % 2 else (THEIRS, OURS):
            say(f"{clients} clients: {module}")
            found[module].append(million(clients, module))
    return found[OURS], found[THEIRS]


def times(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str) -> list[float]:
    """Return the ratio of our seconds to theirs, of each pair."""
    return [one[key] / other[key] for one, other in zip(ours, theirs, strict=True)]


def main() -> int:
    """Run the measurement and print its last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of both sides")
    parser.add_argument("--quick", action="store_true", help="twenty thousand clients, three hundred histories")
    arguments = parser.parse_args()
    clients, count = arguments.clients, arguments.histories
    if clients < CLIENTS_MIN:
        parser.error(f"--clients {clients}: at least {CLIENTS_MIN}, of which a tenth comes back and makes a cohort")
    if not 1 <= arguments.pairs <= count:
        parser.error(f"--pairs {arguments.pairs}: at least one, and no more than histories")
    if arguments.quick:
        clients, count = min(clients, CLIENTS_QUICK), min(count, HISTORIES_QUICK)
    ours, theirs = millions(clients, arguments.pairs)
    say(f"{count} histories")
    found = histories(count, arguments.pairs)
    return conclude(
        "scale",
        [*bars_of_million(ours, theirs), *bars_of_histories(found)],
        ours={"million": ours, "histories": ours_of(found)},
        theirs={
            "what": "by hand: JSON, dicts, heapq and sqlite3; no peer keeps a journal of its clients, or judges faults",
            "million": theirs,
            "histories": {"seconds": spread(found.tight_seconds)},
        },
    )


def bars_of_million(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Bar]:
    """Return the bars on time, memory, recovery, and the number of members after it."""
    seconds, recovery_s = (median(one[key] for one in ours) for key in ("seconds", "recovery_s"))
    times_run, times_recovery = (median(times(ours, theirs, key)) for key in ("seconds", "recovery_s"))
    return [
        Bar.below("registration and 20 rounds, killed and recovered in between [s]", seconds, 60),
        Bar.at_most("the same, times the tight loop", times_run, TIMES_RUN),
        Bar.below("memory for each client [bytes]", max(one["bytes_per_client"] for one in ours), 1000),
        Bar.below("recovery after SIGKILL [s]", recovery_s, 15),
        Bar.at_most("recovery, times the tight loop", times_recovery, TIMES_RECOVERY),
        Bar.exactly("members after the recovery", min(_recovered(ours, "members")), ours[0]["clients"]),
        Bar.at_least("versions after the recovery", min(_recovered(ours, "version")), KILLED_AFTER),
    ]


def _recovered(sides: list[dict[str, Any]], what: str) -> list[int]:
    return [one["recovered"][what] for one in sides]


def bars_of_histories(found: Histories) -> list[Bar]:
    """Time, and that there is something in them."""
    tally, seconds = found.tally, sum(found.seconds)
    events = [a + b for a, b in zip(tally.num_events, tally.num_agent_events, strict=True)]
    return [
        Bar.exactly("bad histories", len(tally.bad), 0),
        Bar.below(f"{tally.num_histories} histories [s]", seconds, 60 * tally.num_histories / HISTORIES),
        Bar.at_most("the histories, times the tight loop", median(found.ratios), TIMES_HISTORIES),
        Bar.at_least("rounds of a history, median", median(tally.num_rounds), 5),
        Bar.at_least("events of a history, median", median(events), 200),
        Bar.at_least("share of histories with a crash of the coordinator", tally.share_crashed, 0.5),
        Bar.at_least("share of rounds that were committed", tally.share_committed, 0.5),
        Bar.exactly("reasons for a refusal that were not seen", len(tally.missing_refusals), 0),
    ]


def ours_of(found: Histories) -> dict[str, Any]:
    """Return the figures beside the bars."""
    tally = found.tally
    of_histories = {"num_events": tally.num_events, "num_agent_events": tally.num_agent_events}
    return {
        "histories_per_s": round(tally.num_histories / sum(found.seconds), 1),
        "times_the_tight_loop": spread(found.ratios, 2),
        **{f"{name}_median": median(numbers) for name, numbers in of_histories.items()},
        "rounds": sum(tally.num_rounds),
        "ends": dict(tally.ends),
        "refusals": dict(tally.refusals),
        "losses": dict(tally.losses),
        "faults": dict(tally.faults),
    }


if __name__ == "__main__":
    sys.exit(main())
