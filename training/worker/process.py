"""The supervisor of a worker process: blocking calls, for use from threads.

    WorkerCrashed   the process exited: exit code or signal, and the tail of its log
    WorkerHung      it did not answer in time, or outlived its lease; it has been killed
    WorkerError     the task's code failed; the process is intact and continues

User code runs in a separate process because it may crash, hang, leak or hold the GIL, which must not affect the process
that holds the connection. The process is started fresh (never forked), in a separate session, so that Ctrl-C in a
terminal reaches the supervisor first, and a kill reaches all processes that the user's code has started.
"""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from atoll.ground.process.log_streams import open_log
from atoll.task.json_text import to_json
from atoll.training.base.kept_lines import BASES
from atoll.training.worker.interpreter import path_of_atoll

TAIL_BYTES = 3000
LOAD_TIMEOUT_S = 120.0
DIE_TIMEOUT_S = 10.0


class WorkerCrashed(RuntimeError):
    """The worker process exited, or was killed by `kill()` or by a foreign signal."""

    def __init__(self, exit_code: int, log_tail: str) -> None:
        self.exit_code = exit_code
        """The exit code as in subprocess: negative for a signal."""
        self.log_tail = log_tail
        """The last lines of the process in its log."""
        self.ending = f"the worker {_ending(exit_code)}"
        """The exit code or the signal, in words."""
        super().__init__(self.ending + (f"; the end of its log:\n{log_tail}" if log_tail else ""))


class WorkerHung(RuntimeError):
    """The worker did not answer in time; its process was killed."""


class WorkerError(RuntimeError):
    """A failure of the task's code.

    `kind` is the protocol's name of the error, `detail` its text for a person, `said` the sentences that the worker has
    sent to the site before (`told`).
    """

    def __init__(self, kind: str, detail: str, said: Sequence[tuple[int, str]] = ()) -> None:
        self.kind, self.detail, self.said = kind, detail, said
        super().__init__(f"{kind}: {detail}")


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a worker process."""

    python: Path | None = None
    """The interpreter, of a virtual environment with the task's libraries; None: this process's."""
    folder: Path | None = None
    """The current folder of a Flower app's `main()`, which is made; None: this process's."""
    load_timeout_s: float = LOAD_TIMEOUT_S
    """Seconds in which the process must have started and loaded the task."""
    noise: bytes = field(default=b"", repr=False)
    """Key of the noise of requests without a key; empty: there is no secret here."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The settings of a run that its task gets: local settings, number of rounds."""

    local: Mapping[str, Any] = field(default_factory=dict)
    """The values of the run for the task (`given`)."""
    algorithm: str = "fedavg"
    rounds: int = 1
    """The number of rounds for which the values must fit."""
    run_number: int = 0
    """The number of the run, for apps; 0: unknown."""


class Worker:
    """One task of one site, in a process that is started on demand, and again after it has ended.

    Any thread may use any method at any time; calls wait for each other.

    Args:
        task: `module:attribute` or `path/to/file.py:attribute`.
        log_path: the file to which the process's stderr, and all prints of the user's code, are appended. Beside it the
            process keeps the digests of a base's files.
        site: the owner of the data; None for a worker that only evaluates on the server's data.
        run: the run's terms for the task; a task that does not allow them does not load.
        settings: the site's settings for the task.
        threads: number of threads of the process; None: the libraries' choice.
        device: torch's device: "cpu", "cuda", or "auto" for a GPU if there is one.
        environment: the interpreter, the folder of a Flower app's `main()`, the time to load, and the key of noise.
    """

    def __init__(
        self,
        task: str,
        *,
        log_path: Path,
        site: str | None = None,
        run: RunTerms | None = None,
        settings: Mapping[str, Any] | None = None,
        threads: int | None = None,
        device: str = "cpu",
        environment: Environment = Environment(),
    ) -> None:
        self._environment, folder = environment, environment.folder
        self._load = {
            "task": task,
            "site": site,
            "settings": dict(settings or {}),
            **asdict(run or RunTerms()),
            "threads": threads,
            "device": device,
            "folder": None if folder is None else str(folder.absolute()),
            "noise": environment.noise.hex(),
            "bases": str(log_path.absolute().with_name(BASES)),
        }
        self._threads = threads
        self._log_path = log_path
        self._calls = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the living process, or None."""
        process = self._process
        return process.pid if process and process.alive else None

    @property
    def alive(self) -> bool:
        """Whether the process lives."""
        return self.pid is not None

    def start(self) -> None:
        """Start the process and load the task, unless it lives already. Raises as `call`."""
        with self._calls:
            self._running()

    def call(self, op: str, timeout_s: float, **args: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; `worker/main` lists both. Start the process if needed.

        Args:
            op: the request's name.
            timeout_s: the wait for the answer [s]; `tell("extend", ...)` prolongs it. A start is timed separately.
            args: the request's fields; paths as str.

        Raises:
            WorkerCrashed, WorkerHung, WorkerError: as above.
            RuntimeError: the worker is closed.
        """
        with self._calls:
            return self._running().ask(op, timeout_s, args)

    def tell(self, op: str, **args: Any) -> None:
        """Send `stop` or `extend` to the running request, from another thread; without one it has no effect."""
        process = self._process
        if process and process.alive:
            process.tell(op, args)

    def kill(self) -> None:
        """Kill the process and its descendants; a waiting call raises WorkerCrashed at once."""
        process = self._process
        if process:
            process.kill()

    def close(self) -> None:
        """Kill the process, and refuse later calls."""
        self._is_closed = True
        self.kill()

    def _running(self) -> "_Process":
        if self._process and self._process.alive:
            return self._process
        self._check_open()
        process = self._process = _Process(self._log_path, self._threads, self._environment.python)
        try:
            self._check_open()  # close() may have run before this process existed
            self._ask_to_load(process)
        except BaseException:
            process.kill()
            raise
        return process

    def _ask_to_load(self, process: "_Process") -> None:
        try:
            process.ask("load", self._environment.load_timeout_s, self._load)
        except WorkerHung as error:
            raise WorkerHung(
                f"the task {self._load['task']} was not loaded within {self._environment.load_timeout_s:g} s: raise "
                f"the setting load_timeout, if it needs more; its output is in {self._log_path}"
            ) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the worker is closed")


class _Process:
    """An operating system process, from its start to its end."""

    def __init__(self, log_path: Path, threads: int | None, python: Path | None) -> None:
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: it has ended
        self._writing, self._life = threading.Lock(), threading.Lock()
        self._exit_code: int | None = None
        self._until = self._slack_s = math.inf
        self._log_path = log_path
        with open_log(log_path) as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                [python or sys.executable, "-P", "-X", "faulthandler", "-m", "atoll.training.worker.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_variables(threads) if python is None else _variables(threads) | path_of_atoll(log_path.parent),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, name=f"worker-{self.pid}-reader", daemon=True)
        self._reaper = threading.Thread(target=self._reap, name=f"worker-{self.pid}-reaper", daemon=True)
        self._reader.start()
        self._reaper.start()

    @property
    def alive(self) -> bool:
        return self._exit_code is None

    def ask(self, op: str, timeout_s: float, args: Mapping[str, Any]) -> dict[str, Any]:
        budget_s = args.get("budget_s")
        self._slack_s = math.inf if budget_s is None else timeout_s - budget_s
        self._until = time.monotonic() + timeout_s
        try:
            self._send(op, args)
            answer = self._wait(op)
        except BaseException:
            self.kill()  # a late answer must not be taken for the next request's
            raise
        if op == "quit":
            self._reaper.join(DIE_TIMEOUT_S)
            self.kill()
        if "error" in answer:
            raise WorkerError(answer["error"], answer["detail"], answer.get("said", ()))
        return answer

    def tell(self, op: str, args: Mapping[str, Any]) -> None:
        if op == "extend":
            self._until = max(self._until, time.monotonic() + args["budget_s"] + self._slack_s)
        self._send(op, args)

    def kill(self) -> None:
        with self._life:
            if self._exit_code is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        self._reaper.join(DIE_TIMEOUT_S)

    def _send(self, op: str, args: Mapping[str, Any]) -> None:
        assert self._popen.stdin is not None
        line = to_json({"op": op, **args}).encode() + b"\n"
        with self._writing, suppress(BrokenPipeError, ValueError):  # ended, or closed: the reaper reports it
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def _wait(self, op: str) -> dict[str, Any]:
        while True:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise WorkerHung(f"no answer to {op} in time")
            try:
                answer = self._answers.get(timeout=min(left_s, 3600.0))
            except queue.Empty:
                continue  # the time may have been extended meanwhile
            if answer is not None:
                return answer
            assert self._exit_code is not None
            if self._exit_code == -signal.SIGALRM:
                raise WorkerHung(f"{op} outlived its deadline and its lease")
            raise WorkerCrashed(self._exit_code, self._log_tail())

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # an unfinished line is from a process that died in it
                    self._answers.put(json.loads(line))

    def _reap(self) -> None:
        """Wait for the end; then kill its descendants, while its process group id cannot be reused."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._life:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            exit_code = self._popen.wait()
            self._exit_code = exit_code
        self._reader.join(1.0)  # an answer may have arrived just before
        with self._writing, suppress(BrokenPipeError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        self._answers.put(None)

    def _log_tail(self) -> str:
        with self._log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            begin = self._log_start if self._log_start <= end else 0  # it was replaced by another file meanwhile
            log.seek(max(begin, end - TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


def _variables(threads: int | None) -> dict[str, str]:
    return os.environ | {"FLWR_TELEMETRY_ENABLED": "0"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"
