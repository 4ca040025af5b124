"""Standard streams that lead to a log, whose disk may be full."""

import io
import sys
from contextlib import suppress
from typing import Any

from atoll.aggregation.folders import finds_no_room


class LogFile(io.FileIO):
    """A log that drops what its disk has no room for: a lost line ends no training, and hides no fault that it told."""

    def write(self, data: Any) -> int:
        """Write bytes; return their number also where there is no room."""
        try:
            return super().write(data)
        except OSError as error:
            if not finds_no_room(error):
                raise
            return memoryview(data).nbytes


def write_to_log() -> None:
    """Let `sys.stdout` and `sys.stderr` write each line to the logs behind the descriptors 1 and 2."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        with suppress(OSError):
            old.flush()
        log = io.BufferedWriter(LogFile(fd, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(log, old.encoding, "backslashreplace", line_buffering=True))
