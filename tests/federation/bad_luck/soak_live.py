"""Hours of drills for real processes: `make soak-live`, or SOAK="--minutes 10".

A coordinator and twenty agents train until their run is finished. Three lines of `atoll chaos proxy` have troubles, and
`atoll chaos kill` kills processes, which this program starts again as a supervisor does:

    4 agents     120 to 180 ms late in each direction, cut every minute
    4 agents     200 kB/s, shared
    4 agents     cut every two minutes, of which half are cuts that neither end is told of
    8 agents     no line; four of them are killed, each every five minutes
    coordinator  killed every twenty minutes, or four times in a shorter soak

The run needs ten of them. At the end it must be finished, every update that an agent was told is accepted must be in
exactly one version or have its reason in a record, and the coordinator must be no larger in its last part than in its
first one. The last line is JSON; exit code 1: something is wrong.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from atoll.protocol.vocabulary import Phase
from benchmarks import reaper
from tests.federation.bad_luck.judgement import faults_of, report, write_task
from tests.federation.processes import Federation, ended_after

SITES = tuple(f"site-{number:02}" for number in range(20))
RUN, ROUND_S = "soak-1", 8.0
LINES = {
    "late": ("--latency", "0.12", "--jitter", "0.06", "--cut-every", "60"),
    "narrow": ("--rate", "200000"),
    "silent": ("--cut-every", "120", "--half-open", "0.5"),
}
"""Options of each line by its name; each has four agents, in the order of `SITES`."""

KILLED = SITES[16:]
AGAIN_S = 3.0
"""Time after which a killed process is started again [s]."""

GROWTH_MAX, WARM_S, JUDGED_S = 1.15, 600.0, 3600.0
"""Largest memory of the coordinator in the last third of its samples over that in the first; samples begin after
`WARM_S`, as an importing process grows, and a soak that is shorter than `JUDGED_S` has too few of them [s]."""


class Soak(Federation):
    """The federation with its drills."""

    def __init__(self, folder: Path, minutes: float) -> None:
        super().__init__(folder, task=write_task(folder, SITES, 20_000))
        self.seconds = 60.0 * minutes
        self.rounds_wanted = max(4, int(self.seconds / ROUND_S))
        self.begun = time.monotonic()
        self.addresses: dict[str, str] = {}
        self.memory: list[tuple[float, int]] = []
        """Size of the coordinator [MB] at instants since the begin [s]."""
        self._down: dict[str, float] = {}

    def begin(self) -> None:
        """Start everything."""
        for seed, (name, options) in enumerate(LINES.items()):
            self.start(
                name, "chaos", "proxy", "--listen", "127.0.0.1:0", "--to", self.address, "--seed", seed, *options
            )
        for name in LINES:
            self.addresses[name] = self.wait_for(lambda name=name: next(self._did(name, "listening"), None))["address"]
        for name in ("coordinator", *SITES):
            self._begin(name)
        self.begun = time.monotonic()
        for seed, name in enumerate(("coordinator", *KILLED)):
            every = min(1200.0 if name == "coordinator" else 300.0, self.seconds / 5)
            command = ("chaos", "kill", "--pidfile", self._pidfile(name), "--every", every, "--for", 0.9 * self.seconds)
            self.start(f"kill-{name}", *command, "--seed", seed)

    def _pidfile(self, name: str) -> Path:
        return self.folder / f"{name}.pid"

    def _begin(self, name: str) -> None:
        """Start the coordinator or an agent, with the same command each time, and write its number."""
        if name == "coordinator":
            self.coordinator(
                name="soak",
                rounds=self.rounds_wanted,
                pause=1.0,
                round__cohort_size=16,
                round__quorum=10,
                round__deadline=60.0,
                round__linger=2.0,
                round__late="next_round",
                round__retry=20,
                round__retry_wait=2.0,
                round__retry_wait_max=20.0,
                round__failure_rest=2.0,
                round__failure_rest_max=20.0,
                round__selection_timeout=60.0,
                coordinator__keep_rounds=100_000,
            )
        else:
            line = [*LINES, "", ""][SITES.index(name) // 4]
            self.agent(name, reconnect_max=3.0, address=self.addresses.get(line, ""))
        self._pidfile(name).write_text(str(self.running[name].pid))

    def _did(self, name: str, what: str) -> Iterator[dict[str, str]]:
        for line in self.log(name).splitlines():
            if line.startswith("{") and (event := json.loads(line))["did"] == what:
                yield event

    def live(self, bound_s: float) -> None:
        """Supervise until the run is finished."""
        sampled_at = 0.0
        while (now := time.monotonic()) < self.begun + bound_s and self.running["coordinator"].poll() != 0:
            for name in ("coordinator", *KILLED):
                if self.running[name].poll() == -9 and now >= self._down.setdefault(name, now + AGAIN_S):
                    del self._down[name]
                    self._begin(name)
            if now - sampled_at >= 5.0:
                sampled_at = now
                self._sample(now)
            time.sleep(0.1)

    def _sample(self, now: float) -> None:
        """Note the memory of the coordinator."""
        try:
            status = Path(f"/proc/{self.running['coordinator'].pid}/status").read_text()
        except OSError:
            return
        if now - self.begun >= WARM_S and (found := re.search(r"VmRSS:\s+(\d+)", status)):
            self.memory.append((round(now - self.begun), int(found[1]) // 1000))

    @property
    def growth(self) -> float:
        """Largest memory in the last third of the samples over that in the first."""
        third = max(1, len(self.memory) // 3)
        if self.seconds < JUDGED_S or not self.memory:
            return 1.0
        first, last = (max(size for _, size in part) for part in (self.memory[:third], self.memory[-third:]))
        return last / first

    @property
    def done(self) -> Counter[str]:
        """What the drills have done, and how often."""
        found = Counter[str]()
        for name in LINES:
            found.update(f"{name}: {what}" for what in ("cut", "connected") for _ in self._did(name, what))
        found.update("killed" for name in ("coordinator", *KILLED) for _ in self._did(f"kill-{name}", "killed"))
        return found

    def faults(self) -> Iterator[str]:
        """Yield what is wrong after the end."""
        yield from faults_of(self, RUN, SITES, rounds=self.rounds_wanted, told={})
        if self.growth > GROWTH_MAX:
            yield f"the coordinator's memory has grown to {self.growth:.2f} of what it was"
        if not self.done["killed"] or not self.done["late: cut"]:
            yield "no process was killed, or no line was cut"


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description="Hours of drills for a coordinator and twenty agents.")
    parser.add_argument("--minutes", type=float, default=120.0, help="length of the soak (at least 2)")
    minutes = max(2.0, parser.parse_args().minutes)
    reaper.watch()
    with tempfile.TemporaryDirectory(prefix="atoll-soak-") as folder, ended_after(Soak(Path(folder), minutes)) as it:
        it.begin()
        it.live(bound_s=3 * it.seconds + 300)
        faults = [*it.faults()]
        records = it.history().rounds(RUN)
        if faults:
            print(it.log("coordinator")[-20_000:])
        late = sum(record.phase is not Phase.COMMITTED for record in records)
        return report(
            it.begun,
            records,
            faults,
            drills=dict(it.done),
            not_committed=late,
            memory_growth=round(it.growth, 3),
            memory=it.memory[:: max(1, len(it.memory) // 40)],
        )


if __name__ == "__main__":
    sys.exit(main())
