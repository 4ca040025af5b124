"""Shows `views` from a process of its own: of a run with a million members one takes seconds, and gigabytes.

The process replays what is on disk, as the commands on this machine do, with less of the processor than rounds have.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from atoll.protocol import steps
from atoll.server.history import History
from atoll.server.views import View, look

LOOKS_MAX = 2
"""At one time; others wait."""

PART_BYTES = 256 * 1024
TOLD_BYTES_MAX = 4096
NICENESS = 10
EXIT_UNUSABLE, EXIT_MISSING = 3, 4
COMMAND = (sys.executable, "-P", "-c", "from atoll.server.viewer import main; main()")


class Unseen(Exception):
    """The state directory cannot be looked at; the message says why."""


class Viewer:
    """Looks at one state directory.

    Args:
        state: the directory.
        database: its URL; empty: what the directory says.
    """

    def __init__(self, state: Path, database: str = "") -> None:
        self._state, self._database = state, database
        self._turns = asyncio.Semaphore(LOOKS_MAX)

    async def look(self, view: View, run: str, number: int) -> AsyncGenerator[bytes]:
        """A view as JSON, in parts; the arguments are those of `views.look`.

        Raises:
            LookupError: there is no such run or round.
            Unseen: the state directory cannot be read.
        """
        order = {"state": str(self._state), "database": self._database, "view": view, "run": run, "number": number}
        environment = {name: value for name, value in os.environ.items() if name != steps.VARIABLE}
        async with self._turns:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
            assert process.stdin
            assert process.stdout
            assert process.stderr
            try:
                process.stdin.write(json.dumps(order).encode())  # not in its arguments: a URL may hold a password
                process.stdin.close()
                while part := await process.stdout.read(PART_BYTES):
                    yield part
                told = (await process.stderr.read(TOLD_BYTES_MAX)).decode(errors="replace").strip()
                code = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if code == EXIT_MISSING:
            raise LookupError(told)
        if code:
            raise Unseen(told if code == EXIT_UNUSABLE else f"the viewer has ended with {code}: {told[-300:]}")


def main() -> None:
    """The process: an order on standard input, its view on standard output."""
    os.nice(NICENESS)
    order = json.load(sys.stdin)
    try:
        history = History(Path(order["state"]), order["database"])
        found = look(history, View(order["view"]), order["run"], order["number"])
    except LookupError as error:
        if type(error) is not LookupError:
            raise  # a KeyError or an IndexError is ours
        _end(EXIT_MISSING, error)
    except OSError as error:
        _end(EXIT_UNUSABLE, error)
    json.dump(found, sys.stdout, ensure_ascii=False)


def _end(code: int, error: Exception) -> None:
    print(error, file=sys.stderr)
    raise SystemExit(code)
