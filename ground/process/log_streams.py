"""Standard streams that write to a log of bounded size, whose disk may be full."""

import io
import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from atoll.ground.folders import finds_no_room

LOG_BYTES_MAX = 8 << 20
"""Size above which the content of a log becomes `NAME.1` [bytes], of which no more than this is kept."""

LOOK_S = 1.0
"""Interval at which a process checks the size of its log [s]."""


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to it; a large one becomes `NAME.1` first."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_name(path.name + ".1"))
    return path.open("ab")


class LogFile(io.FileIO):
    """A stream that drops lines on a full disk instead of raising: a lost line must not end a training."""

    def write(self, data: Any) -> int:
        """Write bytes; return their number also where there is no room."""
        try:
            return super().write(data)
        except OSError as error:
            if not finds_no_room(error):
                raise
            return memoryview(data).nbytes


def write_to_log() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that write each line to the logs at descriptors 1 and 2.

    While the process lives, the file behind the descriptor 2 stays bounded, also of what its children write. It must
    have been opened to append.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        with suppress(OSError):
            old.flush()
        log = io.BufferedWriter(LogFile(fd, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(log, old.encoding, "backslashreplace", line_buffering=True))
    if stat.S_ISREG(os.fstat(2).st_mode):
        threading.Thread(target=_keep_bounded, args=(2,), name="log", daemon=True).start()


def _keep_bounded(fd: int) -> None:
    path = os.readlink(f"/proc/self/fd/{fd}")
    never = threading.Event()
    while not never.wait(LOOK_S):
        if (size := os.fstat(fd).st_size) > LOG_BYTES_MAX:
            with (
                suppress(OSError),
                open(path, "rb") as log,
                open(f"{path}.1", "wb") as older,
            ):  # a full disk, or deleted
                log.seek(size - LOG_BYTES_MAX)
                older.write(log.read(LOG_BYTES_MAX))
            os.ftruncate(fd, 0)
