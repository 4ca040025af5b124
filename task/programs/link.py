"""The socket between a server program and its coordinator: calls and answers, each a JSON object on a line.

Any number of threads may call at the same time; an answer names its call. The end of the socket is the end of the
coordinator, and ends the process: the next coordinator starts the program again.
"""

import json
import os
import queue
import socket
import threading
import traceback
from typing import Any

Json = dict[str, Any]

LATE = "it did not answer in time"
"""The error of a message without a reply whose time is over."""

EXIT_ALONE = 70
"""The exit code of a program whose coordinator has gone."""


class Link:
    """The program's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._writing = connection, threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Json]] = {0: queue.SimpleQueue()}
        self._num_calls = 0
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def order(self) -> Json:
        """Return the coordinator's first line: the program to run."""
        return self._answers[0].get()

    def call(self, op: str, **fields: Any) -> Json:
        """Send a call to the coordinator, and wait for its answer."""
        with self._writing:
            self._num_calls += 1
            number, answer = self._num_calls, queue.SimpleQueue[Json]()
            self._answers[number] = answer
            self._send({"call": number, "op": op, **fields})
        found = answer.get()
        del self._answers[number]
        return found

    def tell(self, op: str, **fields: Any) -> None:
        """Send the coordinator a line that has no answer."""
        with self._writing:
            self._send({"op": op, **fields})

    def _send(self, line: Json) -> None:
        self._connection.sendall(json.dumps(line).encode() + b"\n")

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    answer = json.loads(line)
                    self._answers[answer["call"]].put(answer)
        except BaseException:
            traceback.print_exc()
        os._exit(EXIT_ALONE)
