"""Real processes: the `atoll` command as a user starts it, on loopback, ended by pid."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from atoll.protocol.identity.names import Identity, Role
from atoll.server.views.history import History
from benchmarks.dividing import VARIABLE as DIVIDED
from benchmarks.members import equip
from benchmarks.processes import free_address
from tests.cli.invoking import shown
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
ATOLL = str(Path(sys.executable).with_name("atoll"))
TASK = str(Path(__file__).with_name("misbehaving_sites_task.py")) + ":task"
RECORDED = "ATOLL_TEST_RECORD"
ENDLESS_S = 4 * BOUND_S
"""Deadline of a round whose end is not the deadline: the wait of the test is over earlier."""
PATCHED = {DIVIDED: "benchmarks.dividing", RECORDED: "tests.federation.recorded"}
"""Modules that patch an agent before they run the command line, by the variable of the environment that they read."""


class Federation:
    """A coordinator and agents in one folder."""

    def __init__(self, folder, task=TASK):
        self.folder, self.task, self.running = folder, task, {}
        self.address = free_address()

    @property
    def state(self):
        return self.folder / "state"

    def start(self, name, *command, **environment):
        with (self.folder / f"{name}.log").open("ab") as log:
            module = next((found for variable, found in PATCHED.items() if variable in environment), None)
            atoll = [sys.executable, "-m", module] if module else [ATOLL]
            self.running[name] = subprocess.Popen(
                [*atoll, *map(str, command)],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                cwd=ROOT if module else None,
            )
        return self.running[name]

    def coordinator(self, *, environment=(), stay=False, extra=(), **settings):
        keys = {"name": "trouble", "rounds": 2, "coordinator.listen": self.address}
        keys["round.deadline"] = ENDLESS_S
        keys["coordinator.enrol"] = "127.0.0.1:0"
        keys |= {key.replace("__", "."): value for key, value in settings.items()}
        overrides = [part for key, value in keys.items() for part in ("--set", f"{key}={_toml(value)}")]
        return self.start(
            *("coordinator", "coordinator", self.task, "--state", self.state, *overrides),
            *(["--stay"] if stay else []),
            *extra,
            **dict(environment),
        )

    def agent(self, site, *, name="", tasks=None, environment=(), address="", **settings):
        keys = {"exit_when_done": True, "reconnect_max": 0.5, **settings}
        overrides = [part for key, value in keys.items() for part in ("--set", f"{key}={_toml(value)}")]
        command = ("agent", *(tasks or [self.task]), "--site", site, "--coordinator", address or self.address)
        name = name or site  # of the process and its folder: two may have one site
        equip(self.state, self.folder / name, Identity(Role.CLIENT, site))
        return self.start(name, *command, "--state", self.folder / name, *overrides, **dict(environment))

    def kill(self, name):
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def history(self):
        return History(self.state)

    def rounds(self):
        try:
            return self.history().rounds("trouble-1")
        except (OSError, LookupError):
            return []

    def wait_for(self, condition, timeout=BOUND_S, every=0.05):
        """Poll what is on disk; a process that ended with an error ends the wait."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (found := condition()) is not None and found is not False:
                return found
            for name, process in self.running.items():
                assert process.poll() in (None, 0, -signal.SIGKILL), f"{name}: {self.log(name)[-3000:]}"
            time.sleep(every)
        raise AssertionError("timed out:\n" + "\n".join(f"{n}: {self.log(n)[-1500:]}" for n in self.running))

    def wait_for_end(self, name="coordinator", timeout=BOUND_S):
        try:
            return self.running[name].wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(f"{n}: {self.log(n)[-2500:]}" for n in self.running)) from None

    def open_round(self):
        records = self.rounds()
        return records[-1] if records and records[-1].phase == "collecting" else None

    def hold_in_mid_upload(self, agent, round_id, files, num_bytes):
        """Stop an agent when a tenth to eight tenths of its update are there and two others are accepted.

        `SIGCONT` lets it go on. Returns the file of its bytes, one of the pattern `files`.
        """
        process = self.running[agent]
        self.wait_for(lambda: f"uploading the update of round {round_id} " in self.log(agent))
        process.send_signal(signal.SIGSTOP)
        self.wait_for(lambda: (record := self.open_round()) is not None and record.num_reported == 2)

        def is_half_there():
            for path in self.folder.glob(files):
                if num_bytes // 10 < path.stat().st_size < num_bytes * 8 // 10:
                    return path
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            process.send_signal(signal.SIGSTOP)
            return None

        return self.wait_for(is_half_there)

    def show(self, *command):
        """The answer of a command that shows something, run in this process, as JSON."""
        return shown(*command, "--state", self.state)


def _toml(value):
    return str(value).lower() if isinstance(value, bool) else value


def federation(folder, **kwargs):
    """A federation for a block."""
    return ended_after(Federation(folder, **kwargs))


@contextmanager
def ended_after(it):
    """Everything that was started is ended, whatever happens."""
    try:
        yield it
    finally:
        for process in it.running.values():
            process.terminate()
        for process in it.running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
