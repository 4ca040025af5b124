"""Atoll as child processes, each with its log: the `atoll` command, or a module of the benchmarks."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.server.errors import StateUnusable
from atoll.server.views.history import History

ROOT = Path(__file__).parents[1]
ATOLL = str(Path(sys.executable).with_name("atoll"))
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_TIMEOUT_S = 60.0


class NotMeasured(RuntimeError):
    """A process that did not do what a measurement needs; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process has used so far."""

    cpu_s: float
    rss_bytes: int
    rss_bytes_max: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Read the usage of a process from /proc."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        resident, most = (1024 * int(status[key].split()[0]) for key in ("VmRSS", "VmHWM"))
        return cls(cpu_s, resident, most)


@dataclass
class Processes:
    """Child processes, which end at the end of the `with` block."""

    folder: Path
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, name: str, command: Iterable[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process, or restart it; its standard output and error go to <name>.log."""
        assert name not in self.running or self.running[name].poll() is not None, f"{name} runs already"
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})},
            )

    def log(self, name: str) -> Path:
        """Return the log of a process."""
        return self.folder / f"{name}.log"

    def last_words(self, name: str, num_lines: int = 15) -> str:
        """Return the last lines of a log."""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self, name: str, seconds: float = 30.0) -> None:
        """Send SIGTERM, and wait for the end.

        Raises:
            NotMeasured: the process does not end in time; its log has the stacks of its threads.
        """
        process = self.running[name]
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # Python's fault handler writes the stacks into its log
            process.wait()
            raise NotMeasured(f"{name} did not end within {seconds:g} s:\n{self.last_words(name, 150)}") from None
        if process.returncode == -signal.SIGALRM:  # it has written its stacks itself (`atoll.cli.command`)
            raise NotMeasured(f"{name} could not end in time:\n{self.last_words(name, 150)}")

    def kill(self, name: str) -> None:
        """Send SIGKILL, which leaves the process no time to flush anything, and wait for its end."""
        self.running[name].kill()
        self.running[name].wait()

    def died(self, name: str) -> bool:
        """Return whether SIGKILL has ended a process; another bad end is an error."""
        code = self.running[name].poll()
        if code not in (None, 0, -signal.SIGKILL):
            raise NotMeasured(f"{name} ended with exit code {code}:\n{self.last_words(name)}")
        return code == -signal.SIGKILL

    def usage(self, name: str) -> Usage:
        """Return the usage of a living process."""
        return Usage.of(self.running[name].pid)

    def __enter__(self) -> Self:
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # so that the `with` block ends cleanly
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


def keep_bytecode() -> None:
    """Let the measured processes write and read bytecode, as an installed Atoll does, whatever the shell has set."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def coordinator_command(*what: str, **settings: object) -> list[str]:
    """Return the command of a coordinator; `round__quorum=1` stands for --set round.quorum=1."""
    return [ATOLL, "coordinator", *what, *_set({"coordinator__enrol": "127.0.0.1:0"} | settings)]


def agent_command(task: str, **settings: object) -> list[str]:
    """Return the command of an agent; settings as for the coordinator."""
    return [ATOLL, "agent", task, *_set(settings)]


def _set(settings: Mapping[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={toml(value)}")]


def toml(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else f'"{value}"'


def wait_for_address(processes: Processes, name: str, state: Path) -> str:
    """Wait until the coordinator listens, and return its address."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        with suppress(StateUnusable, OSError):
            coordinator = History(state).coordinator()
            if coordinator is not None and coordinator.pid == processes.running[name].pid:
                return coordinator.address
        if processes.running[name].poll() is not None:
            break
        time.sleep(0.01)
    raise NotMeasured(f"{name} does not listen:\n{processes.last_words(name)}")


PORTS = range(20_000, 32_000)
"""Ports below the ephemeral range of the kernel, which it gives to no other process by chance."""


_TAKEN = list[socket.socket]()
"""Names of the ports that this process has given away, until it ends."""


def free_address() -> str:
    """Return an unused loopback address, which a restarted coordinator can have again.

    No other process gets it from here meanwhile, also while nothing listens there: the name of a port in Linux's
    abstract namespace is one process's until it ends.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):  # the module's own generator may have been seeded
        name = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, suppress(OSError):
            name.bind(f"\0atoll port {port}")
            probe.bind(("127.0.0.1", port))
            _TAKEN.append(name)
            return f"127.0.0.1:{port}"
        name.close()
    raise NotMeasured(f"no port of {PORTS} is free")
