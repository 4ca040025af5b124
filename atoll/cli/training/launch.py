"""The launch of several training ranks on this machine, which torchrun starts, restarts and ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.aggregation.printable import count_of
from atoll.cli.stopping import INTERRUPTED
from atoll.cli.training.control import Control, Fault
from atoll.cli.training.folder import folder_lock
from atoll.cli.training.request import Request
from atoll.parallel.trainer.run import RESULT, Result

POLL_S = 0.1
"""Seconds between two looks for a fault of a rank."""

END_S = 5.0
"""Seconds between SIGTERM and SIGKILL, when the ranks end without saving."""


def launch(request: Request, *, max_restarts: int) -> Result | Fault:
    """Train in `request.nproc` ranks, and wait for them.

    When a rank dies, all ranks restart from the newest checkpoint, at most `max_restarts` times. The first SIGINT or
    SIGTERM lets them save and end; a second one ends them at once.

    Raises:
        CommandError: another training writes into the folder.
    """
    with folder_lock(request.folder):
        return _launch(request, max_restarts)


def _launch(request: Request, max_restarts: int) -> Result | Fault:
    assert request.nproc is not None
    result = request.folder / RESULT
    result.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="atoll-train-") as folder:
        control = Control(Path(folder))
        command = [
            *(sys.executable, "-m", "atoll.cli.training.torchrun"),
            *("--nnodes=1", f"--nproc-per-node={request.nproc}", f"--max-restarts={max_restarts}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            *("--monitor-interval=0.2", f"--log-dir={folder}"),
            *("-m", "atoll", "train", *request.for_a_rank),
        ]
        environment = os.environ | _environment(request.nproc) | control.environment
        signals: list[int] = []

        def on_signal(number: int, _frame: object) -> None:
            signals.append(number)
            control.request_stop()

        with _handling_signals(on_signal):
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            code = _wait(process, control, signals)
        if fault := control.fault():
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


def _wait(process: "subprocess.Popen[bytes]", control: Control, signals: Sequence[int]) -> int:
    """Wait until all ranks have ended.

    They are ended after a rank's own fault, which would repeat, after a second signal, and after the first one while
    they still load the task, as they have nothing to save.
    """
    try:
        while True:
            try:
                return process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                is_hasty = len(signals) > 1 or (signals and not control.has_begun())
                if is_hasty or control.fault() is not None:
                    return _end(process)
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def _handling_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _environment(num_ranks: int) -> dict[str, str]:
    """Return the environment of the ranks: loopback only, a share of the cores each, a new store after each restart.

    A variable that the user has set stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    # with a shared store, gloo would find the addresses of the dead ranks in it
    wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # DDP warns that it looks for unused parameters; errors are raised anyway
    return {name: value for name, value in wanted.items() if name not in os.environ}
