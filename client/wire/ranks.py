"""The coordinator's aggregation ranks, as seen by a client: they receive updates and serve versions.

The coordinator sends their addresses whenever a rank comes or goes. An update waits for its assigned rank for a while
and then goes to another one: it counts once, wherever it is accepted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import aggregator
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.bulk_messages import aggregator_stub
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""Seconds that an update waits for its assigned rank, and then for each further one."""


@dataclass(slots=True)
class _Rank:
    """Rank and its connection."""

    address: str
    connection: RotatingChannel[rpc.Stub]
    rotating: asyncio.Task[None] | None
    """Task that keeps the connection fresh; None: the rank is away."""


class Ranks:
    """Connections to the ranks, made on demand; with zero ranks the coordinator itself serves the data plane.

    Args:
        dialer: opens the channels.
        spawn: runs a coroutine whose failure ends the agent.
    """

    def __init__(self, dialer: Dialer, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._dialer, self._spawn = dialer, spawn
        self._addresses: tuple[str, ...] = ()
        self._connected: dict[int, _Rank] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_ranks(self) -> int:
        """Number of ranks, including those that are away."""
        return len(self._addresses)

    def update(self, addresses: Sequence[str]) -> None:
        """Replace the ranks' addresses by the coordinator's list, one address per rank; "" is an absent rank.

        Transfers with an absent rank continue: perhaps only the coordinator has lost contact.
        """
        self._addresses = tuple(self._checked(address) for address in addresses)
        for rank, connected in list(self._connected.items()):
            if rank >= self.num_ranks or self._addresses[rank] not in ("", connected.address):
                self._close(rank)
            else:
                self._rotate(connected, is_here=self._addresses[rank] != "")

    def connection(self, rank: int) -> RotatingChannel[rpc.Stub]:
        """Return the connection to a rank.

        Raises:
            StreamBroken: the rank is away.
        """
        address = self._addresses[rank] if rank < len(self._addresses) else ""
        if not address:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"aggregation rank {rank} is away")
        if rank not in self._connected:
            connection = RotatingChannel(self._dialer, address, aggregator(rank), aggregator_stub)
            self._connected[rank] = _Rank(address, connection, self._spawn(connection.keep_fresh()))
        return self._connected[rank].connection

    def rank_for_update(self, rank: int, waited_s: float) -> int:
        """Return the rank to send an update to: the assigned one, or after each `PATIENCE_S` without progress the next.

        Args:
            rank: the update's assigned rank.
            waited_s: seconds since the last confirmed byte of the update.
        """
        return (rank + int(waited_s / PATIENCE_S)) % self.num_ranks

    def renew(self) -> None:
        """Start new calls of all connections on channels with the renewed certificate."""
        for connected in self._connected.values():
            connected.connection.renew()

    async def close(self) -> None:
        """Close all connections."""
        for rank in list(self._connected):
            self._close(rank)
        if self._closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._closing, return_exceptions=True), 1.0)

    def _rotate(self, connected: _Rank, *, is_here: bool) -> None:
        """Keep the connection to a present rank fresh; do not dial one that is away."""
        if is_here and connected.rotating is None:
            connected.rotating = self._spawn(connected.connection.keep_fresh())
        elif not is_here and connected.rotating is not None:
            connected.rotating.cancel()
            connected.rotating = None

    def _close(self, rank: int) -> None:
        connected = self._connected.pop(rank)
        self._rotate(connected, is_here=False)
        task = asyncio.get_running_loop().create_task(connected.connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _checked(self, address: str) -> str:
        """Check that this client may dial an address, and return it; otherwise an empty one."""
        try:
            if address:
                self._dialer.check(address)
        except ConfigError as error:
            logger.warning("the address of an aggregation rank is refused: %s", error)
            return ""
        return address
