"""The errors of an operation: an operator's mistakes, all at once, a sentence each, with the command's exit code."""

import errno
import re
import sqlite3
from collections.abc import Sequence

from atoll.ground.backoff import Temporary
from atoll.ground.folders import in_words
from atoll.protocol.signals import ExitCode


class CommandError(Exception):
    """An operator's mistakes, one line each, with the value, what is allowed and the way out."""

    code: int = ExitCode.OPERATOR

    def __init__(self, *faults: str, code: int | None = None) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults
        if code is not None:
            self.code = code


class RunFailed(CommandError):
    """The failure of a run whose settings and task are sound: one of its processes was killed."""

    code = ExitCode.FAILED


class RunCrashed(RunFailed):
    """The failure of a run by a bug, or the loss of another rank; the faults are the lines of a traceback."""


class Interrupted(CommandError):
    """The end of an operation by a signal, after it has saved its work."""

    code = ExitCode.STOPPED

    def __init__(self) -> None:
        super().__init__("interrupted; the same command resumes it")


class TaskFailed(CommandError):
    """The failure of the task's code, its model, data, loss or metric, wherever it ran."""


_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_LIBRARIES = "/site-packages/"


def without_frames(message: str) -> list[str]:
    """Return the lines of a message; a traceback shrinks to its last line and the innermost line of the task's code."""
    lines = message.splitlines()
    return [f"the task cannot be used: {raised(message)}"] if any(line.startswith(" ") for line in lines) else lines


def raised(traceback: str) -> str:
    """Return the last line of a traceback, which may lack its beginning, and the innermost line of the task's code."""
    places = [f" ({path}, line {number})" for path, number in _FRAME.findall(traceback) if _LIBRARIES not in path]
    return f"{traceback.splitlines()[-1]}{places[-1] if places else ''}"


TEMPORARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN})
"""Errors of disks that pass by themselves: no room, or a disk, NFS server or FUSE mount that is away. EROFS is none: a
file system that is mounted read-only, or became so after an error, waits for a person."""


def temporary_cause(error: BaseException) -> BaseException | None:
    """Return the error that passes by itself among an error and its causes; None: there is none."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, Temporary):
            return found
        if isinstance(found, OSError) and found.errno in TEMPORARY:
            return found
        code = getattr(found, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return found
        found = found.__cause__
    return None


def code_of(error: Exception) -> int:
    """Return the exit code of an error; with 75 a service manager starts the command again."""
    if isinstance(error, CommandError) and error.code != ExitCode.OPERATOR:
        return error.code
    return ExitCode.OPERATOR if temporary_cause(error) is None else ExitCode.AWAY


def faults_of(error: Exception) -> Sequence[str] | None:
    """Return an operator's mistakes; None: the error is a bug, which keeps its traceback."""
    from atoll.protocol.settings import ConfigError
    from atoll.server.errors import OperatorError
    from atoll.task.errors import TaskBroken, TaskNotFound

    if isinstance(error, CommandError | ConfigError):
        return error.faults
    if isinstance(error, OperatorError):
        return without_frames(str(error))
    if isinstance(error, OSError):
        return in_words(error).splitlines()
    if isinstance(error, TaskNotFound | TaskBroken):
        return str(error).splitlines()
    return None
