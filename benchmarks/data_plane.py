"""The rates of downloads and uploads, against the tightest loop by hand with the same duties.

    python -m benchmarks.data_plane [--mb 100 1000] [--turns N] [--crowds 4 16] [--again N] [--folder DIR] [--quick]

Ours is a real coordinator and the agent's own code in another process (`transfers`): mutual TLS, resumable, with
back-pressure. An upload ends with the verdict, when the SHA-256 of every piece is checked, every number is inspected,
and bytes and journal are on disk. Theirs is `tight_wire`: mutual TLS, SHA-256 by the receiver, write, and fdatasync of
an upload. Both sides alternate in one run, each side first once in a turn, and memory is touched before each transfer
(`touch`). A turn's ratio is that of the seconds of its two transfers; the median of the turns counts. The tight loop
has the best chunk size of a printed sweep. Reported beside them is the tight loop without duties. `--again` adds
repeated downloads of one version, many in a short time, to compare two states of the code. At last, crowds of clients
upload 1 GB each at once (from one file, each under its own name), for the peak memory of the coordinator.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from atoll.protocol.wire.channel import CHUNK_BYTES
from benchmarks.processes import ROOT, NotMeasured, Processes, Usage, coordinator_command, wait_for_address
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.tight_wire import make_credentials

MB = 1_000_000
BAR_DOWN, BAR_UP = 0.85, 0.80
BAR_MEMORY_MB, BAR_GROWTH = 1000.0, 1.10
CHUNKS_KIB = (256, 512, 1024, 2048)
WAYS = ("down", "up")


class Talker:
    """A child process that takes commands and answers, one line each."""

    def __init__(self, processes: Processes, name: str, module: str, *arguments: object) -> None:
        self._processes, self._name = processes, name
        with processes.log(name).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        processes.running[name] = self._process  # type: ignore[assignment]  # it ends like the others
        self.first_line = self.line()

    def line(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise NotMeasured(f"{self._name} has ended:\n{self._processes.last_words(self._name)}")
        return line.strip()

    def ask(self, what: str) -> str:
        """Send a command, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.line()

    @property
    def usage(self) -> Usage:
        """Return the resources that it has used so far."""
        return Usage.of(self._process.pid)

    def close(self) -> None:
        """Close its input, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass
class Side:
    """The cost of one side: seconds of each transfer, and processor seconds of sender and receiver together."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def add(self, way: str, seconds: float, cpu_s: float) -> None:
        """Add one transfer."""
        self.seconds[way].append(seconds)
        self.cpu_s[way].append(cpu_s)

    def summary(self, size: int) -> dict[str, Any]:
        """Return the rates, and the processor seconds of a gigabyte."""
        return {
            way: {
                "mb_per_s": spread([size / 1e6 / taken for taken in self.seconds[way]], 1),
                "cpu_s_per_gb": round(median(self.cpu_s[way]) / size * 1e9, 2),
                "count": len(self.seconds[way]),
            }
            for way in WAYS
            if self.seconds[way]
        }


class Tight:
    """Both ends of the tight loop."""

    def __init__(self, processes: Processes, name: str, source: Path, size: int, chunk_kib: int) -> None:
        folder = processes.folder
        place = (folder, folder, chunk_kib)
        self._server = Talker(processes, f"{name}-serve", "benchmarks.tight_wire", "serve", *place)
        self._client = Talker(
            processes, f"{name}-drive", "benchmarks.tight_wire", "drive", *place, self._server.first_line, source, size
        )

    def transfer(self, side: Side, way: str, kind: str = "duties") -> None:
        """Run one transfer, and add it to the side."""
        before = self._server.usage.cpu_s + self._client.usage.cpu_s
        seconds = float(self._client.ask(f"{way} {kind}"))
        side.add(way, seconds, self._server.usage.cpu_s + self._client.usage.cpu_s - before)

    def close(self) -> None:
        """End both processes."""
        self._client.close()
        self._server.close()


class Ours:
    """A coordinator with one run, and several clients in one process."""

    def __init__(self, processes: Processes, name: str, size: int, num_clients: int, rounds: int) -> None:
        self._processes, self._name = processes, name
        folder = processes.folder / name
        folder.mkdir()
        state = folder / "state"
        command = coordinator_command(
            "benchmarks.tasks:noise",
            name="transfer",
            rounds=rounds,
            evaluation__server_every=0,
            round__cohort_size=num_clients,
            round__min_available=num_clients,
            round__deadline=3600.0,
            coordinator__listen="127.0.0.1:0",
            coordinator__admin="127.0.0.1:0",
            coordinator__state=state,
            coordinator__keep_versions=1,
        )
        processes.start(name, command, {"ATOLL_BENCH_ELEMENTS": str(size // 4)})
        address = wait_for_address(processes, name, state)
        self._clients = Talker(
            processes, f"{name}-clients", "benchmarks.transfers", address, state, folder, num_clients
        )

    def invited(self) -> None:
        """Wait until all clients are invited to the next round."""
        self._clients.ask("invited")

    def transfer(self, side: Side, way: str) -> None:
        """Run one transfer of all clients at once."""
        before = self.usage.cpu_s + self._clients.usage.cpu_s
        seconds = json.loads(self._clients.ask(way))["all"]
        side.add(way, seconds, self.usage.cpu_s + self._clients.usage.cpu_s - before)

    def upload(self, num_parts: int) -> float:
        """Upload in parts, 0: as a whole, and return the seconds."""
        seconds: float = json.loads(self._clients.ask(f"up {num_parts}"))["all"]
        return seconds

    @property
    def usage(self) -> Usage:
        """Return the resources that the coordinator has used."""
        return self._processes.usage(self._name)

    def close(self) -> None:
        """End both processes."""
        self._clients.close()
        self._processes.stop(self._name, 60)


def sweep(processes: Processes, source: Path, size: int, chunks_kib: Sequence[int]) -> tuple[int, dict[int, float]]:
    """Return the best chunk size of the tight loop, and the seconds of up and down with duties for each size."""
    found = {}
    for chunk_kib in chunks_kib:
        side, tight = Side(), Tight(processes, f"sweep{chunk_kib}", source, size, chunk_kib)
        for _ in range(3):
            for way in WAYS:
                touch(processes.folder, size, chunk_kib)
                tight.transfer(side, way)
        tight.close()
        found[chunk_kib] = sum(min(side.seconds[way]) for way in WAYS)
        say(f"tight loop, chunks of {chunk_kib} KiB: {found[chunk_kib]:.2f} s for {size / 1e6:g} MB up and down")
    return min(found, key=lambda kib: found[kib]), found


def compare(processes: Processes, source: Path, size: int, turns: int, chunk_kib: int) -> dict[str, Side]:
    """Run both sides in turns, and the tight loop without duties."""
    sides = {name: Side() for name in ("ours", "tight", "raw")}
    name = f"mb{size // MB}"
    with ExitStack() as stack:
        ours = Ours(processes, name, size, 1, rounds=2 * turns + 2)
        stack.callback(ours.close)
        tight = Tight(processes, f"{name}-tight", source, size, chunk_kib)
        stack.callback(tight.close)
        for number in range(2 * turns + 1):
            into = sides if number else {key: Side() for key in sides}  # the first turn warms up
            ours.invited()  # the previous round is committed by then
            time.sleep(0.2)
            for way in WAYS:
                for who in ("ours", "tight") if number % 2 else ("tight", "ours"):
                    touch(processes.folder, size, chunk_kib)
                    if who == "ours":
                        ours.transfer(into["ours"], way)
                        settle(processes, name)
                    else:
                        tight.transfer(into["tight"], way)
                tight.transfer(into["raw"], way, "raw")
            if number and number % 2 == 0:
                turn = ", ".join(f"{way} {ratios(sides, way)[-1]:.2f}" for way in WAYS)
                say(f"{size / 1e6:g} MB, turn {number // 2}: of the tight loop's rate {turn}")
    return sides


def again(processes: Processes, source: Path, size: int, pairs: int, chunk_kib: int) -> dict[str, Side]:
    """Run downloads of one version on both sides in turns; the files of earlier downloads are deleted in between."""
    sides, name = {name: Side() for name in ("ours", "tight")}, f"again{size // MB}"
    with ExitStack() as stack:
        ours = Ours(processes, name, size, 1, rounds=2)
        stack.callback(ours.close)
        tight = Tight(processes, f"{name}-tight", source, size, chunk_kib)
        stack.callback(tight.close)
        ours.invited()
        for number in range(pairs + 2):
            into = sides if number > 1 else {key: Side() for key in sides}  # the first pair warms up
            for who in ("ours", "tight") if number % 2 else ("tight", "ours"):
                for old in (processes.folder / name).rglob("models/*.safetensors"):
                    old.unlink()
                touch(processes.folder, size, chunk_kib)
                (ours if who == "ours" else tight).transfer(into[who], "down")
                time.sleep(0.15)
    rates = {who: size / 1e6 / median(side.seconds["down"]) for who, side in sides.items()}
    say(f"{size / 1e6:g} MB, {pairs} pairs: {rates['ours']:.0f} of {rates['tight']:.0f} MB/s, {_of_pairs(sides):.2f}")
    return sides


def _of_pairs(sides: dict[str, Side]) -> float:
    return median(t / o for t, o in zip(sides["tight"].seconds["down"], sides["ours"].seconds["down"], strict=True))


def settle(processes: Processes, name: str) -> None:
    """Wait until the coordinator is idle, so that its work after a verdict does not slow down the other side."""
    until, last = time.monotonic() + 120, -1.0
    while time.monotonic() < until and (used := processes.usage(name).cpu_s) > last + 0.02:
        last = used
        time.sleep(0.25)


def crowd(processes: Processes, num_clients: int, size: int) -> tuple[float, float]:
    """Return the coordinator's peak memory [MB] while all clients upload at once, and their total rate [MB/s]."""
    side, ours = Side(), Ours(processes, f"crowd{num_clients}", size, num_clients, rounds=2)
    ours.invited()
    ours.transfer(side, "up")
    ours.invited()  # the round is committed: all updates have been folded
    usage = ours.usage
    ours.close()
    rate = num_clients * size / 1e6 / side.seconds["up"][0]
    say(
        f"{num_clients} clients x {size / 1e6:g} MB: VmHWM {usage.rss_bytes_max / 1e6:.0f} MB, {rate:.0f} MB/s together"
    )
    return usage.rss_bytes_max / 1e6, rate


def ratios(sides: dict[str, Side], way: str) -> list[float]:
    """Return the tight loop's seconds over ours, for each turn."""
    theirs, ours = sides["tight"].seconds[way], sides["ours"].seconds[way]
    return [sum(theirs[first : first + 2]) / sum(ours[first : first + 2]) for first in range(0, len(ours), 2)]


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_plane", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="sizes of a transfer [MB]")
    parser.add_argument("--turns", type=int, default=8, help="number of turns, of two transfers each")
    parser.add_argument("--crowds", type=int, nargs="*", default=[4, 16], help="numbers of clients that upload at once")
    parser.add_argument("--crowd-mb", type=int, default=1000, help="size of each of their updates [MB]")
    parser.add_argument("--again", type=int, default=0, help="pairs of downloads of one version of the first size")
    parser.add_argument("--folder", type=Path, help="folder of all files; by default a temporary one")
    parser.add_argument("--quick", action="store_true", help="8 MB, one turn, 2 clients: a check that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.mb, arguments.turns, arguments.crowds, arguments.crowd_mb, arguments.again = [8], 1, [2], 8, 2
    results, memory, repeated = {}, {}, dict[str, Side]()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", dir=arguments.folder) as place:
        with Processes(Path(place)) as processes:
            source = _prepare(Path(place), max(arguments.mb))
            chunk_kib, swept = sweep(
                processes, source, min(arguments.mb) * MB, CHUNKS_KIB[2:3] if arguments.quick else CHUNKS_KIB
            )
            for mb in arguments.mb:
                results[mb] = compare(processes, source, mb * MB, arguments.turns, chunk_kib)
            if arguments.again:
                repeated = again(processes, source, arguments.mb[0] * MB, arguments.again, chunk_kib)
        for num_clients in arguments.crowds:
            with tempfile.TemporaryDirectory(dir=place) as inner, Processes(Path(inner)) as processes:
                memory[num_clients] = crowd(processes, num_clients, arguments.crowd_mb * MB)
    tight = {"chunk_kib": chunk_kib, "sweep_s": swept, "how": "grpcio, blocking, mTLS, SHA-256, write, fdatasync"}
    return conclude(
        "data_plane",
        [*_speed(results), *_memory(memory, arguments.crowd_mb)],
        ours={
            "how": "atoll coordinator and the agent's own code; SHA-256 of each piece, numbers inspected, journal",
            **{f"{mb} MB": sides["ours"].summary(mb * MB) for mb, sides in results.items()},
            "again": round(_of_pairs(repeated), 2) if repeated else None,
            "crowds": {n: {"vm_hwm_mb": round(mb), "mb_per_s": round(rate)} for n, (mb, rate) in memory.items()},
        },
        theirs={
            **tight,
            **{f"{mb} MB": sides["tight"].summary(mb * MB) for mb, sides in results.items()},
            "without_duties": {f"{mb} MB": sides["raw"].summary(mb * MB) for mb, sides in results.items()},
        },
    )


def touch(folder: Path, size: int, chunk_kib: int) -> None:
    """Write and delete the bytes of both sides, in pieces of the sizes that they write.

    A hypervisor reclaims memory that was free for some seconds, and returns it at the first touch: a gigabyte that is
    written to a file in 0.19 s then takes up to 2.7 s. A side that is measured after a pause would pay for that, and
    the next one would not. Touching anonymous memory does not help, nor does a file in pieces of another size: each
    size of a write gets pages of its size, from a separate list, and only the large pages are reclaimed.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for piece in (chunk_kib << 10, CHUNK_BYTES):
            for _ in range(0, size, piece):
                file.write(bytes(piece))


def _prepare(folder: Path, mb: int) -> Path:
    make_credentials(folder)
    source = folder / "source.bin"
    with source.open("wb") as file, open("/dev/urandom", "rb") as random:
        for _ in range(mb):
            file.write(random.read(MB))
    return source


def _speed(results: dict[int, dict[str, Side]]) -> Sequence[Bar]:
    words, least = {"down": "download", "up": "durable upload"}, {"down": BAR_DOWN, "up": BAR_UP}
    return [
        Bar.at_least(f"{words[way]}, {mb} MB: rate over the tight loop's", median(ratios(sides, way)), least[way])
        for mb, sides in results.items()
        for way in WAYS
    ]


def _memory(memory: dict[int, tuple[float, float]], mb: int) -> Sequence[Bar]:
    if not memory:
        return []
    few, many = min(memory), max(memory)
    return [
        Bar.below(f"coordinator VmHWM, {many} clients x {mb} MB [MB]", memory[many][0], BAR_MEMORY_MB),
        Bar.at_most(f"the same over that of {few} clients", memory[many][0] / memory[few][0], BAR_GROWTH),
    ]


if __name__ == "__main__":
    sys.exit(main())
