"""The log of a process on standard error: one line for each event, for a person or a program."""

import json
import logging
import os
import re
import stat
import time
from contextlib import suppress

from atoll.protocol.log_fields import fields_of, trace_of

VARIABLE = "ATOLL_LOG"
"""The environment variable of the form of the log, for the processes that this one starts."""


_PREFIX = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d([+-]\d\d:\d\d)? |atoll: )?"


def message_of(line: str, source: str) -> str:
    """Return the message of a line that a process has written, in its log or before, without time, source and level."""
    return re.sub(rf"^{_PREFIX}({re.escape(source)}: )?((warning|error|critical): )?", "", line)


class _Text(logging.Formatter):
    """Formatter of lines: a local time, the process, a level from `warning` up, the message.

    Where the local time is not UTC, its offset follows: messages that come from other machines have times in UTC.
    """

    def __init__(self, source: str) -> None:
        super().__init__("%(message)s")
        self._source = f"{source}: " if source else ""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as a line; the traceback of an exception follows on separate lines."""
        line = super().format(record)
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        zone = time.strftime("%z", time.localtime(record.created))
        zone = "" if zone == "+0000" else f"{zone[:3]}:{zone[3:]}"
        return f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')}{zone} {self._source}{level}{line}"


class _Json(logging.Formatter):
    """JSON formatter: `time` (UTC), `level`, `process`, `log_fields.FIELDS`, ids of the trace, `logger`, `message`."""

    def __init__(self, process: str, site: str) -> None:
        super().__init__("%(message)s")
        self._process, self._site = process, site

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as a JSON object in one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
        }
        if self._site:
            said["site"] = self._site
        said |= fields_of(record)
        said |= trace_of(said)
        said |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


class Stream(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler of standard error, whose file is opened again at its path after a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self._path = ""
        with suppress(OSError):
            found = os.readlink("/proc/self/fd/2")
            if stat.S_ISREG(os.fstat(2).st_mode) and os.path.samestat(os.stat(found), os.fstat(2)):
                self._path = found

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record; reopen the file if it was rotated."""
        if self._path:
            with suppress(OSError):  # the folder is away, or may not be written to: the older file takes the line
                self._follow()
        super().emit(record)

    def _follow(self) -> None:
        before = os.fstat(2)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), before):
                return
        mode = stat.S_IMODE(before.st_mode)
        opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
        for number in (1, 2):
            if os.path.samestat(os.fstat(number), before):
                os.dup2(opened, number)
        os.close(opened)


def configure(process: str, site: str = "", form: str = "text") -> None:
    """Send Atoll's records from `info` upward, and the warnings of other libraries, to standard error.

    Args:
        process: `coordinator`, `agent`, `rank`, `authority` or `dashboard`.
        site: the name of an agent's site; it follows the time in every line, as several agents may share a terminal.
        form: `text`, lines for a person, or `json`.
    """
    handler = Stream()
    handler.setFormatter(_Json(process, site) if form == "json" else _Text(site))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("atoll").setLevel(logging.INFO)
    os.environ[VARIABLE] = form


def has_log() -> bool:
    """Return whether this process has a log."""
    return any(isinstance(handler, Stream) for handler in logging.root.handlers)


def quiet_grpc() -> None:
    """Keep gRPC's core from writing to standard error.

    It writes one for each call that a server refuses, so that strangers could fill the disk, and one for each handshake
    that fails, which Atoll's log has already. gRPC reads the variable GRPC_VERBOSITY when it is first imported; a value
    that is set stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
