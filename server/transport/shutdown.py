"""The shutdown of servers within a bounded time, whatever their peers do."""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress

import grpc

from atoll.protocol.wire.channel import parse_address
from atoll.server.transport.sockets import open_sockets, shut_down_if

logger = logging.getLogger(__name__)

GRACE_S = 0.2
"""Time that open calls have to end by themselves [s]."""
FLUSH_S = 2.0
"""Time that peers have to accept pending bytes and, after a cut, that gRPC has to notice it [s]."""


async def stop_servers(*servers: tuple[grpc.aio.Server, str]) -> None:
    """End all calls of these servers, each given with its address, and their connections.

    gRPC closes a connection only when the peer has accepted the bytes being written to it. A peer that is slow or does
    not read would determine when this process ends, so connections that remain after `FLUSH_S` are cut.
    """
    stopping = asyncio.gather(*(server.stop(GRACE_S) for server, _ in servers))
    stopping.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # asyncio logs unread errors
    if await _ended(stopping, GRACE_S + FLUSH_S):
        return
    ports = {parse_address(address)[1] for _, address in servers}
    logger.warning("cut %d connections: their peers did not read what was sent", cut_connections(ports))
    if not await _ended(stopping, FLUSH_S):
        logger.error("gRPC does not stop serving: this process ends without waiting for it")


async def _ended(stopping: "asyncio.Future[list[None]]", seconds: float) -> bool:
    done, _ = await asyncio.wait({stopping}, timeout=seconds)
    for ended in done:
        ended.result()
    return bool(done)


def cut_connections(ports: Collection[int]) -> int:
    """Shut down this process's connections at these local ports; return their number."""
    count = 0
    for number, _ in open_sockets():
        with suppress(OSError):  # closed meanwhile, or it listens
            count += shut_down_if(number, lambda own, _: own[1] in ports)
    return count
