"""The end of everything that a test run or a benchmark has started, however it ends itself, SIGKILL included.

`watch` marks this process's environment, which every descendant inherits, whatever session or group it moves to, and
starts a watcher in a session of its own. The watcher waits for the end of this process (pidfd_open) and then kills what
carries the mark. A kernel without pidfds (before Linux 5.3) is asked twice a second instead.

    python -m benchmarks.reaper PID MARK    # the watcher
"""

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

VARIABLE = "ATOLL_STARTED_BY"
"""The marks of the watched processes among the ancestors, separated by colons."""

ROUNDS = 20
"""The looks at all processes: one that is killed may have started another between two of them."""


def watch() -> None:
    """Let no descendant of this process outlive it; from the second call on nothing happens."""
    mine = f"{os.getpid()}.{uuid.uuid4().hex[:8]}"
    marks = os.environ.get(VARIABLE, "").split(":")
    if any(mark.startswith(f"{os.getpid()}.") for mark in marks):
        return
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), mine]
    nothing = subprocess.DEVNULL
    watcher = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)
    watcher.returncode = 0  # it outlives this process: Python need not warn that it still runs
    os.environ[VARIABLE] = ":".join(mark for mark in [*marks, mine] if mark)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment carries a mark, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with suppress(OSError):  # it has ended, or is another user's
            variables = path.read_bytes().split(b"\0")
            if pid != os.getpid() and any(
                mark.encode() in variable for variable in variables if variable.startswith(VARIABLE.encode())
            ):
                found.append(pid)
    return found


def kill_marked(mark: str) -> None:
    """Kill what carries a mark until nothing does."""
    for _ in range(ROUNDS):
        found = marked(mark)
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def wait_for_end(pid: int) -> None:
    """Return when a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.5)
        return
    select.select([descriptor], [], [])


def main() -> None:
    """Run the watcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the watched process, and thereby this one
    wait_for_end(int(sys.argv[1]))
    kill_marked(sys.argv[2])


if __name__ == "__main__":
    main()
