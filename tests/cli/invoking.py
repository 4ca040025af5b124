"""The command line in this process, as a person types it."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from typer.main import get_command

from atoll.cli.commands import app
from atoll.cli.log import Stream

COMMAND: Any = get_command(app)
"""The command line, made once: that takes ten times as long as to refuse a line."""

TINY = Path(__file__).parents[1] / "wire" / "tasks" / "four_numbers_task.py"
"""A task without torch."""


def invoke(*arguments: object) -> Result:
    """Return the outcome of `atoll ARGUMENTS`; an exception that the command line does not catch is raised."""
    logging.root.handlers[:] = [each for each in logging.root.handlers if not isinstance(each, Stream)]  # of a service
    result = CliRunner().invoke(COMMAND, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: object) -> list[str]:
    """Return the faults, one a line, of a command that ends with exit code 2."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    faults = faults_in(result.stderr)
    assert len(faults) == len(told(result.stderr)), result.stderr
    return faults


def told(stderr: str) -> list[str]:
    """Return the lines of standard error without the notes of waits, which a busy machine has anywhere, and starts."""
    note = re.compile(r"waiting for |\d{4}-\d\d-\d\d \S+ (waiting for |.*\bstarts[,;] )")
    return [line for line in stderr.splitlines() if not note.match(line)]


def ran(*arguments: object, code: int = 0) -> Result:
    """Return the outcome of a command that ends with this exit code."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return result


def faults_in(stderr: str) -> list[str]:
    """Return the operator's mistakes of standard error: of a command, and of a service, which has a log."""
    return re.findall(r"^(?:atoll: |.{19} (?:\S+: )?error: )(.*)$", stderr, re.MULTILINE)


def shown(*arguments: object) -> Any:
    """Return the parsed output of a command with --json."""
    return json.loads(ran(*arguments, "--json").stdout)


def said(*arguments: object) -> str:
    """Return the output of a command without --json, as a person reads it."""
    return ran(*arguments).stdout
