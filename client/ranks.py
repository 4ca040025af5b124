"""The coordinator's aggregation ranks, as a client sees them: where updates go to, and versions come from.

The coordinator says where they are, and says it again whenever one comes or goes. A rank that is away comes back; an
update waits for its own rank for a while, and then goes to another: what counts is that it is accepted once.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc

from atoll.client.transport import StreamBroken
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.channel import client_options

PATIENCE_S = 15.0
"""Seconds that an update waits for its own rank before it goes to another."""


class Ranks:
    """Connections to the ranks, made when they are needed. Without ranks the coordinator does it all itself."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._channels: dict[str, tuple[grpc.aio.Channel, rpc.AggregatorStub]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_ranks(self) -> int:
        """How many there are, those that are away included; 0: none."""
        return len(self._addresses)

    def update(self, addresses: Sequence[str]) -> None:
        """Take what the coordinator says: by rank, empty for one that is away."""
        self._addresses = tuple(addresses)
        for gone in self._channels.keys() - set(addresses):
            self._close(gone)

    def stub(self, rank: int) -> rpc.AggregatorStub:
        """Of a rank.

        Raises:
            StreamBroken: it is away.
        """
        address = self._addresses[rank] if rank < len(self._addresses) else ""
        if not address:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"aggregation rank {rank} is away")
        if address not in self._channels:
            channel = grpc.aio.insecure_channel(address, options=client_options())
            self._channels[address] = channel, rpc.AggregatorStub(channel)
        return self._channels[address][1]

    def stub_for_update(self, rank: int, waited_s: float) -> rpc.AggregatorStub:
        """Of the rank that an update is for, or of another one when it has waited for long enough.

        Raises:
            StreamBroken: the rank is away, or all of them are.
        """
        if waited_s < PATIENCE_S or rank >= self.num_ranks or self._addresses[rank]:
            return self.stub(rank)
        others = ((rank + step) % self.num_ranks for step in range(1, self.num_ranks))
        return self.stub(next((other for other in others if self._addresses[other]), rank))

    async def close(self) -> None:
        """End all connections."""
        for address in list(self._channels):
            self._close(address)
        if self._closing:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*self._closing, return_exceptions=True), 1.0)

    def _close(self, address: str) -> None:
        channel, _ = self._channels.pop(address)
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
