"""A million clients in the coordinator's machine and journal; ten thousand histories in which everything goes wrong.

    python -m benchmarks.scale [--clients N] [--histories N] [--quick]

Part 1: each client is registered through the membership machine into the journal on disk, then rounds with a cohort of
1,000 and no training; after round 10 the process is killed (SIGKILL) and another one recovers the run from its last
snapshot and the entries since, a tenth of the clients comes back, and it goes on to round 20. Seconds count from the
start of the first process to the end of the second, their imports included; `cpu_s` is what both had of a processor.

Part 2: seeded histories with the standard faults, each judged by every check, on all processors. An event is one that a
machine decided about: the coordinator's, or an agent's session.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from atoll.simulations.histories.soak import Tally, soak
from benchmarks.processes import ROOT, NotMeasured
from benchmarks.report import Bar, conclude, say

COHORT, ROUNDS, KILLED_AFTER = 1_000, 20, 10
CLIENTS, HISTORIES = 1_000_000, 10_000
CLIENTS_QUICK, HISTORIES_QUICK = 20_000, 300
CLIENTS_MIN = 10 * COHORT


@contextmanager
def process(folder: Path, clients: int) -> Iterator["subprocess.Popen[str]"]:
    """One process of the coordinator; it does not outlive the block."""
    numbers = map(str, (clients, COHORT, ROUNDS))
    command = [sys.executable, "-m", "benchmarks.million", str(folder), *numbers]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def lines_of(child: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    """What it says, as it says it."""
    assert child.stdout is not None
    for line in child.stdout:
        said = json.loads(line)
        say(f"  {line.strip()}")
        yield said


def million(clients: int) -> dict[str, Any]:
    """Part 1."""
    begun = time.perf_counter()
    found: dict[str, Any] = {"clients": clients, "cohort": COHORT, "rounds": ROUNDS}
    heard: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as directory:
        folder = Path(directory) / "state"
        with process(folder, clients) as child:
            for said in lines_of(child):
                heard.append(said)
                if said.get("committed") == KILLED_AFTER:
                    break
            child.kill()
        num_first, found["killed_after_s"] = len(heard), round(time.perf_counter() - begun, 3)
        with process(folder, clients) as child:
            heard += lines_of(child)
        found["state_bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found["seconds"] = round(time.perf_counter() - begun, 3)
    if not heard or heard[-1].get("ended") != "finished":
        raise NotMeasured(f"the run did not end: {heard[-1:]}")
    [recovered] = [said for said in heard if "recovered" in said]
    return {
        **found,
        "cpu_s": round(heard[num_first - 1]["cpu_s"] + heard[-1]["cpu_s"], 1),
        "joined_s": next(said["seconds"] for said in heard if "joined" in said),
        "recovered": recovered["recovered"],
        "recovered_entries": recovered["entries"],
        "recovery_s": round(recovered["seconds"], 3),
        "bytes_per_client": round(max(said["peak"] - said["before"] for said in heard) / clients, 1),
    }


def histories(count: int) -> tuple[Tally, float]:
    """Part 2."""
    begun = time.perf_counter()
    found = soak(0, count)
    seconds = time.perf_counter() - begun
    say(found.text(seconds))
    for _, text in sorted(found.bad.items())[:3]:
        say(text)
    return found, seconds


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--quick", action="store_true", help="twenty thousand clients, three hundred histories")
    arguments = parser.parse_args()
    clients, count = arguments.clients, arguments.histories
    if clients < CLIENTS_MIN:
        parser.error(f"--clients {clients}: at least {CLIENTS_MIN}, of which a tenth comes back and makes a cohort")
    if arguments.quick:
        clients, count = min(clients, CLIENTS_QUICK), min(count, HISTORIES_QUICK)
    say(f"{clients} clients")
    crowd = million(clients)
    say(f"{count} histories")
    tally, seconds = histories(count)
    return conclude(
        "scale",
        [*bars_of_million(crowd), *bars_of_histories(tally, seconds)],
        ours={"million": crowd, "histories": ours_of(tally, seconds)},
        theirs=None,
        why_not="no peer keeps a journal of its clients, or judges histories with faults",
    )


def bars_of_million(crowd: dict[str, Any]) -> list[Bar]:
    """Time, memory, recovery, and that nobody is forgotten."""
    return [
        Bar.below("registration and 20 rounds, killed and recovered in between [s]", crowd["seconds"], 60),
        Bar.below("memory for each client [bytes]", crowd["bytes_per_client"], 1000),
        Bar.below("recovery after SIGKILL [s]", crowd["recovery_s"], 15),
        Bar.exactly("members after the recovery", crowd["recovered"]["members"], crowd["clients"]),
        Bar.at_least("versions after the recovery", crowd["recovered"]["version"], KILLED_AFTER),
    ]


def bars_of_histories(tally: Tally, seconds: float) -> list[Bar]:
    """Time, and that there is something in them."""
    events = [a + b for a, b in zip(tally.num_events, tally.num_agent_events, strict=True)]
    return [
        Bar.exactly("bad histories", len(tally.bad), 0),
        Bar.below(f"{tally.num_histories} histories [s]", seconds, 60 * tally.num_histories / HISTORIES),
        Bar.at_least("rounds of a history, median", median(tally.num_rounds), 5),
        Bar.at_least("events of a history, median", median(events), 200),
        Bar.at_least("share of histories with a crash of the coordinator", tally.share_crashed, 0.5),
        Bar.at_least("share of rounds that were committed", tally.share_committed, 0.5),
        Bar.exactly("reasons for a refusal that were not seen", len(tally.missing_refusals), 0),
    ]


def ours_of(tally: Tally, seconds: float) -> dict[str, Any]:
    """The figures beside the bars."""
    of_histories = {"num_events": tally.num_events, "num_agent_events": tally.num_agent_events}
    return {
        "histories_per_s": round(tally.num_histories / seconds, 1),
        **{f"{name}_median": median(numbers) for name, numbers in of_histories.items()},
        "rounds": sum(tally.num_rounds),
        "ends": dict(tally.ends),
        "refusals": dict(tally.refusals),
        "losses": dict(tally.losses),
        "faults": dict(tally.faults),
    }


if __name__ == "__main__":
    sys.exit(main())
