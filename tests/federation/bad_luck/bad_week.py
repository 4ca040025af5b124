"""A bad week for real processes: `make bad-week`, in less than ten minutes.

A coordinator and five agents train until their run is finished. Seven days pass; each night does so at once for all
machines, which sleep, while the coordinator is down.

    city     a fast line                     rural    20 kB/s, cut for a minute on the fifth day
    town     200 kB/s                        drift    its clock is ten minutes behind on the second day
    owl      away from the third day's morning to the fourth's noon, with town: the quorum needs one of them

    day 1    SIGHUP for every process        day 4    the coordinator's disk is full for a while
    day 2    the coordinator's clock jumps   day 5    the file of an accepted update is lost in a crash
    day 3    the run waits for its sites     day 6    the coordinator's state is restored from a backup of the day

At the end the run must be finished, every accepted update must be in exactly one version or have its reason in a
record, and the coordinator's log, which is printed, must tell each trouble. The last line is JSON; exit code 1:
something is wrong.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGHUP, SIGTERM

from atoll.protocol.vocabulary import Phase, RoundId
from benchmarks import reaper
from tests.federation.bad_luck.judgement import faults_of, report, write_task
from tests.federation.bad_luck.set_clock import SetClock
from tests.federation.bad_luck.slow_line import SlowLine
from tests.federation.processes import ATOLL, Federation, ended_after

SITES = ("city", "town", "rural", "drift", "owl")
RUN, ROUNDS, A_DAY, NIGHT_S = "week-1", 45, 6, 20 * 3600.0
GIB = 1 << 30
TOLD = {
    "SIGHUP": r"SIGHUP: a service keeps running",
    "clock": r"this machine's clock was set forward by 10 min",
    "drift": r"the clock of site drift is (10 min|9 min)",
    "absence": r"waiting for clients since .* UTC.*owl",
    "disk": r"waiting for room on disk",
    "losses": r"accepted by --accept-losses: run week-1: .* is missing",
    "nights": r"the coordinator is back after 20 h",
    "restore": r"an older or empty state is in use",
    "rollback": r"failed: rollback: .*atoll site accept-rollback week-1",
}
"""Lines of the coordinator's log that tell each trouble."""


class BadWeek(Federation):
    """The federation with its troubles; `day` is the number of the present day."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        super().__init__(folder, task=write_task(folder, SITES, 20_000))
        self.begun, self.day = time.monotonic(), 1
        self.clocks = {name: SetClock(folder / f"clock-{name}") for name in ("coordinator", *SITES)}
        rates = {"town": 200e3, "rural": 20e3}
        self.lines = {site: stack.enter_context(SlowLine(self.address, rate)) for site, rate in rates.items()}
        self.free_min = 0
        self.undone: set[RoundId] = set()
        """Rounds that the restored backup does not know."""

    def say(self, what: str) -> None:
        """Print a line of the story, with its day."""
        print(f"[{time.monotonic() - self.begun:5.0f} s, day {self.day}] {what}", flush=True)

    # ------------------------------------------------------------ processes

    def serve(self, *extra: str) -> "subprocess.Popen[bytes]":
        """Start the coordinator, with the same settings each time."""
        return self.coordinator(  # type: ignore[no-any-return]
            name="week",
            rounds=ROUNDS,
            pause=3.0,
            round__cohort_size=5,
            round__quorum=4,
            round__deadline=60.0,
            round__linger=2.0,
            round__late="next_round",
            round__retry_wait=2.0,
            round__retry_wait_max=10.0,
            round__failure_rest=2.0,
            round__failure_rest_max=10.0,
            round__selection_timeout=10.0,
            coordinator__keep_rounds=100_000,
            coordinator__disk_free_min=self.free_min,
            environment=self.clocks["coordinator"].environment,
            extra=extra,
        )

    def arrive(self, site: str) -> None:
        """Start the agent of a site."""
        address = self.lines[site].address if site in self.lines else ""
        environment = self.clocks[site].environment
        self.agent(site, reconnect_max=3.0, exit_when_done=False, address=address, environment=environment)

    def leave(self, site: str) -> None:
        """Stop the agent of a site in order."""
        self.running[site].send_signal(SIGTERM)
        assert self.running.pop(site).wait(60) == 0, self.log(site)

    @property
    def versions(self) -> int:
        """The number of versions."""
        try:
            return sum(record.phase is Phase.COMMITTED for record in self.history().rounds(RUN))
        except (OSError, LookupError):
            return 0

    def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until something has happened, and say it."""
        self.wait_for(lambda: condition() or None, timeout=150, every=0.2)
        self.say(what)

    def until_told(self, pattern: str, name: str = "coordinator", times: int = 1) -> None:
        """Wait for a line of a log."""
        self.wait_for(lambda: len(re.findall(pattern, self.log(name))) >= times or None, timeout=150, every=0.2)

    def train(self, rounds: int) -> None:
        """Wait for some more versions, unless the run is at its end."""
        wanted = min(self.versions + rounds, ROUNDS)
        self.until(f"{wanted} versions", lambda: self.versions >= wanted)

    def night(self) -> None:
        """Let the coordinator be down while all machines sleep, and start it in the morning."""
        self.kill("coordinator")
        self.say("the coordinator is killed, and a night passes")
        for clock in self.clocks.values():
            clock.sleep(NIGHT_S)
        self.day += 1
        self.serve()

    # ------------------------------------------------------------ the days

    def live(self) -> None:
        """Let the week pass."""
        self.free_min = shutil.disk_usage(self.folder).free - 3 * GIB
        self.serve()
        for site in SITES:
            self.arrive(site)
        days = (self.hangups, self.jumps, self.absences, self.full_disk, self.lost_file, self.restore)
        for day in days:
            self.train(1)
            day()
            self.train(A_DAY if self.versions < A_DAY * self.day else 1)
            self.night()
        assert self.running["coordinator"].wait(200) == 0, self.log("coordinator")[-2000:]
        self.say("the run is over")

    def hangups(self) -> None:
        """Send SIGHUP to every process."""
        for process in self.running.values():
            process.send_signal(SIGHUP)
        self.until_told("SIGHUP: a service keeps running")

    def jumps(self) -> None:
        """Set the coordinator's clock ten minutes ahead, and right; set a site's behind, and right."""
        self.clocks["coordinator"].set(600)
        self.until_told("this machine's clock was set forward by 10 min")
        self.say("the coordinator's clock is ten minutes ahead")
        self.clocks["coordinator"].set(0)
        self.until_told("this machine's clock was set back by 10 min")
        self.clocks["drift"].set(-600)
        self.kill("drift")
        self.arrive("drift")
        self.until_told("the clock of site drift is")
        self.say("the clock of drift is ten minutes behind")
        self.clocks["drift"].set(0)
        self.until_told("connected to", "drift", times=len(re.findall("connected to", self.log("drift"))) + 1)

    def absences(self) -> None:
        """Let two sites be away until the next day: the quorum needs one of them."""
        self.leave("owl")
        self.leave("town")
        self.until_told(r"waiting for clients since")
        (row,) = self.show("run", "list")
        missing = {one["site"] for one in row["wait"]["missing"]}
        assert row["state"] == "waiting", row
        assert missing >= {"owl", "town"}, row
        self.say(f"the run waits: {row['cause']}")
        self.night()
        self.until_told("the coordinator is back", times=self.day - 1)
        time.sleep(5)
        self.arrive("owl")
        self.arrive("town")
        self.train(2)

    def full_disk(self) -> None:
        """Fill the coordinator's disk below its least free space for a while."""
        ballast = self.folder / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free - self.free_min + GIB // 2)
        self.until_told("waiting for room on disk")
        self.say("the coordinator's disk is full")
        ballast.unlink()

    def lost_file(self) -> None:
        """Cut the slowest line for a minute; lose the file of an accepted update in a crash of the coordinator."""
        line = self.lines["rural"]
        line.is_cut, cut_until = True, time.monotonic() + 60
        self.wait_for(lambda: self.accepted_files() or None, timeout=150, every=0.1)
        self.kill("coordinator")
        self.accepted_files()[0].unlink()
        if self.serve().wait(60) == 2:
            self.say(self.log("coordinator").splitlines()[-2])
            self.serve("--accept-losses")
        time.sleep(max(0.0, cut_until - time.monotonic()))
        line.is_cut = False
        self.say("the line of rural is there again")

    def accepted_files(self) -> list[Path]:
        """Return the files of the accepted updates of the open round: without one of them, a start is refused."""
        kept, record = self.state / "runs" / RUN / "updates", self.history().rounds(RUN)[-1]
        rows = record.clients.values() if record.phase is Phase.COLLECTING else ()
        return [file for row in rows if row.digest and (file := kept / f"{row.digest}.bin").exists()]

    def restore(self) -> None:
        """Restore the state from a backup that is two versions old; the sites' operators accept it."""
        backup = self.folder / "backup"
        self.command("backup", str(self.state), str(backup))
        self.say(f"a backup is made at version {self.versions}")
        self.train(2)
        self.kill("coordinator")
        rounds = {record.round_id for record in self.history().rounds(RUN)}
        self.state.rename(self.folder / "state.lost")
        self.command("restore", str(backup), str(self.state))
        self.undone = rounds - {record.round_id for record in self.history().rounds(RUN)}
        self.serve()
        self.until_told("rollback")
        self.say("sites refuse the older rounds, until their operators accept them")
        for site in SITES:
            self.command("site", "accept-rollback", RUN, "--state", str(self.folder / site))

    def command(self, *arguments: str) -> None:
        """Run a command of an operator."""
        done = subprocess.run([ATOLL, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (arguments, done.stderr)

    # ------------------------------------------------------------ the end

    def faults(self) -> Iterator[str]:
        """Yield what is wrong after the end."""
        return faults_of(self, RUN, SITES, rounds=ROUNDS, told=TOLD, undone=self.undone)


def main() -> int:
    """Let the week pass; return the exit code."""
    reaper.watch()
    with tempfile.TemporaryDirectory(prefix="atoll-week-") as folder, ExitStack() as stack:
        week = BadWeek(Path(folder), stack)
        with ended_after(week) as it:
            faults = []
            try:
                it.live()
            except AssertionError as error:
                faults.append(f"day {it.day}: {error}")
            print("\nthe coordinator's log:\n" + it.log("coordinator"))
            faults += it.faults()
            records = it.history().rounds(RUN)
    return report(week.begun, records, faults, days=week.day)


if __name__ == "__main__":
    sys.exit(main())
