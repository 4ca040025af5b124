"""The side of the process that starts a command."""

import _posixsubprocess
import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.warm.commands import PATH, Call, hides_nothing, program_of, read_at_start

COMMAND_BYTES = 4096
"""The room for a command line in a zygote's own, which is what /proc shows."""

COLD = "ATOLL_COLD_START"
"""The environment variable with which a command, and all that it starts, begins by an exec."""

NAME = "atoll zygote"
"""A zygote's name in /proc/PID/comm."""

SYS_CLONE = {"x86_64": 56, "aarch64": 220}

ROOT = Path(__file__).parents[2]

exec_by_system: Callable[..., int] = _posixsubprocess.fork_exec


class Zygote:
    """The starting process's side of a zygote.

    Args:
        connection: to the zygote, which is a child of this process.
        environment: with which the interpreter of the zygote has started.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection, self._environment = connection, read_at_start(environment)
        self._path = environment.get(PATH, "")
        self._process, self._lock = os.getpid(), threading.Lock()

    def start(self, call: Call) -> int | None:
        """Start the command of a call and return its process id; None: it needs an exec."""
        environment = _environment_of(call)
        program = program_of([os.fsdecode(arg) for arg in call.args])
        if program is None or not self._is_possible(call, environment):
            return None
        streams = (call.stdin, call.stdout, call.stderr)
        places = {place: place if fd == -1 else fd for place, fd in enumerate(streams)}
        places |= {fd: fd for fd in call.pass_fds if fd != call.errors}
        order = {
            "program": program,
            "environment": environment,
            "places": [*places],
            "umask": _umask(),
            "session": call.start_new_session,
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
            "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), _folder(call.cwd) as folder:
            return self._ask(json.dumps(order).encode(), [folder, *places.values()])
        return None

    def _ask(self, order: bytes, fds: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._connection, [order], fds)
            answer = self._connection.recv(8)
        if not answer:
            raise RuntimeError("the zygote of this process has ended")
        return int.from_bytes(answer, "big")

    def _is_possible(self, call: Call, environment: Mapping[str, str]) -> bool:
        unset = (None, -1)
        return (
            os.getpid() == self._process
            and not environment.get(COLD)
            and read_at_start(environment) == self._environment
            and self._has_path(environment.get(PATH, ""))
            and call.close_fds
            and call.preexec is None
            and all(each in unset for each in (call.process_group, call.gid, call.gids, call.uid, call.umask))
        )

    def _has_path(self, path: str) -> bool:
        return path == self._path or (not self._path and hides_nothing(path))


def _environment_of(call: Call) -> dict[str, str]:
    if call.env is None:
        return dict(os.environ)
    pairs = (os.fsdecode(pair).partition("=") for pair in call.env)
    return {name: value for name, _, value in pairs}


def _umask() -> int:
    """Return the umask, without changing it for a moment as `os.umask` does."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)


@contextmanager
def _folder(cwd: Any) -> Iterator[int]:
    descriptor = os.open("." if cwd is None else cwd, os.O_PATH | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def install() -> None:
    """Start commands of Atoll from a zygote from now on.

    Nothing on another system than Linux, if everything is to start cold, and with more than one thread: an import of
    NumPy starts the others, which a fork does not have.
    """
    is_possible = (
        sys.platform == "linux" and os.uname().machine in SYS_CLONE and os.environ.get("OMP_NUM_THREADS") == "1"
    )
    if not is_possible or os.environ.get(COLD):
        return
    start = _Lazily({**os.environ})
    let_commands_start_by(lambda: start.zygote)


class _Lazily:
    """The zygote of this process, which begins with the first command."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment, self._lock = environment, threading.Lock()
        self._process = os.getpid()
        self._zygote: Zygote | None = None

    @property
    def zygote(self) -> Zygote | None:
        with self._lock:
            if self._zygote is None and os.getpid() == self._process:
                self._zygote = self._begun()
            return self._zygote

    def _begun(self) -> Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            started = subprocess.Popen(
                [sys.executable, "-m", "tests.warm.zygote", " " * COMMAND_BYTES],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                env=self._environment,
                cwd=ROOT,
            )
        atexit.register(ours.close)
        started.returncode = 0  # it ends with this process: Python need not warn that it still runs
        return Zygote(ours, self._environment)


def let_commands_start_by(zygote: Callable[[], Zygote | None]) -> None:
    def fork_exec(*given: Any) -> int:
        call = Call(*given[: len(Call._fields)])
        if program_of([os.fsdecode(arg) for arg in call.args]) is None or (warm := zygote()) is None:
            return exec_by_system(*given)
        pid = warm.start(call)
        return exec_by_system(*given) if pid is None else pid

    for module, name in ((_posixsubprocess, "fork_exec"), (subprocess, "_fork_exec")):
        setattr(module, name, fork_exec)


def is_zygote(process: int) -> bool:
    """Return whether a process is a zygote."""
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip() == NAME
    return False
