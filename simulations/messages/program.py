"""The process of a server program, started as by a coordinator; the simulator waits for its calls, and answers them."""

import json
import os
import queue
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.server.programs.process import COMMAND, environment

Json = dict[str, Any]
Lines = queue.SimpleQueue["tuple[Program, Json | None] | None"]
"""Lines of all processes of a run's program; None for a line: its socket has closed. None: a wake-up."""


class Program:
    """Process of the server program.

    Args:
        order: the first line sent to it.
        folder: its current folder, for the files that it writes.
        log: the file to which its prints are appended.
        lines: receives each of its lines, from a thread.
    """

    def __init__(self, order: Json, folder: Path, log: Path, lines: Lines) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._connection, theirs = socket.socketpair()
        with log.open("ab") as prints, theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                cwd=folder,
                env=environment(),
                start_new_session=True,
            )
        self.answer(0, **order)
        threading.Thread(target=self._read, args=(lines,), name="program", daemon=True).start()

    def answer(self, call: int, **fields: Any) -> None:
        """Answer a call."""
        with suppress(OSError):  # it has died: the end of its lines reports this
            self._connection.sendall(json.dumps({"call": call, **fields}).encode() + b"\n")

    def stop(self) -> None:
        """Kill the process and its children, and wait for its end."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _read(self, lines: Lines) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as received:
            for line in received:
                lines.put((self, json.loads(line)))
        lines.put((self, None))
