"""A coordinator and two agents as real processes on loopback, driven by the command line alone."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.protocol.identity.names import Identity, Role
from atoll.server.journal.holder import RunningCoordinator, running_coordinator
from benchmarks.members import equip
from tests.cli.invoking import TINY, shown
from tests.waiting import BOUND_S

ATOLL = Path(sys.executable).with_name("atoll")


class Federation:
    """The processes of a test; `state` is the coordinator's state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: object) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(ATOLL), *map(str, arguments)]
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def run_state(self, run: str) -> str:
        return str(shown("run", "show", run, "--state", self.state)["state"])


@contextmanager
def federation(folder: Path, *settings: str) -> Iterator[Federation]:
    """Start a coordinator and two agents, without a run."""
    settings = ("listen=127.0.0.1:0", *settings)
    it = Federation(folder)
    try:
        it.start("coordinator", "coordinator", "--state", it.state, *(f"--set=coordinator.{key}" for key in settings))
        running: RunningCoordinator = wait_for(lambda: running_coordinator(it.state))
        for site in ("a", "b"):
            equip(it.state, it.folder / f"atoll-agent-{site}", Identity(Role.CLIENT, site))
            it.start(site, "agent", f"{TINY}:task", "--site", site, "--coordinator", running.address)
        yield it
    finally:
        for process in it.processes.values():
            process.kill()
            process.wait()


def start_run(it: Federation, name: str, *overrides: str) -> dict[str, Any]:
    """Ask the coordinator for a run of the tiny task."""
    given = [part for override in (f"name={name}", *overrides) for part in ("--set", override)]
    reply: dict[str, Any] = shown("run", "start", f"{TINY}:task", "--state", it.state, *given)
    return reply


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return the first true value of the condition; fail after `BOUND_S`."""
    until = time.monotonic() + BOUND_S
    while not (value := condition()):
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.05)
    return value
