"""The supervisor's side of a launcher's process. Without torch."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from atoll.parallel.launch.spec import Spec

DIE_TIMEOUT_S = 10.0


class Launcher:
    """A launcher's process and its ranks, in a separate session: Ctrl-C reaches the supervisor first.

    Args:
        command: the launcher's program and its arguments; its standard input ends with the supervisor.
        environment: further variables of the launcher and its ranks.
        log: the file of its output, and of a rank's until it has a log; None: this process's output.
        on_end: is called with the exit code, on a thread, once the process and all that it has started have ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: IO[bytes] | None = None,
        on_end: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._life = threading.Lock()
        self._on_end = on_end
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.exit_code: int | None = None
        """The exit code, negative for a signal; None: the process lives."""
        self._reaper = threading.Thread(target=self._reap, name=f"launcher-{self.pid}-reaper", daemon=True)
        self._reaper.start()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code; None: the process lives after the timeout."""
        self._reaper.join(timeout_s)
        return self.exit_code

    def terminate(self) -> None:
        """Ask the launcher to end its ranks and itself."""
        with self._life:
            if self.exit_code is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the launcher and all that it has started."""
        with self._life:
            if self.exit_code is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        self._reaper.join(DIE_TIMEOUT_S)

    def _reap(self) -> None:
        """Wait for the end; then kill what it has started, while its process group id cannot be reused."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._life:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.exit_code = self._popen.wait()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._on_end(self.exit_code)


def elastic(spec: Spec) -> tuple[list[str], dict[str, str]]:
    """Return the command of torch elastic's launcher, and the environment of its ranks."""
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", "atoll.parallel.launch", spec.encode()]
    return command, environment_of(spec.nproc)


def environment_of(num_ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of ranks: loopback only, a share of the cores each, a new store after each restart.

    A variable that the user has set stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    # with a shared store, gloo would find the addresses of the dead ranks in it
    wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # DDP warns that it looks for unused parameters; errors are raised anyway
    return {name: value for name, value in wanted.items() if name not in environ}
