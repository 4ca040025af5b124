"""The process that holds a state directory, by its lock and its announcement, which are read without the database."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.file_lock import Locked, lock_file
from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StateInUse

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def run_folder(path: Path, run_id: RunId) -> Path:
    """Return the folder of a run's files in the state directory of a coordinator or a rank.

    Raises:
        ValueError: the run id is not a safe name of a folder.
    """
    if _RUN_ID.fullmatch(run_id) is None:
        raise ValueError(f"run id {run_id!r} is not 1 to 128 letters, digits, _, . and -, beginning with no . or -")
    return path / "runs" / run_id


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """Process that holds a state directory, with its addresses."""

    address: str
    """host:port for clients."""
    admin_address: str
    """host:port for the operator's commands."""
    pid: int
    is_insecure: bool
    """Whether it runs without certificates and encryption."""


def running_coordinator(path: Path) -> RunningCoordinator | None:
    """Return the process that holds the directory; None: there is none, or it does not listen yet. Takes no lock."""
    try:
        announced = json.loads((path / "coordinator.json").read_text())
        pid, _, started = (path / "lock").read_text().partition(" ")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not pid.isdecimal() or announced["pid"] != int(pid) or _start_time(int(pid)) != started:
        return None
    return RunningCoordinator(announced["address"], announced["admin_address"], int(pid), announced["insecure"])


def is_held(path: Path) -> bool:
    """Return whether a process holds the directory, even before it listens. Takes no lock."""
    try:
        pid, _, started = (path / "lock").read_text().partition(" ")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return pid.isdecimal() and _start_time(int(pid)) == started


def lock_directory(path: Path) -> int:
    """Create a directory for its owner alone, if it does not exist, and lock it.

    Returns:
        The descriptor of the lock, which is held until the descriptor is closed or the process ends.

    Raises:
        StateInUse: another process holds it.
        OSError: it cannot be written.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return lock_file(path / "lock", f"{os.getpid()} {_start_time(os.getpid())}", mode=0o644)
    except Locked as error:
        pid = error.owner.partition(" ")[0] or "unknown"
        raise StateInUse(
            f"{path} is in use by another process ({pid}): stop that one, or choose another state directory"
        ) from error


def _start_time(pid: int) -> str:
    """Return the start time of a process [clock ticks since boot]; empty: there is no such process.

    Process ids are reused; the pair of id and start time is unique.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[19]
