"""The control line between a supervisor and rank 0: one connection, JSON messages, in either direction. Without torch.

The supervisor listens, and writes `line.json` into a shared folder: the address and a secret, readable by its user
alone. Rank 0 dials, both prove that they know the secret (HMAC, which never shows it), and rank 0 says hello.
The end of either side is the end of the connection. A newer one replaces it: the ranks were restarted.
"""

import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from atoll.task.json_text import to_json

LINE, SOCKET = "line.json", "line.socket"

SOCKET_BYTES_MAX = 100
"""Length of the path of a socket [bytes]; most systems allow 104 to 108."""

MESSAGE_BYTES_MAX = 64 << 20
"""Size of the largest message: the pieces of 1,024 parts."""

PROVE_S = 10.0
"""Seconds in which a peer must prove that it knows the secret."""

RETRY_S = 0.1

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The supervisor's end of the line."""

    address: str
    """`unix:PATH`, or `HOST:PORT`."""
    secret: str

    def write(self, folder: Path) -> None:
        """Write the place into a folder, readable by this user alone; complete or not at all."""
        handle, name = tempfile.mkstemp(prefix="line-", dir=folder)  # mode 0600
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({"address": self.address, "secret": self.secret}, file)
        os.replace(name, folder / LINE)

    @classmethod
    def read(cls, folder: Path) -> "Place":
        """Read the place (address and secret) that the supervisor has written into a folder."""
        found = json.loads((folder / LINE).read_text("utf-8"))
        return cls(found["address"], found["secret"])


class Line:
    """One end of a connected line; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()

    def send(self, message: Json) -> None:
        """Send a JSON message to the other end.

        Raises:
            OSError: the other end is gone.
        """
        with self._sending:
            self._connection.send_bytes(to_json(message).encode())

    def tell(self, message: Json) -> None:
        """Send a message, unless the other end is gone."""
        with suppress(OSError):
            self.send(message)

    def messages(self) -> Iterator[Json]:
        """Yield the messages of the other end until it is gone; on one thread."""
        while True:
            try:
                message = json.loads(self._connection.recv_bytes(MESSAGE_BYTES_MAX))
            except (EOFError, OSError):
                return
            yield message

    def close(self) -> None:
        """End the connection: the other end sees it at once."""
        with suppress(OSError):  # a thread that reads keeps the descriptor in use
            peer = socket.socket(fileno=os.dup(self._connection.fileno()))
            peer.shutdown(socket.SHUT_RDWR)
            peer.close()


class Listener:
    """The supervisor's end: the address in a folder, and a thread that takes one connection after the other.

    Args:
        folder: the folder of both ends.
        on_line: receives each connected line with rank 0's hello, on a thread.
        listen: `HOST:PORT` for ranks on other machines (port 0: any); empty: a Unix socket of this machine.
    """

    def __init__(self, folder: Path, on_line: Callable[[Line, Json], None], listen: str = "") -> None:
        self._on_line, self._socket_folder = on_line, ""
        if listen:
            host, _, port = listen.rpartition(":")
            self._socket = socket.create_server((host, int(port)))
            address = f"{host or socket.gethostname()}:{self._socket.getsockname()[1]}"
        else:
            path = str(folder.absolute() / SOCKET)
            if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
                self._socket_folder = tempfile.mkdtemp(prefix="atoll-line-")
                path = f"{self._socket_folder}/{SOCKET}"
            Path(path).unlink(missing_ok=True)  # of a supervisor that was killed
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(path)
            self._socket.listen()
            address = f"unix:{path}"
        self._place = Place(address, secrets.token_hex(32))
        self._place.write(folder)
        threading.Thread(target=self._accept, name="line-listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and remove the Unix socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._socket_folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(peer,), name="line-welcome", daemon=True).start()

    def _welcome(self, peer: socket.socket) -> None:
        """Authenticate a peer by the shared secret, and pass its line on to `on_line`."""
        connection = _connection(peer, PROVE_S)
        try:
            deliver_challenge(connection, self._place.secret.encode())
            answer_challenge(connection, self._place.secret.encode())
            hello = json.loads(connection.recv_bytes(MESSAGE_BYTES_MAX))
        except (AuthenticationError, EOFError, OSError, ValueError, AssertionError):
            connection.close()
            return
        _wait_at_most(connection, 0.0)
        self._on_line(Line(connection), hello)


def dial(folder: Path, hello: Json, timeout_s: float) -> Line:
    """Dial the supervisor of a folder, again and again until it answers; rank 0 calls it.

    Raises:
        TimeoutError: it has not answered.
    """
    until, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        try:
            return _dialled(Place.read(folder), hello)
        except (
            OSError,
            EOFError,
            ValueError,
            AuthenticationError,
            AssertionError,
        ) as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nothing answers at the address in {folder / LINE}: {error}") from error
        pause.wait(RETRY_S)


def _dialled(place: Place, hello: Json) -> Line:
    if place.address.startswith("unix:"):
        peer = socket.socket(socket.AF_UNIX)
        with _closed_on_error(peer):
            peer.settimeout(PROVE_S)
            peer.connect(place.address.removeprefix("unix:"))
    else:
        host, _, port = place.address.rpartition(":")
        peer = socket.create_connection((host, int(port)), PROVE_S)
    connection = _connection(peer, PROVE_S)
    answer_challenge(connection, place.secret.encode())
    deliver_challenge(connection, place.secret.encode())
    _wait_at_most(connection, 0.0)
    line = Line(connection)
    line.send(hello)
    return line


@contextmanager
def _closed_on_error(peer: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        peer.close()
        raise


def _connection(peer: socket.socket, timeout_s: float) -> Connection:
    """Return a socket as a connection of messages, which waits at most `timeout_s` for each."""
    peer.settimeout(None)
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(peer.detach())
    _wait_at_most(connection, timeout_s)
    return connection


def _wait_at_most(connection: Connection, timeout_s: float) -> None:
    """Bound the wait for a message; 0: wait for ever."""
    peer = socket.socket(fileno=os.dup(connection.fileno()))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout_s), 0))
    peer.close()
