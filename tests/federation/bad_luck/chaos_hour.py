"""An hour of bad luck for real processes: `make chaos-hour`, or CHAOS="--minutes 10".

A coordinator and five agents train until their run is finished, while

    disk      has a full disk for a minute (its state is a file system of its own, in a name space of its own)
    clock     has a clock that is an hour ahead, until half of the time is over
    approval  waits for its operator's approval until half of the time is over
    stopped   is stopped for 20 s of every 50 s (SIGSTOP, SIGCONT)
    steady    has no trouble
    the coordinator is killed (SIGKILL) every two minutes, and started again five seconds later

The run needs three of them. At the end it must be finished, every update that an agent was told is accepted must be in
exactly one version or have its reason in a record, and the log must name each trouble. The log is the story: it is
printed. The last line is JSON; exit code 1: something is wrong.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP

from benchmarks import reaper
from tests.federation.bad_luck.judgement import faults_of, report, write_task
from tests.federation.bad_luck.set_clock import SetClock
from tests.federation.processes import ATOLL, Federation, ended_after

SITES = ("disk", "clock", "approval", "stopped", "steady")
RUN = "chaos-1"
ROUND_S = 6.0
"""Seconds of a calm round, its pause included: the number of rounds follows from the minutes."""

CLOCK_AHEAD_S = 3600.0
TROUBLES = {
    "disk": r"disk failed: disk_full",
    "clock": r"the clock of site clock is 1 h 0 min ahead",
    "approval": r"approval awaiting approval|approval failed: awaits_approval",
    "coordinator": r"the coordinator is back after",
}
"""Lines of the coordinator's log that tell each trouble."""


class Chaos(Federation):
    """The federation with its troubles; `begun` is the instant of its start on the monotonic clock."""

    def __init__(self, folder: Path, minutes: float) -> None:
        super().__init__(folder, task=write_task(folder, SITES, 50_000))
        self.clock = SetClock(folder / "clock-of-a-site", CLOCK_AHEAD_S)
        self.seconds, self.kills, self.has_disk = 60.0 * minutes, 0, True
        self.rounds_wanted = max(4, int(self.seconds / ROUND_S))
        self.begun = time.monotonic()

    def begin(self) -> None:
        """Start the coordinator and the five agents."""
        self.serve()
        (self.folder / "approval.toml").write_text('tasks = ["*"]\nruns = ["chaos-*"]\napproval = "each_run"\n')
        more = {
            "clock": {"environment": self.clock.environment},
            "approval": {"policy": self.folder / "approval.toml"},
        }
        for site in SITES:
            self.agent(site, reconnect_max=3.0, **more.get(site, {}))
        self.wait_for(lambda: "connected to" in self.log("disk"))  # it cannot begin on a full disk
        self.begun = time.monotonic()

    def serve(self) -> None:
        """Start the coordinator, with the same command each time."""
        self.coordinator(
            name="chaos",
            rounds=self.rounds_wanted,
            pause=ROUND_S / 2,
            round__cohort_size=4,
            round__quorum=3,
            round__deadline=30.0,
            round__linger=2.0,
            round__late="next_round",
            round__retry=20,
            round__retry_wait=2.0,
            round__retry_wait_max=20.0,
            round__failure_rest=5.0,
            round__failure_rest_max=40.0,
            round__selection_timeout=60.0,
            evaluation__clients_every=10,
            coordinator__keep_rounds=100_000,
        )

    def start(self, name: str, *command: object, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a process; the state of `disk` is on a small file system in a name space of its own."""
        if name != "disk":
            return super().start(name, *command, **environment)  # type: ignore[no-any-return]
        state, first = self.folder / "disk", self.folder / "disk.first"
        state.rename(first)
        state.mkdir()
        inside = 'mount -t tmpfs -o size=8m tmpfs "$0" && cp -r "$1"/. "$0" && shift && exec "$@"'
        prefix = ("unshare", "-rm", "sh", "-c", inside, str(state), str(first))
        self.has_disk = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
        with (self.folder / f"{name}.log").open("ab") as log:
            if not self.has_disk:
                state.rmdir()
                first.rename(state)
            call = [*(prefix if self.has_disk else ()), ATOLL, *map(str, command)]
            self.running[name] = subprocess.Popen(call, stdout=log, stderr=log)
        return self.running[name]

    # ------------------------------------------------------------ troubles

    def troubles(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Yield each trouble with its time [s since the start]."""
        half, first = self.seconds / 2, min(20.0, self.seconds / 8)
        yield first, lambda: self._fill("disk")
        yield first + min(60.0, self.seconds / 3), lambda: self._free("disk")
        yield half, lambda: self._say("the clock is set right") or self.clock.set(0)  # type: ignore[func-returns-value]
        yield half, self._approve
        for number in range(int(self.seconds / 50)):
            yield 30.0 + 50.0 * number, lambda: self._signal("stopped", SIGSTOP)
            yield 50.0 + 50.0 * number, lambda: self._signal("stopped", SIGCONT)
        every = min(120.0, self.seconds / 3)
        for number in range(1, int(self.seconds / every) + 1):
            yield every * number, self._kill_coordinator
            yield every * number + 5.0, self._serve_again

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.begun:7.1f} s] {what}", flush=True)

    def _place(self, site: str) -> Path:
        inside = Path(f"/proc/{self.running[site].pid}/root") if self.has_disk else Path("/")
        return inside / (self.folder / site / "filler").relative_to("/")

    def _fill(self, site: str) -> None:
        if not self.has_disk:
            self._say("no name spaces here (unshare -rm): the full disk is left out")
            return
        self._say(f"the disk of {site} is full")
        try:
            with self._place(site).open("wb", buffering=0) as file:
                while file.write(bytes(64 * 1024)):
                    pass
        except OSError:
            pass

    def _free(self, site: str) -> None:
        if self.has_disk:
            self._say(f"the disk of {site} has room again")
            self._place(site).unlink(missing_ok=True)

    def _approve(self) -> None:
        self._say("the operator of approval approves the run")
        state = self.folder / "approval"
        subprocess.run([ATOLL, "site", "approve", RUN, "--state", str(state)], check=True, capture_output=True)

    def _signal(self, site: str, number: int) -> None:
        if self.running[site].poll() is None:
            self.running[site].send_signal(number)

    def _kill_coordinator(self) -> None:
        if self.running["coordinator"].poll() is None:
            self._say("the coordinator is killed")
            self.kill("coordinator")
            self.kills += 1

    def _serve_again(self) -> None:
        if self.running["coordinator"].returncode not in (None, 0):
            self.serve()

    # ------------------------------------------------------------ the end

    def live(self, bound_s: float) -> None:
        """Let all troubles happen, and wait for the end of the run."""
        due = sorted(self.troubles(), key=lambda trouble: trouble[0])
        while time.monotonic() < self.begun + bound_s:
            while due and time.monotonic() >= self.begun + due[0][0]:
                due.pop(0)[1]()
            if self.running["coordinator"].poll() == 0:
                break
            time.sleep(0.1)
        self._signal("stopped", SIGCONT)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong after the end."""
        told = {name: line for name, line in TROUBLES.items() if self.has_disk or name != "disk"}
        return faults_of(self, RUN, SITES, rounds=self.rounds_wanted, told=told)


def main() -> int:
    """Run the hour; return the exit code."""
    parser = argparse.ArgumentParser(description="An hour of bad luck for a coordinator and five agents.")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the trouble (at least 1.5)")
    minutes = max(1.5, parser.parse_args().minutes)
    reaper.watch()
    with tempfile.TemporaryDirectory(prefix="atoll-chaos-") as folder:
        chaos = Chaos(Path(folder), minutes)
        with ended_after(chaos) as it:
            it.begin()
            it.live(bound_s=2 * it.seconds + 180)
            print("\nthe coordinator's log:\n" + it.log("coordinator"))
            faults = [*it.faults()]
            records = it.history().rounds(RUN)
        return report(chaos.begun, records, faults, coordinator_kills=chaos.kills, full_disk=chaos.has_disk)


if __name__ == "__main__":
    sys.exit(main())
