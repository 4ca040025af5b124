"""A round with secure sums over a plain one: its time, and what each client sends.

    python -m benchmarks.secure_round [--rounds N] [--turns N] [--elements N]

One coordinator and eight agents, all real processes with mutual TLS on loopback, stay connected; runs of both kinds
take turns. A round is timed by its own record, from its opening to its commit; the first round of each run, for which
the clients fetch a new model, does not count. A turn's figure is the difference of the medians of its two runs; the
median of the turns counts. A proxy before each agent counts the bytes that it sends: a run's, over its rounds.

    more    the time of a secure round beyond a plain one [ms]: keys, shares, masks, agreement, opening
    work    the processor time behind it, of the coordinator and all agents, over two cores [ms]: what a machine without
            other work needs; a machine with other work has a larger `more`
    bytes   what a client sends in a secure round beyond the plain update of float32 [bytes]
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.operations import admin
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import Phase, RunId
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History
from benchmarks.members import equip
from benchmarks.processes import NotMeasured, Processes, agent_command, coordinator_command, toml, wait_for_address
from benchmarks.proxy import Proxy, Way
from benchmarks.report import Bar, conclude, say, spread
from benchmarks.round_latency import wait_for_end

TASK = "benchmarks.tasks:noise"
SITES = tuple(f"s{number}" for number in range(8))
ROUNDS, TURNS, ELEMENTS = 12, 5, 250_000
MORE_MAX_MS, BYTES_MAX = 250.0, 64_000
SUMS = {"secure.clip_norm": 2000.0, "secure.examples_max": 1000}
KINDS = ("plain", "secure")


@dataclass(slots=True)
class Side:
    """The runs of one kind: of each, the median of its rounds [s] and the mean bytes of a client and round."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: list[float] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)  # of a round: the coordinator's, all agents'
    stages: list[dict[str, float]] = field(default_factory=list)


class Bench:
    """The coordinator and its agents, each behind a proxy, for the turns of both sides."""

    def __init__(self, stack: ExitStack, elements: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        self._state, self._count = folder / "coordinator", 0
        environment = {"ATOLL_BENCH_ELEMENTS": str(elements)}
        for site in SITES:
            equip(self._state, folder / site, Identity(Role.CLIENT, site))
        self._processes = processes = stack.enter_context(Processes(folder))
        settings = {"coordinator__state": self._state, "coordinator__listen": "127.0.0.1:0"}
        processes.start("coordinator", coordinator_command(**settings), environment)
        address = wait_for_address(processes, "coordinator", self._state)
        self._proxies = [stack.enter_context(Proxy(address, on_bytes=lambda *_: None)) for _ in SITES]
        for site, proxy in zip(SITES, self._proxies, strict=True):
            where = {"site": site, "state": folder / site, "coordinator": proxy.address}
            processes.start(site, agent_command(TASK, **where, threads=1), environment)

    def run(self, kind: str, rounds: int, side: Side) -> None:
        """Run one run of a kind to its end, and add its figures."""
        self._count += 1
        settings: dict[str, Any] = {
            "task": TASK,
            "name": f"{kind}{self._count}",
            "seed": self._count,  # another first model: a site signs two sums from each
            "rounds": rounds + 1,
            "evaluation.server_every": 0,
            "round.cohort_size": len(SITES),
            "round.quorum": len(SITES),
            "round.min_available": len(SITES),
            **(SUMS if kind == "secure" else {}),
        }
        text = "\n".join(f"{key} = {toml(value)}" for key, value in settings.items())
        before, cpu_s = self._sent(), self._cpu_s()
        run_id = RunId(str(admin.start(self._state, text).run_id))
        wait_for_end(self._processes, self._state)
        records = History(self._state).rounds(run_id)
        if bad := [record for record in records if record.phase is not Phase.COMMITTED or record.num_in < len(SITES)]:
            raise NotMeasured(f"{kind}: round {bad[0].round_id}: {bad[0].phase}, {bad[0].num_in} in: {bad[0].detail}")
        side.seconds.append(statistics.median(_seconds(record) for record in records[1:]))
        side.num_bytes.append((self._sent() - before) / (rounds + 1) / len(SITES))
        used = zip(self._cpu_s(), cpu_s, strict=True)
        coordinator, agents = ((after - earlier) / (rounds + 1) for after, earlier in used)
        side.cpu_s.append((coordinator, agents))
        side.stages.append(_stages(records[1:]))

    def _cpu_s(self) -> tuple[float, float]:
        """Return the processor time so far of the coordinator, and of all agents without their workers [s]."""
        usage = self._processes.usage
        return usage("coordinator").cpu_s, sum(usage(site).cpu_s for site in SITES)

    def _sent(self) -> int:
        return sum(crossing.num_bytes[Way.UP] for proxy in self._proxies for crossing in proxy.crossings)


def _median_ms(cpu_s: list[tuple[float, float]], which: int) -> int:
    return round(1000 * statistics.median(pair[which] for pair in cpu_s))


def _seconds(record: RoundRecord) -> float:
    assert record.ended_at is not None
    return record.ended_at - record.opened_at


def _stages(records: list[RoundRecord]) -> dict[str, float]:
    """Return the median time from the opening until the last client had come to each step [ms]."""
    steps: dict[str, list[float]] = {}
    for record in records:
        for name in ("keys_at", "shares_at", "masked_at", "signed_at", "revealed_at"):
            times = [getattr(row.sum, name) for row in record.clients.values() if row.sum is not None]
            if known := [each for each in times if each is not None]:
                steps.setdefault(name.removesuffix("_at"), []).append(max(known) - record.opened_at)
        assert record.ended_at is not None
        steps.setdefault("committed", []).append(record.ended_at - record.opened_at)
    return {name: round(1000 * statistics.median(found), 1) for name, found in steps.items()}


def main() -> int:
    """Let both sides take turns, and print one JSON line last."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.secure_round", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measured in each run")
    parser.add_argument("--turns", type=int, default=TURNS, help="in which both sides alternate")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="float32 values of the model")
    arguments = parser.parse_args()
    sides = {kind: Side() for kind in KINDS}
    with ExitStack() as stack:
        bench = Bench(stack, arguments.elements)
        for turn in range(arguments.turns):
            for kind in KINDS if turn % 2 else KINDS[::-1]:
                bench.run(kind, arguments.rounds, sides[kind])
                last = sides[kind]
                say(f"  turn {turn + 1}, {kind}: {1000 * last.seconds[-1]:.0f} ms, {last.num_bytes[-1]:.0f} bytes up")
    plain, secure = sides["plain"], sides["secure"]
    pairs = list(zip(secure.seconds, plain.seconds, strict=True))
    more = [1000 * (ours - theirs) for ours, theirs in pairs]
    sent = statistics.median(secure.num_bytes) - 4 * arguments.elements
    parts = {"coordinator": 0, "all agents": 1}
    work = {name: _median_ms(secure.cpu_s, which) - _median_ms(plain.cpu_s, which) for name, which in parts.items()}
    bars = [
        Bar.at_most("a secure round beyond a plain one, median of turns [ms]", statistics.median(more), MORE_MAX_MS),
        Bar.at_most("processor time of that, all processes, over 2 cores [ms]", sum(work.values()) / 2, MORE_MAX_MS),
        Bar.at_most("bytes up of a client and round beyond plain float32", sent, BYTES_MAX),
    ]
    ours = {
        "round_ms": [round(1000 * seconds, 1) for seconds in secure.seconds],
        "more_ms": [round(each, 1) for each in more],
        "times_a_plain_round": spread([ours / theirs for ours, theirs in pairs], 2),
        "more_processor_ms": work,
        "bytes_up_of_a_round": round(statistics.median(secure.num_bytes)),
        "until_the_last_ms": secure.stages[len(secure.stages) // 2],
        "configuration": f"{len(SITES)} agents, {4 * arguments.elements / 1e6:g} MB, mutual TLS, "
        f"{arguments.turns} turns of {arguments.rounds} rounds",
    }
    theirs = {
        "side": "plain rounds of the same processes",
        "round_ms": [round(1000 * seconds, 1) for seconds in plain.seconds],
        "bytes_up_of_a_round": round(statistics.median(plain.num_bytes)),
    }
    return conclude("secure_round", bars, ours=ours, theirs=theirs)


if __name__ == "__main__":
    sys.exit(main())
