"""The rate of the audit log, chained, signed and on disk, and its cost for the thread that records events.

    python -m benchmarks.audit_log [--events N] [--pairs N]

Ours: events are recorded as the coordinator records them, until a checkpoint that is on disk has signed the last one.
Theirs, in turns: the same events as plain JSON lines through `logging` into a file, with one fsync at the end, neither
chained nor signed. A round records three events, and one for each client that comes or goes; so the cost of one event
for the recording thread is reported, too, and the rate of `atoll audit verify`.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller
from atoll.server.audit.reading import Source, verify
from benchmarks.report import Bar, conclude, say, spread

EVENTS, PAIRS = 20_000, 7
CALLER = Caller("north", "client")
DIGESTS = {"model": "ab" * 32, "updates": "cd" * 32}


def ours(folder: Path, num_events: int) -> tuple[float, float]:
    """Return the seconds until all events are signed and on disk, and those that the recording thread spent."""
    with AuditLog(folder, time.time) as log:
        begun = time.perf_counter()
        for number in range(num_events):
            what = f"digits-1 round {number}"
            log.record(Action.ROUND_COMMIT, what, "version 1 of 8 updates", DIGESTS, caller=CALLER)
        recorded = time.perf_counter()
        log.flush()
        return time.perf_counter() - begun, recorded - begun


def plain(path: Path, num_events: int) -> float:
    """Return the seconds of the same texts through `logging`, with an fsync at the end."""
    handler, logger = logging.FileHandler(path), logging.Logger("plain")
    logger.addHandler(handler)
    begun = time.perf_counter()
    for number in range(num_events):
        event = {"time": time.time(), "actor": CALLER.name, "role": CALLER.role, "action": Action.ROUND_COMMIT}
        event |= {"object": f"digits-1 round {number}", "outcome": "version 1 of 8 updates", "digests": DIGESTS}
        logger.info(json.dumps(event))
    handler.flush()
    os.fsync(handler.stream.fileno())
    took = time.perf_counter() - begun
    handler.close()
    return took


def main() -> int:
    """Measure both in turns, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.audit_log", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--events", type=int, default=EVENTS, help="events in each measurement")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="measurements of each side")
    arguments = parser.parse_args()
    count, rates, theirs, said_us, read = arguments.events, [], [], [], []
    faults = 0
    for pair in range(arguments.pairs):
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
            folder = Path(name)
            took, of_caller = ours(folder / "audit", count)
            rates.append(count / took)
            said_us.append(1e6 * of_caller / count)
            theirs.append(count / plain(folder / "plain.jsonl", count))
            begun = time.perf_counter()
            found = verify(Source.of_state(folder))
            read.append(found.newest.seq / (time.perf_counter() - begun) if found.newest is not None else 0.0)
            faults += found.num_faults + abs(found.events - count)
        say(f"  {pair + 1}: {rates[-1]:.0f} events/s, plain {theirs[-1]:.0f}, verified {read[-1]:.0f} lines/s")
    bars = [
        Bar.at_least("events chained, signed and on disk [1/s]", median(rates), 10_000),
        Bar.exactly("events lost or faulty", faults, 0),
    ]
    ours_ = {
        "events_per_s": spread(rates, 0),
        "caller_us_per_event": spread(said_us, 2),
        "verified_lines_per_s": spread(read, 0),
        "events": count,
        "checkpoint": "Ed25519, every 256 events, fdatasync",
    }
    theirs_ = {"events_per_s": spread(theirs, 0), "what": "logging.FileHandler, JSON lines, one fsync, no chain"}
    return conclude("audit_log", bars, ours=ours_, theirs=theirs_)


if __name__ == "__main__":
    sys.exit(main())
