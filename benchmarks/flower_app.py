"""One unmodified Flower app on both sides: seconds of a round, memory and bytes, natively, hosted and by Flower.

    python -m benchmarks.flower_app [--shapes 2x0.02 2x100] [--rounds N] [--passes N] [--quick]

The app is `fedavg_flower_app`: N clients x M MB in ten float32 tensors, FedAvg, an `evaluate_fn`, no training. Ours:
`atoll coordinator DIR` and `atoll agent DIR` for each client, with mutual TLS, a journal, every reply durable before
it is acknowledged; natively, and hosted by Flower's own strategy over our grid. Theirs: a SuperLink in memory and
SuperNodes as processes, without TLS, of the same flwr. The sides take turns. A round is the time between two calls of
`evaluate_fn`; the first one of a pass, in which processes start, does not count. Memory is the sum over the kinds of
processes of a side (server; one client) of the largest VmHWM. Bytes are those that pass a proxy in front of the server
in a pass of their own, in both directions, of a client and a round.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import RunState
from atoll.server.views.history import History
from benchmarks.flower_peer import NUM_TENSORS, QUIET, Flower, app_folder
from benchmarks.members import equip
from benchmarks.memory_watch import Peaks
from benchmarks.processes import NotMeasured, Processes, agent_command, coordinator_command, wait_for_address
from benchmarks.proxy import Proxy
from benchmarks.report import Bar, conclude, say, spread

MODULE = "fedavg_flower_app"
WAYS = ("native", "hosted")
THEIRS = "flower"
FASTER = {True: 50.0, False: 5.0}
"""Times Flower's rounds, of a model below 1 MB, and of a larger one."""

PROGRAMS = Path(sys.executable).parent
LIMIT_S = 1800.0


@dataclass
class Side:
    """The figures of one way to run the app."""

    seconds: list[float] = field(default_factory=list)
    server: dict[str, int] = field(default_factory=dict)
    """The peak memory of the server's processes by their kind [bytes]."""
    client: dict[str, int] = field(default_factory=dict)
    num_bytes: float = 0.0
    """Bytes of a client and a round."""

    def add(self, rows: list[dict[str, float]], server: Mapping[str, int], client: Mapping[str, int]) -> None:
        """Add one pass, without its first round."""
        ends = [row["ended_at"] for row in rows]
        self.seconds += [after - before for before, after in pairwise(ends[1:])]
        for mine, found in ((self.server, server), (self.client, client)):
            mine |= {kind: max(mine.get(kind, 0), peak) for kind, peak in found.items()}

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line."""
        return {
            "round_s": spread(self.seconds, 3),
            "rounds": len(self.seconds),
            "server_mb": {kind: round(peak / 1e6) for kind, peak in sorted(self.server.items())},
            "client_mb": {kind: round(peak / 1e6) for kind, peak in sorted(self.client.items())},
            "bytes_of_a_client_and_round": round(self.num_bytes),
        }


@dataclass(frozen=True)
class Shape:
    """The number of clients, the size of the model, and the rounds of a pass."""

    clients: int
    mb: float
    rounds: int

    @classmethod
    def read(cls, text: str, rounds: int) -> "Shape":
        """Read a shape such as 2x100."""
        clients, _, mb = text.partition("x")
        return cls(int(clients), float(mb), rounds)

    @property
    def name(self) -> str:
        """The shape for a reader."""
        return f"{self.clients} clients x {self.mb:g} MB"

    def app(self, folder: Path) -> Path:
        """Make the folder of the app, and return it; its lines go to rounds.jsonl beside it."""
        values = {"num-clients": self.clients, "num-elements": round(self.mb * 250_000), "num-rounds": self.rounds}
        return app_folder(
            folder / "app", MODULE, {**values, "num-tensors": NUM_TENSORS, "out": folder / "rounds.jsonl"}
        )


@dataclass
class Watch:
    """The address for the clients of a pass, and the roots of its processes, server and clients, by name."""

    through: Callable[[str], str] = str
    """The address that clients dial, of that of the server."""
    server: dict[str, int] = field(default_factory=dict)
    client: dict[str, int] = field(default_factory=dict)


Pass = Callable[[Processes, Shape, Watch], None]


def by_us(way: str) -> Pass:
    """Return a pass of a coordinator and agents, natively or hosted."""

    def run(processes: Processes, shape: Shape, watch: Watch) -> None:
        folder = processes.folder
        app, state = shape.app(folder), folder / "state"
        settings: dict[str, object] = {"name": "exchange", "coordinator__state": state}
        settings |= {"coordinator__listen": "127.0.0.1:0", "coordinator__admin": "127.0.0.1:0"}
        if way == "hosted":
            settings |= {"round__min_available": shape.clients, "round__cohort_size": shape.clients, "round__quorum": 1}
        else:
            settings |= {"program__native": True}
        processes.start("coordinator", [*coordinator_command(str(app), **settings), "--stay"], QUIET)
        watch.server["coordinator"] = processes.running["coordinator"].pid
        address = watch.through(wait_for_address(processes, "coordinator", state))
        for number in range(shape.clients):
            site = folder / f"site{number}"
            equip(state, site, Identity(Role.CLIENT, site.name))
            partition = {"task__partition-id": number, "task__num-partitions": shape.clients}
            agent = agent_command(str(app), site=site.name, coordinator=address, state=site, **partition)
            processes.start(site.name, agent, QUIET)
            watch.client[site.name] = processes.running[site.name].pid
        history, until = History(state), time.monotonic() + LIMIT_S
        while (found := history.run("exchange-1").state) is not RunState.FINISHED:
            if time.monotonic() > until or found is RunState.FAILED:
                raise NotMeasured(f"the run is {found}:\n{processes.last_words('coordinator')}")
            time.sleep(0.1)

    return run


def by_flower(processes: Processes, shape: Shape, watch: Watch) -> None:
    """Run the app with a SuperLink and SuperNodes."""
    side = Flower(processes, shape.clients, 0, programs=PROGRAMS)
    side.start_link()
    watch.server["superlink"] = processes.running["superlink"].pid
    side.start_nodes(watch.through(side.address))
    watch.client |= {name: process.pid for name, process in processes.running.items() if name != "superlink"}
    side.submit(shape.app(processes.folder))
    side.wait(processes.folder / "rounds.jsonl", 1 + shape.rounds, LIMIT_S)


RUN: Mapping[str, Pass] = {**{way: by_us(way) for way in WAYS}, THEIRS: by_flower}


def timed(way: str, shape: Shape, side: Side) -> None:
    """Add one pass to a side."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place, Processes(Path(place)) as processes:
        watch = Watch()
        with Peaks(watch.server) as server, Peaks(watch.client) as client:
            RUN[way](processes, shape, watch)
        lines = (processes.folder / "rounds.jsonl").read_text().splitlines()
        side.add([json.loads(line) for line in lines], server.greatest, client.greatest)


def weighed(way: str, shape: Shape, side: Side) -> None:
    """Measure the bytes of a side, in a pass through a proxy."""
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-"))
        processes = stack.enter_context(Processes(Path(place)))
        proxies: list[Proxy] = []

        def through(address: str) -> str:
            proxies.append(stack.enter_context(Proxy(address, on_bytes=lambda *_: None)))
            return proxies[0].address

        RUN[way](processes, shape, Watch(through))
        total = sum(sum(crossing.num_bytes.values()) for crossing in proxies[0].crossings)
        side.num_bytes = total / shape.clients / shape.rounds


def measure(shape: Shape, passes: int) -> dict[str, Side]:
    """Measure all ways in turns."""
    sides = {way: Side() for way in RUN}
    for number in range(passes):
        for way, side in sides.items():
            timed(way, shape, side)
            say(f"{shape.name}, pass {number + 1}, {way}: {median(side.seconds):.3f} s a round")
    for way, side in sides.items():
        weighed(way, replace(shape, rounds=2), side)
        say(f"{shape.name}, {way}: {side.num_bytes / 1e6:.3f} MB of a client and round")
    return sides


def bars_of(shape: Shape, sides: Mapping[str, Side]) -> list[Bar]:
    """Return the bars of one shape."""
    theirs, bars = sides[THEIRS], []
    for way in WAYS:
        ours, what = sides[way], f"{shape.name}, {way}"
        times = median(theirs.seconds) / median(ours.seconds)
        bars.append(Bar.at_least(f"{what}: Flower's round over ours", times, FASTER[shape.mb < 1]))
        for name, mine, other in (("server", ours.server, theirs.server), ("client", ours.client, theirs.client)):
            share = sum(mine.values()) / sum(other.values())
            bars.append(Bar.below(f"{what}: peak memory of our {name} over Flower's", share, 1.0))
    return bars


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flower_app", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--shapes", nargs="+", default=["2x0.02", "2x100"], help="clients x MB")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a pass, of which the first does not count")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 clients x 20 kB, one pass: a check that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.rounds, arguments.passes = ["2x0.02"], 2, 1
    shapes = [Shape.read(text, arguments.rounds) for text in arguments.shapes]
    found = {shape.name: measure(shape, arguments.passes) for shape in shapes}
    return conclude(
        "flower_app",
        [bar for shape in shapes for bar in bars_of(shape, found[shape.name])],
        ours={
            "runs_with": "mutual TLS, journal, and fdatasync of every reply",
            **{name: {way: sides[way].summary() for way in WAYS} for name, sides in found.items()},
        },
        theirs={
            "runs_with": f"flwr {version('flwr')} over HTTP, no TLS, state in memory, nothing durable",
            **{name: sides[THEIRS].summary() for name, sides in found.items()},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
