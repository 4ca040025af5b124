"""The disk, memory and bytes on the line of a coordinator and its sites, for N sites and a model of M bytes.

    python -m benchmarks.sizing [--quick]

Each row is a federation of real processes with TLS, `ROUNDS` rounds of noise, plain updates, and the defaults. A proxy
counts the bytes of every site. The figures stand beside those of the formulas of `docs/sizing.md`:

    a round and a site, on the line     2 M and `LINE_BYTES` at most
    the coordinator's disk              (keep_versions + 2 + N) M, and (N + 1) M of a round that is not cleared away yet
    a site's disk                       2 M of versions, M of the spool
    an agent's memory, a coordinator's  `AGENT_BYTES` + M / 2, `COORDINATOR_BYTES`, whatever N is
"""

import argparse
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from benchmarks.members import equip
from benchmarks.memory_watch import Peaks
from benchmarks.processes import NotMeasured, Processes, agent_command, coordinator_command, wait_for_address
from benchmarks.proxy import Proxy, Way
from benchmarks.report import Bar, conclude, say

TASK = "benchmarks.tasks:noise"
ROUNDS, KEEP, LIMIT_S = 6, 2, 600.0
LINE_BYTES = 200_000
"""Bytes of a round and a site beside the model: handshakes, manifests, heartbeats and frames."""
AGENT_BYTES, COORDINATOR_BYTES, FIXED_BYTES = 150_000_000, 400_000_000, 4_000_000
ROWS = ((2, 4_000_000), (6, 4_000_000), (2, 40_000_000), (4, 100_000_000))
QUICK = ((2, 400_000),)
POLL_S = 0.02


class DiskPeak:
    """The largest size of a folder's files, and of their blocks, while a `with` block lasts [bytes].

    Args:
        folder: with everything below it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.greatest = folder, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "DiskPeak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.greatest = max(self.greatest, size_of(self._folder))


def size_of(folder: Path) -> int:
    """Return the blocks of all files below a folder [bytes]."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:  # removed meanwhile
            continue
    return total


def measured(num_sites: int, num_bytes: int) -> dict[str, Any]:
    """Run a federation to its end, and return what it has taken."""
    environment = {"ATOLL_BENCH_ELEMENTS": str(num_bytes // 4), "ATOLL_BENCH_TRAIN_S": "0.2"}
    sites = [f"s{number}" for number in range(num_sites)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-sizing-")))
        state = folder / "coordinator"
        for site in sites:
            equip(state, folder / site, Identity(Role.CLIENT, site))
        processes = stack.enter_context(Processes(folder))
        settings = {"rounds": ROUNDS, "model__keep_versions": KEEP, "coordinator__listen": "127.0.0.1:0"}
        sizes = {"round__cohort_size": num_sites, "round__quorum": num_sites, "evaluation__server_every": 0}
        processes.start(
            "coordinator", coordinator_command(TASK, coordinator__state=state, **settings, **sizes), environment
        )
        address = wait_for_address(processes, "coordinator", state)
        proxies = {site: stack.enter_context(Proxy(address, on_bytes=lambda *_: None)) for site in sites}
        roots = {"coordinator": processes.running["coordinator"].pid}
        disks = {name: stack.enter_context(DiskPeak(folder / name)) for name in ("coordinator", sites[0])}
        for site in sites:
            where = {"site": site, "state": folder / site, "coordinator": proxies[site].address}
            processes.start(site, agent_command(TASK, **where, exit_when_done=True), environment)
        roots[sites[0]] = processes.running[sites[0]].pid
        with Peaks(roots) as peaks:
            for name in ("coordinator", *sites):
                if (code := processes.running[name].wait(LIMIT_S)) != 0:
                    raise NotMeasured(f"{name} ended with {code}:\n{processes.last_words(name)}")
        line = {way: max(sum(c.num_bytes[way] for c in p.crossings) for p in proxies.values()) for way in Way}
        return {
            "sites": num_sites,
            "model_bytes": num_bytes,
            "rounds": ROUNDS,
            "up_bytes_of_a_round": line[Way.UP] // ROUNDS,
            "down_bytes_of_a_round": line[Way.DOWN] // ROUNDS,
            "coordinator_disk_bytes": disks["coordinator"].greatest,
            "disk_formula": (KEEP + 2 + num_sites) * num_bytes,
            "one_round_more": (num_sites + 1) * num_bytes,
            "coordinator_disk_after": size_of(state),
            "site_disk_bytes": disks[sites[0]].greatest,
            "memory_bytes": peaks.greatest,
        }


def bars_of(row: dict[str, Any]) -> list[Bar]:
    """Return the bars of a row: its figures are at most those of the formulas."""
    name, size = f"{row['sites']} sites, {row['model_bytes'] / 1e6:g} MB", row["model_bytes"]
    line, memory = row["up_bytes_of_a_round"] + row["down_bytes_of_a_round"], row["memory_bytes"]
    disk = row["disk_formula"] + row["one_round_more"] + FIXED_BYTES
    return [
        Bar.at_most(f"{name}: bytes of a round and a site", line, 2 * size * 1.02 + LINE_BYTES),
        Bar.at_most(f"{name}: coordinator's disk", row["coordinator_disk_bytes"], disk),
        Bar.at_most(f"{name}: a site's disk", row["site_disk_bytes"], 3 * size + FIXED_BYTES),
        Bar.at_most(f"{name}: coordinator's memory", memory["atoll coordinator"], COORDINATOR_BYTES),
        Bar.at_most(f"{name}: an agent's memory", memory["atoll agent"], AGENT_BYTES + size / 2),
    ]


def main() -> int:
    """Measure the rows and print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small federation")
    rows = []
    for num_sites, num_bytes in QUICK if parser.parse_args().quick else ROWS:
        rows.append(measured(num_sites, num_bytes))
        say(f"{rows[-1]}")
    bars = [bar for row in rows for bar in bars_of(row)]
    return conclude("sizing", bars, ours={"rows": rows}, theirs=None, why_not="a formula is the other side")


if __name__ == "__main__":
    sys.exit(main())
