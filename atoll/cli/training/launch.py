"""The launch of several training ranks on this machine: `parallel/launch` starts, restarts and ends them."""

import json
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.aggregation.printable import count_of
from atoll.cli.stopping import INTERRUPTED
from atoll.cli.training.fault import Fault
from atoll.cli.training.folder import folder_lock
from atoll.cli.training.request import Request
from atoll.parallel.launch.launcher import Launcher, elastic
from atoll.parallel.launch.line import Json, Line, Listener
from atoll.parallel.launch.rank_fault import take_faults
from atoll.parallel.launch.spec import Spec
from atoll.parallel.trainer.run import RESULT, Result
from atoll.protocol.signals import handled_by

POLL_S = 0.1
"""Seconds between two looks for a fault of a rank."""

END_S = 10.0
"""Seconds between SIGTERM and SIGKILL, when the ranks end without saving."""


def launch(request: Request, *, max_restarts: int) -> Result | Fault:
    """Train in `request.nproc` ranks, and wait for them.

    When a rank dies, all ranks restart from the newest checkpoint, at most `max_restarts` times. The first SIGINT or
    SIGTERM lets them save and end; a second one ends them at once.

    Raises:
        CommandError: another training writes into the folder.
    """
    with folder_lock(request.folder), tempfile.TemporaryDirectory(prefix="atoll-train-") as folder:
        result = request.folder / RESULT
        result.unlink(missing_ok=True)
        return _launch(request, max_restarts, Path(folder), result)


def _launch(request: Request, max_restarts: int, folder: Path, result: Path) -> Result | Fault:
    assert request.nproc is not None
    spec = Spec(
        entry="atoll.cli.training.rank:main",
        args=(str(folder), request.encode()),
        nproc=request.nproc,
        max_restarts=max_restarts,
        folder=str(folder),
        preload=("atoll.cli.training.rank",),
    )
    signals: list[int] = []
    with _Stop(folder) as stop:

        def on_signal(number: int, _frame: object) -> None:
            signals.append(number)
            stop.request()

        with handled_by(on_signal):
            code, fault = _wait(Launcher(*elastic(spec)), folder, stop, signals)
    if fault is not None:
        return fault
    if code == 0 and result.exists():
        return Result(**json.loads(result.read_text("utf-8")))
    if signals:
        name = signal.Signals(signals[0]).name
        return Fault(INTERRUPTED, (f"atoll: stopped by {name} before it was saved; the same command goes on",))
    return Fault(
        1,
        (
            f"atoll: ranks have died more than {count_of(max_restarts, 'time')} "
            f"(--max-restarts); see their output above",
        ),
    )


class _Stop:
    """The request to stop, over the line of rank 0, also of one that was restarted after it."""

    def __init__(self, folder: Path) -> None:
        self._line: Line | None = None
        self._is_requested = False
        self.has_begun = False
        """The flag of ranks that look for the request; until then, they load the task."""
        self._listener = Listener(folder, self._on_line)

    def __enter__(self) -> "_Stop":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def request(self) -> None:
        """Ask the ranks to save and end."""
        self._is_requested = True
        if self._line is not None:
            self._line.tell({"op": "stop"})

    def _on_line(self, line: Line, _hello: Json) -> None:
        self._line = line
        if self._is_requested:
            line.tell({"op": "stop"})
        for _ in line.messages():
            self.has_begun = True


def _wait(launcher: Launcher, folder: Path, stop: _Stop, signals: Sequence[int]) -> tuple[int, Fault | None]:
    """Wait until all ranks have ended; return the exit code, and a rank's own fault.

    They are ended after a rank's own fault, which would repeat, after a second signal, and after the first one while
    they still load the task, as they have nothing to save.
    """
    fault: Fault | None = None
    try:
        while (code := launcher.wait(POLL_S)) is None:
            fault = fault or _fault_in(folder)
            if fault is not None or len(signals) > 1 or (signals and not stop.has_begun):
                return _end(launcher), fault
        return code, fault or _fault_in(folder)
    finally:
        if launcher.exit_code is None:
            _end(launcher)


def _fault_in(folder: Path) -> Fault | None:
    found = take_faults(folder)
    return Fault(int(found[0].kind), tuple(found[0].detail.splitlines())) if found else None


def _end(launcher: Launcher) -> int:
    launcher.terminate()
    if (code := launcher.wait(END_S)) is None:
        launcher.kill()
        code = launcher.wait()
    return 1 if code is None else code
