"""The open sockets of this process.

gRPC has no call that ends a connection, but notices that its socket was shut down.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

from atoll.protocol.wire.channel import UNSENT_BYTES

FOLDER = "/proc/self/fd"

Place = tuple[str, int]
"""Address and port."""

_LEFT = frozenset({7, 8, 9, 11})
"""States of a connection whose peer has ended it: closed, close-wait, last-ack, closing (`tcp_states.h`)."""


def open_sockets() -> Iterator[tuple[int, str]]:
    """Yield each socket's number, and its name in the kernel, which is unique."""
    for number in os.listdir(FOLDER):
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{FOLDER}/{number}")
            if name.startswith("socket:"):
                yield int(number), name


def connected_to(number: int) -> Place | None:
    """Return the peer of a connection over IP; None for other sockets.

    Raises:
        OSError: the socket is closed, or not connected.
    """
    places = places_of(number)
    return None if places is None else places[1]


def places_of(number: int) -> tuple[Place, Place] | None:
    """Return both ends of a connection over IP, the local one first; None for other sockets.

    Raises:
        OSError: the socket is closed, or not connected.
    """
    with socket.socket(fileno=os.dup(number)) as copy:
        return _places(copy)


def has_peer_left(number: int) -> bool:
    """Return whether the peer of a TCP connection has ended it, although its bytes are not read yet.

    Raises:
        OSError: the socket is closed, or not a TCP socket.
    """
    with socket.socket(fileno=os.dup(number)) as copy:
        (state,) = struct.unpack("B", copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
        return state in _LEFT


def shut_down_if(number: int, is_doomed: Callable[[Place, Place], bool]) -> bool:
    """Shut down a connection over IP if `is_doomed(local end, peer's end)`; return True if it was shut down.

    Raises:
        OSError: the socket is closed, or not connected.
    """
    with socket.socket(fileno=os.dup(number)) as copy:
        places = _places(copy)
        if places is None or not is_doomed(*places):
            return False
        copy.shutdown(socket.SHUT_RDWR)
        return True


def hold_little(port: int) -> None:
    """Limit the bytes that wait in the kernel for the line, on each connection accepted by a listener of this port.

    Connections inherit the limit of the listener (`TCP_NOTSENT_LOWAT`), so call this before the first one. See
    `UNSENT_BYTES`.
    """
    for number, _ in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:  # closed meanwhile, or not an IP socket
            is_ip = copy.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and copy.type == socket.SOCK_STREAM and copy.getsockname()[1] == port:
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _places(connection: socket.socket) -> tuple[Place, Place] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return _place(connection.getsockname()), _place(connection.getpeername())


def _place(name: tuple[str, int]) -> Place:
    host, port = name[:2]
    return str(host).removeprefix("::ffff:"), int(port)  # gRPC names an IPv4 peer of a dual-stack socket as IPv4
