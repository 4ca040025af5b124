"""The supervisor of a server program's process: it starts the process, passes its calls on, and records how it ends.

The process gets one end of a socket pair and no credential. It ends with the coordinator: the socket closes.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.ground.process.log_streams import open_log

Json = dict[str, Any]

LINE_BYTES_MAX = 256 * 2**20
"""Largest size of one call [bytes]: 200 for each of a million messages."""

COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "atoll.task.programs.main")
"""Command of the process; its argument is the descriptor of its socket."""

logger = logging.getLogger(__name__)


class ProgramProcess:
    """Process of one run's program, from one start to the next.

    Args:
        order: the first line that a process gets.
        folder: the current folder of the process, for the files that the program writes.
        log: the file to which its prints are appended.
        on_call: receives a call, which `answer` lets return.
        on_end: receives the program's error ("": it has returned, or died), and whether it died.
    """

    def __init__(
        self,
        order: Json,
        folder: Path,
        log: Path,
        on_call: Callable[[Json], None],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._order, self._folder, self.log = order, folder, log
        self._on_call, self._on_end = on_call, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None: no process lives."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        """Start a process, after the end of the previous one.

        Raises:
            OSError: it cannot be started.
        """
        await self.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with open_log(self.log) as log, theirs:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=environment(),
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        self._send({"call": 0, **self._order})
        self._serving = asyncio.get_running_loop().create_task(self._serve(reader, self._process))

    async def stop(self) -> None:
        """Kill the process and its children, and wait for its end; `on_end` is not called."""
        serving, process, self._serving = self._serving, self._process, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        if process is not None:
            _kill(process)
            await process.wait()
        if self._writer is not None:
            self._writer.close()

    def answer(self, call: int, **fields: Any) -> None:
        """Let a call return."""
        self._send({"call": call, **fields})

    def _send(self, line: Json) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(line).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        error, is_dead = "", True
        try:
            while line := await reader.readline():
                call = json.loads(line)
                if call["op"] in ("returned", "raised"):
                    error, is_dead = call.get("detail", ""), False
                    break
                self._on_call(call)
        except (OSError, ValueError, TypeError, LookupError) as fault:
            logger.warning("the server program's socket broke, or a call of it cannot be met: %r", fault)
        if is_dead:
            _kill(process)
        await process.wait()
        _kill(process)  # its children
        self._on_end(error, is_dead)


def environment() -> dict[str, str]:
    """Return the environment of the process: this process's, without Flower's telemetry.

    String hashes are fixed, so that a program that iterates over a set repeats itself in each process.
    """
    return {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "PYTHONHASHSEED": "0"}


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
