"""The coordinator's aggregation ranks, as a client sees them: where updates go to, and versions come from.

The coordinator says where they are, and says it again whenever one comes or goes. A rank that is away comes back; an
update waits for its own rank for a while, and then goes to another: what counts is that it is accepted once.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc

from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import aggregator
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.bulk_messages import aggregator_stub
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""Seconds that an update waits for its own rank before it goes to another, and as long there."""


@dataclass(slots=True)
class _Rank:
    """One that is connected."""

    address: str
    connection: RotatingChannel[rpc.AggregatorStub]
    staying_fresh: asyncio.Task[None] | None
    """None: it is away."""


class Ranks:
    """Connections to the ranks, made when they are needed. Without ranks the coordinator does it all itself.

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
        """How many there are, those that are away included; 0: none."""
        return len(self._addresses)

    def update(self, addresses: Sequence[str]) -> None:
        """Take what the coordinator says: by rank, empty for one that is away.

        What is under way to one that is away goes on: perhaps it is the coordinator that has been away.
        """
        self._addresses = tuple(self._checked(address) for address in addresses)
        for rank, connected in list(self._connected.items()):
            if rank >= self.num_ranks or self._addresses[rank] not in ("", connected.address):
                self._close(rank)
            else:
                self._stay_fresh(connected, is_here=self._addresses[rank] != "")

    def connection(self, rank: int) -> RotatingChannel[rpc.AggregatorStub]:
        """To a rank.

        Raises:
            StreamBroken: it is away.
        """
        address = self._addresses[rank] if rank < len(self._addresses) else ""
        if not address:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"aggregation rank {rank} is away")
        if rank not in self._connected:
            connection = RotatingChannel(self._dialer, address, aggregator(rank), aggregator_stub)
            self._connected[rank] = _Rank(address, connection, self._spawn(connection.keep_fresh()))
        return self._connected[rank].connection

    def rank_for_update(self, rank: int, waited_s: float) -> int:
        """The rank that an update is for, or the next one whenever it has waited for long enough.

        Args:
            rank: that it is for.
            waited_s: for how long no byte of it has gone anywhere, whoever is said to be here.
        """
        return (rank + int(waited_s / PATIENCE_S)) % self.num_ranks

    def renew(self) -> None:
        """Prove anew who one is, on all connections: the certificate has been renewed."""
        for connected in self._connected.values():
            connected.connection.renew()

    async def close(self) -> None:
        """End all connections."""
        for rank in list(self._connected):
            self._close(rank)
        if self._closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._closing, return_exceptions=True), 1.0)

    def _stay_fresh(self, connected: _Rank, *, is_here: bool) -> None:
        """Nobody dials a rank that is away."""
        if is_here and connected.staying_fresh is None:
            connected.staying_fresh = self._spawn(connected.connection.keep_fresh())
        elif not is_here and connected.staying_fresh is not None:
            connected.staying_fresh.cancel()
            connected.staying_fresh = None

    def _close(self, rank: int) -> None:
        connected = self._connected.pop(rank)
        self._stay_fresh(connected, is_here=False)
        task = asyncio.get_running_loop().create_task(connected.connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _checked(self, address: str) -> str:
        """An address that this client may dial; nothing of another kind."""
        try:
            if address:
                self._dialer.check(address)
        except ConfigError as error:
            logger.warning("an aggregation rank is said to be where this client does not go: %s", error)
            return ""
        return address
