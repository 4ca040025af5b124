"""The launch of several training ranks on this machine: `parallel/launch` starts, restarts and ends them."""

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError, RunCrashed, RunFailed
from atoll.operations.requests import TrainRequest
from atoll.operations.training.folder import folder_lock
from atoll.parallel.launch.launcher import Launcher, elastic
from atoll.parallel.launch.line import Json, Line, Listener
from atoll.parallel.launch.rank_fault import take_faults
from atoll.parallel.launch.spec import Spec
from atoll.parallel.trainer.logs import Report
from atoll.parallel.trainer.run import RESULT, Result

POLL_S = 0.1
"""Seconds between two looks for a fault of a rank."""

END_S = 10.0
"""Seconds between SIGTERM and SIGKILL, when the ranks end without saving."""

RANK, CRASH = "atoll.operations.training.rank", "crash"
"""The module of a rank, and the kind of its fault with a traceback; that of others is their exit code."""


def launch(
    request: TrainRequest,
    show: Report,
    times_asked: Callable[[], int] = lambda: 0,
    *,
    log: IO[bytes] | None = None,
) -> Result | None:
    """Train in `request.nproc` ranks, and wait for them.

    When a rank dies, all ranks restart from the newest checkpoint, at most `request.max_restarts` times.

    Args:
        request: the request.
        show: the report of the first rank's events, beside the log; it is called on a thread.
        times_asked: returns how often the ranks were asked to end: once, they save before; twice, they end at once.
        log: the output of the ranks; None: this process's output.

    Returns:
        The result; None: the ranks were asked to end before they had anything to save.

    Raises:
        CommandError: another training writes into the folder; or the training is refused, or has failed.
    """
    with folder_lock(request.folder), tempfile.TemporaryDirectory(prefix="atoll-train-") as name:
        folder, result = Path(name), request.folder / RESULT
        result.unlink(missing_ok=True)
        assert request.nproc is not None
        spec = Spec(
            entry=f"{RANK}:main",
            args=(name, request.encode()),
            nproc=request.nproc,
            max_restarts=request.max_restarts,
            folder=name,
            preload=(RANK,),
        )
        with _Ranks(folder, show) as ranks:
            code = _wait(Launcher(*elastic(spec), log=log), folder, ranks, times_asked)
        if code == 0 and result.exists():
            return Result(**json.loads(result.read_text("utf-8")))
    if times_asked():
        return None
    died = count_of(request.max_restarts, "time")
    raise RunFailed(f"ranks have died more than {died} (--max-restarts); see their output above")


class _Ranks:
    """The line of rank 0, also of one that was restarted: its events, and the request to stop."""

    def __init__(self, folder: Path, show: Report) -> None:
        self._line: Line | None = None
        self._show = show
        self._has_ended = threading.Event()
        self._has_ended.set()
        self.is_asked = self.has_begun = False
        """`has_begun`: the ranks look for the request; until then, they load the task."""
        self._listener = Listener(folder, self._on_line)

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.wait(END_S)  # for the last events
        self._listener.close()

    def ask_to_stop(self) -> None:
        """Ask the ranks to save and end."""
        self.is_asked = True
        if self._line is not None:
            self._line.tell({"op": "stop"})

    def _on_line(self, line: Line, _hello: Json) -> None:
        self._has_ended.clear()
        self._line = line
        if self.is_asked:
            self.ask_to_stop()
        for message in line.messages():
            if "begun" in message:
                self.has_begun = True
            else:
                self._show(message)
        self._has_ended.set()


def _wait(launcher: Launcher, folder: Path, ranks: _Ranks, times_asked: Callable[[], int]) -> int:
    """Wait until all ranks have ended, and return the exit code.

    They are ended after a rank's fault, which would repeat, after a second request, and after the first one while
    they still load the task, as they have nothing to save. A caller that is interrupted lets them save.

    Raises:
        CommandError: a rank's fault.
    """
    try:
        while (code := launcher.wait(POLL_S)) is None:
            _raise_fault_in(folder)
            if (times := times_asked()) and not ranks.is_asked:
                ranks.ask_to_stop()
            if times > 1 or (times and not ranks.has_begun):
                return _end(launcher)
        _raise_fault_in(folder)
        return code
    except KeyboardInterrupt:
        ranks.ask_to_stop()
        if ranks.has_begun:
            launcher.wait()
        raise
    finally:
        if launcher.exit_code is None:
            _end(launcher)


def _raise_fault_in(folder: Path) -> None:
    if found := take_faults(folder):
        kind, lines = found[0].kind, found[0].detail.splitlines()
        raise RunCrashed(*lines) if kind == CRASH else CommandError(*lines, code=int(kind))


def _end(launcher: Launcher) -> int:
    launcher.terminate()
    if (code := launcher.wait(END_S)) is None:
        launcher.kill()
        code = launcher.wait()
    return 1 if code is None else code
