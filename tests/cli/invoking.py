"""Runs the command line in this process, as a person would type it."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from atoll.cli.main import app

TINY = Path(__file__).parents[1] / "wire" / "tasks" / "four_numbers_task.py"
"""A task without torch."""


def invoke(*arguments: object) -> Result:
    """The outcome of `atoll ARGUMENTS`; an exception of ours is raised, not hidden in the result."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(*arguments: object) -> list[str]:
    """The faults of a command that ends with exit code 2, one by one."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.splitlines()
    assert all(line.startswith("atoll: ") for line in lines), result.stderr
    return [line.removeprefix("atoll: ") for line in lines]


def shown(*arguments: object) -> Any:
    """What a command prints with --json."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def said(*arguments: object) -> str:
    """What a command prints for a person."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
