"""A call that ends at any instant ends whoever waits for it."""

import asyncio
import socket

import grpc
import pytest

from atoll.client.transport import Stream, StreamBroken
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc


@pytest.mark.parametrize("ticks", range(6))
def test_a_first_write_returns_when_the_channel_is_closed_before_the_call_has_begun(ticks):
    """grpc.aio itself waits for ever there: an upload that a coordinator's death met so was never begun again."""

    async def scenario():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # bound and not listening: a call waits for the connection
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{nobody.getsockname()[1]}")
            stream = Stream(rpc.CoordinatorStub(channel).Upload)
            writing = asyncio.ensure_future(stream.write(pb.UploadRequest()))
            for _ in range(ticks):
                await asyncio.sleep(0)
            stream.cancel()
            await channel.close()
            await asyncio.wait_for(writing, 5.0)
            with pytest.raises(StreamBroken):
                await asyncio.wait_for(stream.read(), 5.0)

    asyncio.run(scenario())
