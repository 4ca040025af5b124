"""Kills of the process that a file names (SIGKILL), as a supervisor starts it again and again."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from atoll.drills.troubles import waits

SLACK_S = 1.0
"""Least age of a process over its file at which another process has taken its number [s]: clocks tick in hundredths."""


class NoProcess(Exception):
    """The file names no process now; the message says why."""


def kill_again_and_again(
    path: Path,
    *,
    every_s: float,
    for_s: float,
    seed: int,
    on_event: Callable[..., None],
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Kill the process that a file names at instants drawn from a seed; return how often one was killed.

    Args:
        path: a file with the number of a process, read again each time.
        every_s: mean time between two kills [s].
        for_s: time of all [s].
        seed: of the instants.
        on_event: called with what was done.
        sleep: waits for some seconds.
    """
    killed = 0
    for wait_s in waits(every_s, seed, for_s):
        sleep(wait_s)
        try:
            on_event("killed", pid=(found := kill(path))[0], command=found[1])
        except NoProcess as error:
            on_event("nothing", why=str(error))
        else:
            killed += 1
    return killed


def kill(path: Path) -> tuple[int, str]:
    """Kill the process that a file names; return its number and the name of its program.

    Raises:
        NoProcess: the file names none that is alive, or another process has got its number since.
    """
    pid = _number_in(path)
    try:
        process = os.pidfd_open(pid)  # the number may be another process's a moment later; the descriptor's is not
    except ProcessLookupError:
        raise NoProcess(f"process {pid} has ended") from None
    try:
        command = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
        if _began_at(pid) > path.stat().st_mtime + SLACK_S:
            raise NoProcess(f"process {pid} began after {path} was written: another process has its number")
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        raise NoProcess(f"process {pid} has ended") from None
    except PermissionError:
        raise NoProcess(f"process {pid} is another user's") from None
    finally:
        os.close(process)
    return pid, command


def _number_in(path: Path) -> int:
    try:
        text = path.read_text("ascii")[:100].strip()
        pid = int(text)
    except FileNotFoundError:
        raise NoProcess(f"there is no file {path}") from None
    except OSError as error:
        raise NoProcess(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise NoProcess(f"{path} has no number of a process") from None
    if pid in (1, os.getpid(), os.getppid()) or pid <= 0:
        raise NoProcess(f"process {pid} is none that a drill may kill")
    return pid


def _began_at(pid: int) -> float:
    """Return when a process has begun [s since the epoch]."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    ticks = int(stat.rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    return boot + ticks / os.sysconf("SC_CLK_TCK")
