"""The operator's mistakes: all of them, one line each, without a traceback, exit code 2."""

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

EXIT_OPERATOR, EXIT_BUG = 2, 70


class CommandError(Exception):
    """What was asked for cannot be done; each line says what was found and what is possible."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def without_frames(message: str) -> list[str]:
    """The faults in a message; of a traceback of the task's own code only its end, for its log has the rest."""
    lines = message.splitlines()
    if any(line.startswith(" ") for line in lines):
        return [f"the task cannot be used: {lines[-1]} (more in the worker.log of the run)"]
    return lines


class Commands(TyperGroup):
    """A group of commands that ends with exit code 2 when the operator, or the disk, is at fault."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (CommandError, ValueError, OSError) as error:
            if (faults := _faults_of(error)) is None:
                raise
            for fault in faults:
                typer.echo(f"atoll: {fault}", err=True)
            raise typer.Exit(EXIT_OPERATOR) from error


def _faults_of(error: Exception) -> Sequence[str] | None:
    """None when the error is no operator's: a mistake of ours, which keeps its traceback."""
    from atoll.parallel.errors import TaskNotFound
    from atoll.protocol.settings import ConfigError

    if isinstance(error, CommandError | ConfigError):
        return error.faults
    if isinstance(error, OSError | TaskNotFound):
        return str(error).splitlines()
    return None
