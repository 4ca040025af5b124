"""A private federation of real processes in cycles of kill and restart: `python -m tests.federation.private_deaths`.

In each cycle the coordinator, or the agent of a site with a budget, is killed at one of its crash points by
`ATOLL_CRASH_AT`. While it is dead, what is on disk is read: neither the run nor the site has spent less than before,
each version is charged to its clients in the run, and each update in a version to its site. Then it starts again, with
the next point. The processes start warm (`tests.warm`): a cycle takes a second.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.server.errors import StoreCorrupted
from tests.cli.invoking import shown
from tests.federation.processes import Federation, ended_after
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S
from tests.warm import start

SITES = ("c", "b")
"""The first one's agent is killed."""
RUN = "private-1"
SETTINGS = {
    **{"name": "private", "rounds": 5000, "round__cohort_size": 2, "round__min_available": 2},
    **{"evaluation__server_every": 0, "aggregation__weighting": "uniform", "coordinator__keep_versions": 3},
    **{"privacy__epsilon": 900.0, "privacy__delta": 1e-3, "privacy__clip_norm": 0.5},
    **{"privacy__noise_multiplier": 4.0, "privacy__participations_max": 5000},
}
EXAMPLES = {"privacy__unit": "example", "privacy__sample_rate": 0.25, "local__max_steps": 1}
POINTS = {
    "coordinator": (
        *("journal.before_write", "journal.after_write", "round.entry/CohortDrawn", "round.entry/UpdateReceived:2"),
        *("round.effect/AuditCharge", "round.effect/Aggregate", "aggregate.before_fold", "aggregate.mid_fold"),
        *("aggregate.after_fold", "round.entry/Aggregated", "publish.before", "publish.after", "snapshot.before"),
        *("snapshot.after", "upload.before_check", "upload.before_accept"),
    ),
    SITES[0]: (
        *("agent.invited", "agent.noise_kept", "agent.charged", "agent.downloaded", "agent.training", "agent.trained"),
        *("agent.spooled", "agent.noise_forgotten", "agent.uploading", "agent.uploaded", "agent.answered"),
    ),
}
"""The points at which each process is killed."""


@dataclass
class PrivateDeaths:
    """A private run whose processes are killed.

    Args:
        folder: of the federation.
        unit: of the guarantee, at the run and at the sites.
    """

    folder: Path
    unit: str
    deaths: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.it = Federation(self.folder, task=TASK)
        self._spent = dict[str, float]()
        self._spent_at = dict[str, float]()
        self._has_begun = False

    def policy(self, site: str) -> Path:
        """Return a policy whose budget is large."""
        path = self.folder / f"{site}.toml"
        budget = f'tasks = ["*"]\nepsilon_max = 900.0\ndelta = 1e-3\nunit = "{self.unit}"\n'
        path.write_text(f'tasks = ["*"]\nruns = ["*"]\n[[privacy.data]]\nname = "lines"\n{budget}')
        return path

    def start(self, name: str, crash_at: str = "") -> "subprocess.Popen[bytes]":
        """Start the coordinator or an agent, which dies at a crash point; empty: at none."""
        environment = {"ATOLL_CRASH_AT": crash_at} if crash_at else {}
        if name != "coordinator":
            return self.it.agent(name, threads=1, policy=self.policy(name), environment=environment)
        if not self._has_begun:
            self._has_begun = True
            settings = SETTINGS | (EXAMPLES if self.unit == "example" else {})
            return self.it.coordinator(**settings, environment=environment)
        again = ("--state", self.it.state, "--set", f"coordinator.listen={self.it.address}")
        return self.it.start("coordinator", "coordinator", *again, **environment)

    def die(self, name: str, point: str) -> None:
        """Start a process that dies at a point, and read what is spent."""
        dying, deadline = self.start(name, point), time.monotonic() + BOUND_S
        while dying.poll() is None:
            assert time.monotonic() < deadline, f"{point} is never reached:\n{self._logs()}"
            time.sleep(0.05)
        assert dying.returncode == -signal.SIGKILL, f"{point}: {dying.returncode}\n{self._logs()}"
        self.deaths[point] += 1
        try:
            self.judge()
        except AssertionError as error:
            raise AssertionError(f"after {self.deaths.total()} deaths, at {point}: {error}\n{self._logs()}") from error

    def judge(self) -> None:
        """Check that nothing is spent less than before, and that what was released is charged."""
        counted = dict.fromkeys(SITES, 0)
        if self.has_run():
            machine = self.it.history().machine(RUN)
            members, version = machine.ledger.membership.members, machine.ledger.version
            for site in (site for site in SITES if site in members):
                member, before = members[site], self._spent.get(site, 0.0)
                assert member.spent >= before, f"{site} has spent {member.spent} in the run after {before}"
                assert member.uses >= version, f"{version} versions have {site}, which is charged {member.uses} times"
                self._spent[site] = member.spent
                counted[site] = self.it.history().participations(RUN, [site]).get(site, (0, 0))[1]
        for site in SITES:
            if not (self.folder / site / "policy.db").exists():
                continue
            where = ("--state", self.folder / site, "--policy", self.folder / f"{site}.toml")
            [budget] = shown("site", "budgets", *where)["budgets"]
            spent, before = budget["spent"] or 0.0, self._spent_at.get(site, 0.0)
            assert spent >= before, f"{site} has spent {spent} of its budget after {before}"
            charges = budget["charges"]
            assert charges >= counted[site], f"{counted[site]} updates of {site} are in versions, {charges} charged"
            self._spent_at[site] = spent

    def has_run(self) -> bool:
        """Return whether the coordinator's journal has the run."""
        try:
            return bool(self.it.history().runs())
        except (OSError, LookupError, StoreCorrupted):  # of a journal that is being made
            return False

    def _logs(self) -> str:
        return "\n".join(f"{name}: {self.it.log(name)[-1500:]}" for name in self.it.running)


def killed(folder: Path, unit: str, cycles: Iterable[tuple[str, str]]) -> PrivateDeaths:
    """Return a federation after these cycles, each a process and its crash point, in which its run has continued."""
    deaths = PrivateDeaths(folder, unit)
    with ended_after(deaths.it) as it:
        alive = {"coordinator": True, SITES[0]: True}
        for name in ("coordinator", *SITES):
            deaths.start(name)
        it.wait_for(lambda: deaths.has_run() and it.history().machine(RUN).ledger.version > 0)
        for name, point in cycles:
            for other in alive:
                if other != name and not alive[other]:
                    deaths.start(other)
                    alive[other] = True
            if alive[name]:
                it.kill(name)
            deaths.die(name, point)
            alive[name] = False
        for name in (name for name, is_there in alive.items() if not is_there):
            deaths.start(name)
        reached = it.history().machine(RUN).ledger.version
        it.wait_for(lambda: it.history().machine(RUN).ledger.version > reached)
        deaths.judge()
    return deaths


def main() -> None:
    """Kill as often as asked, and print one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.federation.private_deaths", description=__doc__)
    parser.add_argument("--cycles", type=int, default=54, help="kills in all")
    parser.add_argument("--unit", choices=("client", "example"), default="example", help="of the guarantee")
    given, begun = parser.parse_args(), time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start.install()
    places = [(name, point) for name, points in POINTS.items() for point in points if given.unit in units_of(point)]
    cycles = itertools.islice(itertools.cycle(places), given.cycles)
    with tempfile.TemporaryDirectory(prefix="atoll-deaths-") as folder:
        deaths = killed(Path(folder), given.unit, cycles)
    seconds = round(time.monotonic() - begun, 1)
    print(json.dumps({"deaths": deaths.deaths.total(), "points": len(deaths.deaths), "seconds": seconds}))


def units_of(point: str) -> tuple[str, ...]:
    """Return the units of guarantees in whose runs a point is reached."""
    return ("example",) if point.startswith("agent.noise_") else ("client", "example")


if __name__ == "__main__":
    main()
