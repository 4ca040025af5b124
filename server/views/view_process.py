"""The computation of `views` in a separate process: with a million members a view takes seconds and gigabytes.

The process replays the journal from disk, as the commands on this machine do, at a lower priority than the rounds. It
writes to an unnamed file, so that a slow reader does not block the next view, and ends with the coordinator.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from atoll.ground.process import crash_points
from atoll.protocol.paging import ALL, Paging
from atoll.protocol.threads import on_thread
from atoll.server.views.history import History
from atoll.server.views.views import View, look

logger = logging.getLogger(__name__)

MAKING_MAX = 2
"""Largest number of views that are made at the same time; others wait."""

MAKING_S = 300.0
PART_BYTES = 256 * 1024
TOLD_BYTES_MAX = 8192
NICENESS = 10
EXIT_UNUSABLE, EXIT_MISSING = 3, 4
COMMAND = (sys.executable, "-P", "-c", "from atoll.server.views.view_process import main; main()")


class Unseen(Exception):
    """Error: a view cannot be made: the state directory cannot be read, or not in time; the message says why."""


class Viewer:
    """Maker of views of one state directory, each in a process.

    Args:
        state: the directory.
        database: the URL of its database; empty: the URL that the directory names.
    """

    def __init__(self, state: Path, database: str = "") -> None:
        self._state, self._database = state, database
        self._turns = asyncio.Semaphore(MAKING_MAX)

    async def look(self, view: View, run: str, number: int, paging: Paging = ALL) -> AsyncGenerator[bytes]:
        """Yield a view as JSON, in chunks; the arguments are the same as for `views.look`.

        Raises:
            LookupError: there is no such run or round.
            Unseen: the state directory cannot be read, or the view takes too long.
        """
        order = {"state": str(self._state), "database": self._database, "view": view, "run": run, "number": number}
        order["paging"] = asdict(paging)
        with TemporaryFile(dir=self._state) as made, TemporaryFile(dir=self._state) as told:
            async with self._turns:
                code = await _make(json.dumps(order).encode() + b"\n", made, told)
            if code:
                raise fault_of(code, told)
            made.seek(0)
            while part := await on_thread(None, made.read, PART_BYTES):
                yield part


async def _make(order: bytes, made: IO[bytes], told: IO[bytes]) -> int:
    """Run the process and return its exit code."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=subprocess.PIPE, stdout=made, stderr=told, env=environment()
    )
    assert process.stdin is not None
    try:
        process.stdin.write(order)  # not in its arguments: a URL may contain a password
        async with asyncio.timeout(MAKING_S):
            return await process.wait()
    except TimeoutError:
        raise Unseen(f"the view takes more than {MAKING_S:g} s: run the command on the coordinator's machine") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.stdin.close()
        await process.wait()


def environment() -> dict[str, str]:
    """Return the environment of a process that reads the state directory, without the coordinator's drills."""
    return {name: value for name, value in os.environ.items() if name != crash_points.VARIABLE}


def fault_of(code: int, told: IO[bytes]) -> Exception:
    """Return the error of a process of `reading_for_the_coordinator`.

    Args:
        code: its exit code, not 0.
        told: its standard error.
    """
    told.seek(max(0, told.seek(0, os.SEEK_END) - TOLD_BYTES_MAX))
    text = told.read().decode(errors="replace").strip()
    if code == EXIT_MISSING:
        return LookupError(text)
    if code == EXIT_UNUSABLE:
        return Unseen(text)
    logger.error("a view could not be made: its process ended with exit code %d:\n%s", code, text)
    return Unseen(f"the view could not be made: {text.rpartition(chr(10))[2]}")


def main() -> None:
    """Read one request (JSON) from standard input, and write the view that it names to standard output."""
    with reading_for_the_coordinator() as order:
        history = History(Path(order["state"]), order["database"])
        found = look(history, View(order["view"]), order["run"], order["number"], Paging(**order["paging"]))
    sys.stdout.buffer.write(json.dumps(found, ensure_ascii=False).encode())


@contextmanager
def reading_for_the_coordinator() -> Iterator[dict[str, Any]]:
    """Read a request from standard input for the block; an error in it becomes an exit code and its message.

    The process has a lower priority than the rounds, and ends with the coordinator.
    """
    os.nice(NICENESS)
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_coordinator, daemon=True).start()
    try:
        yield order
    except LookupError as error:
        if type(error) is not LookupError:
            raise  # a KeyError or an IndexError is a bug
        _end(EXIT_MISSING, error)
    except OSError as error:
        _end(EXIT_UNUSABLE, error)


def _end_with_the_coordinator() -> None:
    while os.read(0, 1):
        pass
    os._exit(EXIT_UNUSABLE)


def _end(code: int, error: Exception) -> None:
    sys.stderr.buffer.write(str(error).encode())
    raise SystemExit(code)
