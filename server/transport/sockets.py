"""The sockets that this process has open. gRPC has no call that ends a connection: it sees that its socket is."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

FOLDER = "/proc/self/fd"

Place = tuple[str, int]
"""Address and port."""


def open_sockets() -> Iterator[tuple[int, str]]:
    """Each one's number, and its name in the kernel, which is no other's."""
    for number in os.listdir(FOLDER):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{FOLDER}/{number}")
            if name.startswith("socket:"):
                yield int(number), name


def connected_to(number: int) -> Place | None:
    """The peer of a connection over IP; None of other sockets. Raises OSError: closed, or not connected."""
    with socket.socket(fileno=os.dup(number)) as copy:
        places = _places(copy)
        return None if places is None else places[1]


def shut_down_if(number: int, is_doomed: Callable[[Place, Place], bool]) -> bool:
    """Shut down a connection over IP if that is so of its own place and its peer's; whether it was.

    Raises:
        OSError: closed, or not connected.
    """
    with socket.socket(fileno=os.dup(number)) as copy:
        places = _places(copy)
        if places is None or not is_doomed(*places):
            return False
        copy.shutdown(socket.SHUT_RDWR)
        return True


def _places(connection: socket.socket) -> tuple[Place, Place] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return _place(connection.getsockname()), _place(connection.getpeername())


def _place(name: tuple[str, int]) -> Place:
    host, port = name[:2]
    return str(host).removeprefix("::ffff:"), int(port)  # gRPC hears IPv4 on both, and names it as IPv4
