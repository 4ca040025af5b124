"""The operator's mistakes: all of them, one line each, without a traceback, exit code 2."""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

EXIT_FAILED, EXIT_OPERATOR, EXIT_BUG, EXIT_AWAY, EXIT_PIPE = 1, 2, 70, 75, 141
"""75: what it needs is away, and may be back (sysexits.h: EX_TEMPFAIL). 141: as a shell says it of SIGPIPE."""


class CommandError(Exception):
    """What was asked for cannot be done; each line says what was found and what is possible."""

    code = EXIT_OPERATOR

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class RunFailed(CommandError):
    """A run has failed: its task's own code has, or a process of it was killed."""

    code = EXIT_FAILED


_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_OF_OTHERS = "/site-packages/"


def without_frames(message: str) -> list[str]:
    """The faults in a message; of a traceback of the task's own code its end, and where it left that code."""
    lines = message.splitlines()
    if not any(line.startswith(" ") for line in lines):
        return lines
    frames = _FRAME.findall(message)
    places = [f" ({path}, line {number})" for path, number in frames if _OF_OTHERS not in path]
    return [f"the task cannot be used: {lines[-1]}{places[-1] if places else ''}"]


class Commands(TyperGroup):
    """A group of commands that ends with exit code 2 when the operator, or the disk, is at fault; 1: a run failed; 75:
    its database is away. Its help is as wide as the terminal, whatever the width of its source."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None: there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in command.help.split("\n\n"))
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            _discard_output()
            raise typer.Exit(EXIT_PIPE) from error
        except (CommandError, ValueError, OSError) as error:
            if (faults := _faults_of(error)) is None:
                raise
            for fault in faults:
                typer.echo(f"atoll: {fault}", err=True)
            raise typer.Exit(_code_of(error)) from error


def _discard_output() -> None:
    """Whoever closed the pipe has seen enough; what Python still flushes at its end must not fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _code_of(error: Exception) -> int:
    """A database that is away comes back by itself: whoever supervises us shall try again."""
    from atoll.server.errors import DatabaseAway

    if isinstance(error, CommandError):
        return error.code
    return EXIT_AWAY if isinstance(error, DatabaseAway) else EXIT_OPERATOR


def _faults_of(error: Exception) -> Sequence[str] | None:
    """None when the error is no operator's: a mistake of ours, which keeps its traceback."""
    from atoll.parallel.data.public.folder import BadData
    from atoll.parallel.task.errors import TaskNotFound
    from atoll.protocol.settings import ConfigError

    if isinstance(error, CommandError | ConfigError):
        return error.faults
    if isinstance(error, OSError | TaskNotFound | BadData):
        return str(error).splitlines()
    return None
