"""The errors of a command: an operator's mistakes, all at once, one line each, without a traceback, exit code 2."""

import errno
import os
import re
import sqlite3
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from atoll.aggregation.folders import in_words
from atoll.cli.printing import complain
from atoll.cli.stopping import check

EXIT_FAILED, EXIT_OPERATOR, EXIT_BUG, EXIT_AWAY, EXIT_PIPE = 1, 2, 70, 75, 141
"""Exit codes. 1: a run failed. 2: an operator's mistake. 70: a bug. 75: a disk is full, or a disk, the database or a
site's data are away: try again (EX_TEMPFAIL of sysexits.h). 141: the reader of a pipe has closed it, as a shell reports
SIGPIPE.
"""


class CommandError(Exception):
    """An operator's mistakes, one line each, with the value, what is allowed and the way out."""

    code = EXIT_OPERATOR

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class RunFailed(CommandError):
    """The failure of a run whose settings and task are sound: one of its processes was killed."""

    code = EXIT_FAILED


class TaskFailed(CommandError):
    """The failure of the task's own code, its model, data, loss or metric, wherever it ran."""


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


class Commands(TyperGroup):
    """A group of commands that turns an expected error into lines and an exit code; its help fits the terminal."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, with each paragraph of its help on one line; None: no such command."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in command.help.split("\n\n"))
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and turn an expected error into lines on standard error and an exit code."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            raise _with_value(error) from error
        except BrokenPipeError as error:
            _discard_output()
            raise typer.Exit(EXIT_PIPE) from error
        except (CommandError, ValueError, OSError) as error:
            check()
            if (faults := faults_of(error)) is None:
                raise
            for fault in faults:
                complain(fault)
            raise typer.Exit(code_of(error)) from error


def _with_value(error: Any) -> Any:
    """Return the refusal of an argument with its value in the message, which typer's own messages often lack."""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        error.message = f"got {str(error.__cause__.errors()[0]['input'])[:80]!r}: {error.message}"
    return error


def _discard_output() -> None:
    """Discard what Python still flushes to standard output at its end, where the reader has closed the pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


TEMPORARY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN})
"""Errors of disks that pass by themselves: no room, or a disk, NFS server or FUSE mount that is away. EROFS is none: a
file system that is mounted read-only, or became so after an error, waits for a person."""


def temporary_cause(error: BaseException) -> BaseException | None:
    """Return the error that passes by itself among an error and its causes; None: there is none."""
    from atoll.client.work.worker import DataAway
    from atoll.protocol.durable import DiskFull
    from atoll.server.errors import DatabaseAway
    from atoll.server.identity.authority import AuthorityAway

    found: BaseException | None = error
    while found is not None:
        if isinstance(found, DatabaseAway | DataAway | AuthorityAway | DiskFull):
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
    if isinstance(error, CommandError) and error.code != EXIT_OPERATOR:
        return error.code
    return EXIT_OPERATOR if temporary_cause(error) is None else EXIT_AWAY


def faults_of(error: Exception) -> Sequence[str] | None:
    """Return an operator's mistakes; None: the error is a bug, which keeps its traceback."""
    from atoll.parallel.task.errors import TaskBroken, TaskNotFound
    from atoll.protocol.settings import ConfigError

    if isinstance(error, CommandError | ConfigError):
        return error.faults
    if isinstance(error, OSError):
        return in_words(error).splitlines()
    if isinstance(error, TaskNotFound | TaskBroken):
        return str(error).splitlines()
    return None
