"""The computation of `views` in a separate process: with a million members a whole list takes seconds and gigabytes.

The process reads the journal from disk, as the commands on this machine do, at a lower priority than the rounds. It
answers one request after the other, and ends when none has come for a minute, or with the coordinator. A second process
answers while the first is busy, and ends after its answer. An answer is spooled to an unnamed file, so that a slow
reader does not block the next view.
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
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Any, Self

from atoll.ground.process import crash_points
from atoll.protocol.paging import ALL, Paging
from atoll.protocol.threads import on_thread
from atoll.server.views.history import History
from atoll.server.views.views import View, look

logger = logging.getLogger(__name__)

MAKING_MAX = 2
"""Largest number of views that are made at the same time; others wait."""

MAKING_S = 300.0
IDLE_S = 60.0
"""Time after which a process without a request ends [s]."""

KEPT_BYTES_MAX = 16_000_000
"""Size of an answer after which its process ends, as it holds the memory of it [bytes]."""

PART_BYTES = 256 * 1024
TOLD_BYTES_MAX = 8192
NICENESS = 10
EXIT_UNUSABLE, EXIT_MISSING = 3, 4
COMMAND = (sys.executable, "-P", "-c", "from atoll.server.views.view_process import main; main()")


class Unseen(Exception):
    """Error: a view cannot be made: the state directory cannot be read, or not in time; the message says why."""


class Viewer:
    """Maker of views of one state directory.

    Args:
        state: the directory.
        database: the URL of its database; empty: the URL that the directory names.
    """

    def __init__(self, state: Path, database: str = "") -> None:
        self._state, self._database = state, database
        self._turns = asyncio.Semaphore(MAKING_MAX)
        self._kept: _Maker | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._endings = set[asyncio.Task[None]]()

    async def look(self, view: View, run: str, number: int, paging: Paging = ALL) -> AsyncGenerator[bytes]:
        """Yield a view as JSON, in chunks; the arguments are the same as for `views.look`.

        Raises:
            LookupError: there is no such run or round.
            Unseen: the state directory cannot be read, or the view takes too long.
        """
        order = {"state": str(self._state), "database": self._database, "view": view, "run": run, "number": number}
        order["paging"] = asdict(paging)
        with TemporaryFile(dir=self._state) as made:
            async with self._turns:
                await self._make(json.dumps(order).encode() + b"\n", made)
            made.seek(0)
            while part := await on_thread(None, made.read, PART_BYTES):
                yield part

    async def _make(self, order: bytes, made: IO[bytes]) -> None:
        """Write the answer to an order to a file, by the idle process or by a new one."""
        maker, self._kept = self._kept, None
        if self._idle is not None:
            self._idle.cancel()
        try:
            async with asyncio.timeout(MAKING_S):
                if maker is not None and not await maker.begins(order):  # it died while it was idle
                    await maker.end()
                    maker = None
                if maker is None:
                    maker = await _Maker.started(self._state)
                    if not await maker.begins(order):
                        raise await maker.fault()
                await maker.answer(made)
        except TimeoutError:
            what = f"the view takes more than {MAKING_S:g} s: run the command on the coordinator's machine"
            raise Unseen(what) from None
        finally:
            if maker is not None:
                is_small = made.tell() <= KEPT_BYTES_MAX
                if self._kept is None and maker.is_ready and is_small:
                    self._keep(maker)
                else:
                    await maker.end()

    def _keep(self, maker: "_Maker") -> None:
        def end() -> None:
            if self._kept is maker:
                self._kept = None
                ending = asyncio.ensure_future(maker.end())
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

        self._kept = maker
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, end)

    async def close(self) -> None:
        """End the idle process."""
        maker, self._kept = self._kept, None
        if self._idle is not None:
            self._idle.cancel()
        if maker is not None:
            await maker.end()
        await asyncio.gather(*self._endings)


class _Maker:
    """Process that answers orders, one after the other."""

    def __init__(self, process: asyncio.subprocess.Process, told: IO[bytes]) -> None:
        self._process, self._told, self._head = process, told, b""
        self.is_ready = True
        """Whether the last answer has come whole, and the process can take a further order."""

    @classmethod
    async def started(cls, state: Path) -> Self:
        """Start the process."""
        told = TemporaryFile(dir=state)  # noqa: SIM115 - `end` closes it
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, env=environment()
            )
        except BaseException:
            told.close()
            raise
        return cls(process, told)

    async def begins(self, order: bytes) -> bool:
        """Send an order, and wait until its answer begins; return False if the process ends first."""
        self.is_ready = False
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):
            self._process.stdin.write(order)  # not in its arguments: a URL may contain a password
            await self._process.stdin.drain()
        self._head = await self._process.stdout.readline()
        return self._head.endswith(b"\n")

    async def fault(self) -> Exception:
        """Return the error of the process, which has ended without an answer."""
        return fault_of(await self._process.wait(), self._told)

    async def answer(self, made: IO[bytes]) -> None:
        """Write the answer to the last order to a file.

        Raises:
            LookupError: there is no such run or round.
            Unseen: the state directory cannot be read, or the process has died.
        """
        stdout = self._process.stdout
        assert stdout is not None
        code, left = map(int, self._head.split())
        while left:
            if not (part := await stdout.read(min(left, PART_BYTES))):
                raise await self.fault()
            await on_thread(None, made.write, part)
            left -= len(part)
        self.is_ready = True
        if code:
            made.seek(0)
            raise fault_of(code, made)

    async def end(self) -> None:
        """End the process, whatever it does."""
        with suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        while await self._process.stdout.read(PART_BYTES):  # the rest in the pipe, so that asyncio closes it
            pass
        await self._process.wait()
        self._told.close()


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
    """Read requests (JSON, one a line) from standard input, and write the views that they name to standard output.

    Before each answer is a line with its exit code, 0 for a view, and its number of bytes.
    """
    os.nice(NICENESS)
    histories: dict[tuple[str, str], History] = {}
    for order in _orders():
        code = 0
        try:
            place = order["state"], order["database"]
            history = histories[place] = histories.get(place) or History(Path(place[0]), place[1])
            paging = Paging(**order["paging"])
            found = look(history, View(order["view"]), order["run"], order["number"], paging)
            answer = json.dumps(found, ensure_ascii=False).encode()
            del found
        except (LookupError, OSError) as error:
            if isinstance(error, KeyError | IndexError):
                raise  # a bug
            code, answer = (EXIT_MISSING if isinstance(error, LookupError) else EXIT_UNUSABLE), str(error).encode()
        sys.stdout.buffer.write(b"%d %d\n" % (code, len(answer)))
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _orders() -> Iterator[dict[str, Any]]:
    """Yield the requests as they come; the process ends with standard input, also while it computes a view."""
    lines = SimpleQueue[bytes]()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(EXIT_UNUSABLE)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


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
