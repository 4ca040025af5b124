"""The end of a process, in time: whatever a peer, a thread or a library does meanwhile."""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
from collections.abc import Collection
from contextlib import suppress

import grpc

logger = logging.getLogger(__name__)

SOCKETS = "/proc/self/fd"

GRACE_S = 0.2
"""Seconds that open calls have to end by themselves."""
FLUSH_S = 2.0
"""Seconds that peers have to take what is written to them already; after a cut, gRPC to notice."""
END_S = 20
"""Seconds that a process has for its end; a supervisor's patience is longer (30 s in docs/operations)."""


def end_in_time(seconds: int = END_S) -> None:
    """From now on this process has so long to end. Then it dies of SIGALRM, and the stacks of its threads are said.

    What is durable is so already, and the next process replays the journal: nothing is lost that way. It is done by
    the kernel and in C, so it needs neither the event loop nor Python's lock.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    signal.alarm(seconds)


async def stop_servers(*servers: tuple[grpc.aio.Server, int]) -> None:
    """End all calls of these servers, each given with its port, and their connections.

    gRPC closes a connection only when the peer has taken what is being written to it. One behind a slow line, or that
    does not read, would so decide when we end: what is left after `FLUSH_S` is cut.
    """
    stopping = asyncio.gather(*(server.stop(GRACE_S) for server, _ in servers))
    stopping.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # it may have nobody to tell
    if await _ended(stopping, GRACE_S + FLUSH_S):
        return
    logger.warning(
        "cut %d connections whose peers did not take what was sent", cut_connections({p for _, p in servers})
    )
    if not await _ended(stopping, FLUSH_S):
        logger.error("gRPC does not stop serving: this process ends without")


async def _ended(stopping: "asyncio.Future[list[None]]", seconds: float) -> bool:
    done, _ = await asyncio.wait({stopping}, timeout=seconds)
    for ended in done:
        ended.result()
    return bool(done)


def cut_connections(ports: Collection[int]) -> int:
    """Shut down this process's connections at these ports of its own; returns how many.

    gRPC has no call for it, so it is done to the sockets: gRPC sees them closed.
    """
    return sum(_cut(number, ports) for number in map(int, os.listdir(SOCKETS)))


def _cut(number: int, ports: Collection[int]) -> bool:
    with suppress(OSError):  # closed meanwhile, or not connected
        if not os.readlink(f"{SOCKETS}/{number}").startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] in ports:
                copy.getpeername()  # not of one that listens
                copy.shutdown(socket.SHUT_RDWR)
                return True
    return False
