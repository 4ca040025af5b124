"""The coordinator's aggregation ranks, as a client sees them: where updates go to, and versions come from.

The coordinator says where they are, and says it again whenever one comes or goes. A rank that is away comes back; an
update waits for its own rank for a while, and then goes to another: what counts is that it is accepted once.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import grpc

from atoll.client.transport import OLDER_CHANNELS_MAX
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.bulk import aggregator_stub
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import aggregator
from atoll.protocol.settings import ConfigError
from atoll.protocol.stream import StreamBroken

logger = logging.getLogger(__name__)

PATIENCE_S = 15.0
"""Seconds that an update waits for its own rank before it goes to another, and as long there."""


class Ranks:
    """Connections to the ranks, made when they are needed. Without ranks the coordinator does it all itself.

    Args:
        dialer: opens the channels.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._addresses: tuple[str, ...] = ()
        self._channels: dict[int, tuple[str, grpc.aio.Channel, rpc.AggregatorStub]] = {}
        self._older: list[grpc.aio.Channel] = []
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
        for rank, (address, *_) in list(self._channels.items()):
            if rank >= self.num_ranks or self._addresses[rank] not in ("", address):
                self._close(rank)

    def stub(self, rank: int) -> rpc.AggregatorStub:
        """Of a rank.

        Raises:
            StreamBroken: it is away.
        """
        address = self._addresses[rank] if rank < len(self._addresses) else ""
        if not address:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"aggregation rank {rank} is away")
        if rank not in self._channels:
            channel = self._dialer.channel(address, aggregator(rank))
            self._channels[rank] = address, channel, aggregator_stub(channel)
        return self._channels[rank][2]

    def stub_for_update(self, rank: int, waited_s: float) -> rpc.AggregatorStub:
        """Of the rank that an update is for, or of the next one whenever it has waited for long enough.

        Args:
            rank: that it is for.
            waited_s: for how long no byte of it has gone anywhere, whoever is said to be here.

        Raises:
            StreamBroken: that rank is away.
        """
        return self.stub((rank + int(waited_s / PATIENCE_S)) % self.num_ranks)

    def renew(self) -> None:
        """Dial anew for whatever is begun from now on; what is under way goes on as it is."""
        self._older += [channel for _, channel, _ in self._channels.values()]
        self._channels.clear()
        for channel in self._older[: max(0, len(self._older) - OLDER_CHANNELS_MAX)]:
            self._older.remove(channel)
            self._end(channel)

    async def close(self) -> None:
        """End all connections."""
        for channel in self._older:
            self._end(channel)
        self._older.clear()
        for rank in list(self._channels):
            self._close(rank)
        if self._closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._closing, return_exceptions=True), 1.0)

    def _close(self, rank: int) -> None:
        _, channel, _ = self._channels.pop(rank)
        self._end(channel)

    def _end(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
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
