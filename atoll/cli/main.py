"""The program `atoll`."""

import sys

from atoll.cli.command import Command
from atoll.ground.process.loading import keep_modules, loading


def run() -> None:
    """Run the command line, and end this process with its exit code."""
    keep_modules()
    with Command(sys.argv[1:]) as command:
        with loading():
            from atoll.cli.commands import app

        app(obj=command)
