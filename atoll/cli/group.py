"""A group of commands: expected errors become lines and exit codes, and operations report to the terminal."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from atoll.cli.command import Command
from atoll.cli.printing import complain, note
from atoll.cli.waiting import waiting_for
from atoll.operations.faults import Interrupted, RunCrashed, code_of, faults_of
from atoll.operations.reporter import Reporter, reporting_to
from atoll.protocol.signals import ExitCode, interrupting

TERMINAL = Reporter(note, waiting_for, interrupting)
"""The reporter of a command's operations: lines on standard error, or in the log of a service; signals interrupt."""


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
            with reporting_to(TERMINAL):
                return super().invoke(ctx)
        except typer.BadParameter as error:
            raise _with_value(error) from error
        except BrokenPipeError as error:
            _discard_output()
            raise typer.Exit(ExitCode.PIPE) from error
        except Exception as error:
            ctx.ensure_object(Command).check()
            if (faults := faults_of(error)) is None:
                raise
            for fault in faults:
                (note if isinstance(error, RunCrashed | Interrupted) else complain)(fault)
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
