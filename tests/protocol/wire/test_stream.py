"""The end of a call at any instant, which ends every wait for the call."""

import asyncio
import socket
from contextlib import suppress

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.wire.stream import Stream, StreamBroken
from tests.waiting import BOUND_S


@pytest.mark.parametrize("ticks", range(6))
def test_a_first_write_returns_when_the_channel_is_closed_before_the_call_has_begun(ticks):
    """End a call where grpc.aio itself waits for ever: an upload to a coordinator that died was never repeated."""

    async def scenario():
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # bound and not listening: a call waits for the connection
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{nobody.getsockname()[1]}")
            stream = Stream(rpc.Stub(channel, "Coordinator").Upload)
            writing = asyncio.ensure_future(stream.write(pb.UploadRequest()))
            for _ in range(ticks):
                await asyncio.sleep(0)
            stream.cancel()
            await channel.close()
            await asyncio.wait_for(writing, BOUND_S)
            with pytest.raises(StreamBroken):
                await asyncio.wait_for(stream.read(), BOUND_S)

    asyncio.run(scenario())


async def _refuse(requests, context):
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for you")
    yield pb.UploadReply()


def test_a_refusal_that_crosses_a_write_is_told_as_it_was_given():
    """Refuse a call during a write, after which one in three of grpc.aio's own calls ends with its INTERNAL."""

    async def refused(stub, wait):
        stream = Stream(stub.Upload)
        with suppress(grpc.aio.AioRpcError):
            await stream._call.wait_for_connection()
        await asyncio.sleep(wait)
        await stream.write(pb.UploadRequest())
        with pytest.raises(StreamBroken) as caught:
            await stream.read()
        return caught.value.code, caught.value.detail

    async def scenario():
        server = grpc.aio.server()
        kinds = pb.UploadRequest.FromString, pb.UploadReply.SerializeToString
        handlers = {"Upload": grpc.stream_stream_rpc_method_handler(_refuse, *kinds)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("atoll.v1.Coordinator", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = rpc.Stub(channel, "Coordinator")
            ends = {await refused(stub, wait / 100_000) for wait in range(200)}
        await server.stop(0)
        assert ends == {(grpc.StatusCode.PERMISSION_DENIED, "not for you")}

    asyncio.run(scenario())
