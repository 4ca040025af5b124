"""The bound on the bytes that wait in the kernel of a server for a slow line."""

import asyncio
import select
import socket

import grpc
import pytest

from atoll.protocol.wire.channel import UNSENT_BYTES, parse_address
from atoll.server.transport.listener import InsecureListener
from atoll.server.transport.sockets import hold_little, open_sockets, places_of
from tests.waiting import BOUND_S

WINDOW_BYTES = 64 * 1024


def taken_from(accepted: socket.socket) -> int:
    """The bytes that a connection takes whose peer reads nothing."""
    accepted.setblocking(False)
    taken = 0
    try:
        while accepted.fileno() in _writable(accepted):
            taken += accepted.send(b"x" * 4096)
    except BlockingIOError:
        pass
    return taken


def _writable(accepted: socket.socket) -> list[int]:
    return [found.fileno() for found in select.select([], [accepted], [], 0)[1]]


@pytest.mark.real
@pytest.mark.parametrize("is_held", [True, False])
def test_a_connection_takes_little_beyond_what_the_line_takes(is_held: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if is_held:
            hold_little(port)
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES // 2)  # the kernel doubles it
        with peer:
            peer.connect(("127.0.0.1", port))
            accepted, _ = listening.accept()
            with accepted:
                taken = taken_from(accepted)
    assert (taken <= WINDOW_BYTES + UNSENT_BYTES + 4096) is is_held, taken


@pytest.mark.real
def test_listeners_hold_little_for_each_connection() -> None:
    asyncio.run(listens())


async def listens() -> None:
    server = grpc.aio.server()
    port = parse_address(InsecureListener().bind(server, "127.0.0.1:0"))[1]
    await server.start()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        ends = ("127.0.0.1", port), peer.getsockname()
        async with asyncio.timeout(BOUND_S):
            while not (found := [number for number, _ in open_sockets() if _connects(number) == ends]):
                await asyncio.sleep(0.01)
        with socket.fromfd(found[0], socket.AF_INET, socket.SOCK_STREAM) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
    await server.stop(0)


def _connects(number: int) -> object:
    try:
        return places_of(number)
    except OSError:
        return None
