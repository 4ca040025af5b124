"""The rotating channel against a real server, behind a port that can be shut to new connections."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from atoll.client.wire import rotating_channel as connection_module
from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.threads import on_thread
from atoll.protocol.wire import channel as limits
from atoll.protocol.wire.channel import server_options
from atoll.protocol.wire.stream import StreamBroken
from tests.client.fake_coordinator import live, until
from tests.client.shuttable_port import door_before
from tests.waiting import BOUND_S


class Answering:
    """A servicer that records the connection of each call."""

    def __init__(self):
        self.peers, self.go_on = [], asyncio.Event()

    async def GetManifest(self, request, context):
        self.peers.append(context.peer())
        return pb.ManifestReply()

    async def Session(self, requests, context):
        yield pb.ServerMessage()
        await self.go_on.wait()
        yield pb.ServerMessage()


@asynccontextmanager
async def served():
    server, service = grpc.aio.server(options=server_options()), Answering()
    rpc.add_servicer(service, server, "Coordinator")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with door_before(port) as door:
        connection = RotatingChannel(
            InsecureDialer(), door.address, COORDINATOR, lambda channel: rpc.Stub(channel, "Coordinator")
        )
        fresh = asyncio.create_task(connection.keep_fresh())
        try:
            yield connection, service, door
            assert not fresh.done()
        finally:
            fresh.cancel()
            await connection.close()
            await server.stop(0)


async def call(connection):
    async with connection.calls() as stub:
        await stub.GetManifest(pb.ManifestRequest(), timeout=BOUND_S)


async def call_on(connection, service, num_peers):
    """Call repeatedly, without a failure, until the calls came over `count` connections."""
    while len(set(service.peers)) < num_peers:
        await call(connection)
        await asyncio.sleep(0.01)


@live
async def test_calls_change_over_before_a_connection_ends_and_open_ones_go_on(monkeypatch):
    monkeypatch.setattr(limits, "CONNECTION_AGE_S", 1.0)
    async with served() as (connection, service, door):
        async with connection.calls() as stub:
            stream = stub.Session()
            assert await stream.read() is not grpc.aio.EOF
            await call_on(connection, service, 4)
            assert door.num_inside <= 3, "of the open stream, the newest, and perhaps one that comes or goes"
            service.go_on.set()
            assert await stream.read() is not grpc.aio.EOF
            del stream  # gRPC keeps a connection for as long as anybody has one of its calls
        await until(lambda: door.num_inside == 1)


@live
async def test_a_connection_that_does_not_come_about_delays_no_call(monkeypatch):
    monkeypatch.setattr(connection_module, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(connection_module, "PAUSE_S", 0.1)
    async with served() as (connection, service, door):
        await call(connection)
        door.is_open.clear()
        connection.renew()
        await until(lambda: door.num_turned_away >= 2)  # it is tried again
        for _ in range(20):
            await call(connection)
        assert len(set(service.peers)) == 1
        door.is_open.set()
        await call_on(connection, service, 2)


@live
async def test_a_renewal_does_not_wait_for_a_connection_with_the_certificate_before():
    async with served() as (connection, service, door):
        await call(connection)
        door.is_open.clear()
        for number in range(1, 4):
            connection.renew()
            await until(lambda number=number: door.num_turned_away == number)
        door.is_open.set()
        connection.renew()
        await call_on(connection, service, 2)


@live
async def test_a_server_that_is_gone_is_dialled_less_and_less(monkeypatch):
    monkeypatch.setattr(connection_module, "ATTEMPT_S", 0.02)
    monkeypatch.setattr(connection_module, "PAUSE_S", 0.1)
    async with served() as (connection, _service, door):
        await call(connection)
        door.is_open.clear()
        connection.renew()
        await asyncio.sleep(1.5)
        assert 2 <= door.num_turned_away <= 6  # pauses of 0.05 to 0.1, 0.1 to 0.2, 0.2 to 0.4, 0.4 to 0.8


@live
async def test_long_transfers_open_no_third_connection(monkeypatch):
    monkeypatch.setattr(limits, "CONNECTION_AGE_S", 1.0)
    async with served() as (connection, service, door):
        async with connection.calls() as stub, asyncio.timeout(BOUND_S):
            control = stub.Session()
            await control.read()
            await call_on(connection, service, 2)
            async with connection.calls() as newer:
                upload = newer.Session()
                await upload.read()
                for _ in range(20):
                    assert door.num_inside == 2
                    await asyncio.sleep(0.1)
                service.go_on.set()
                assert await upload.read() is not grpc.aio.EOF


@live
async def test_a_renewal_changes_over_at_once_and_closes_what_nobody_uses():
    async with served() as (connection, service, door):
        for number in range(1, 5):
            await call_on(connection, service, number)
            connection.renew()
        await until(lambda: door.num_inside == 1)


def block(stub, seconds=BOUND_S):
    return on_thread(None, lambda: stub.GetManifest(pb.ManifestRequest(), timeout=seconds))


@live
async def test_calls_that_block_have_one_connection_more_which_changes_over_with_the_other():
    async with served() as (connection, service, door):
        await call(connection)
        assert door.num_inside == 1
        for _ in range(3):
            async with connection.blocking_calls() as stub:
                await block(stub)
        assert door.num_inside == 2
        assert len(set(service.peers)) == 2
        async with connection.blocking_calls() as before:
            connection.renew()
            await call_on(connection, service, 3)
            async with connection.blocking_calls() as after:
                await block(before)
                await block(after)
            assert len(set(service.peers)) == 4
            assert door.num_inside == 3, "no call uses the first"
        await until(lambda: door.num_inside == 2)
        connection.renew()
        await until(lambda: door.num_inside == 1)


@live
async def test_an_idle_connection_for_calls_that_block_leaves_its_place_to_the_next_one():
    async with served() as (connection, service, door):
        async with connection.calls() as stub:
            control = stub.Session()
            await control.read()
            await call_on(connection, service, 1)
            connection.renew()
            await call_on(connection, service, 2)
            async with connection.blocking_calls() as blocking:
                await block(blocking)
            assert door.num_inside == 3
            door.is_open.clear()
            connection.renew()
            await until(lambda: door.num_turned_away == 1)
            await until(lambda: door.num_inside == 2)
            door.is_open.set()
            service.go_on.set()
            async with connection.blocking_calls() as blocking:
                await block(blocking)
            assert await control.read() is not grpc.aio.EOF


@live
async def test_closing_ends_calls_that_block():
    async with served() as (connection, _service, _door):
        async with connection.blocking_calls() as stub:
            replies = stub.Session(iter([]))
            await on_thread(None, next, replies)
            ending = asyncio.ensure_future(on_thread(None, lambda: list(replies)))
            await connection.close()
            with pytest.raises(grpc.RpcError) as caught:
                await ending
            assert caught.value.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(StreamBroken, match="the channel was closed"):
            connection.blocking_calls()


@live
async def test_a_large_transfer_never_shares_the_connection_of_the_control_stream(monkeypatch):
    async with served() as (connection, service, door):
        async with connection.control_calls() as stub:
            stream = stub.Session()
            assert await stream.read() is not grpc.aio.EOF
            for num_bytes, num_connections in [(connection_module.SHARED_BYTES, 1), (2**21, 2), (2**21, 2)]:
                async with await connection.bulk_calls(num_bytes) as bulk:
                    await bulk.GetManifest(pb.ManifestRequest(), timeout=BOUND_S)
                assert (len(set(service.peers)), door.num_inside) == (num_connections, num_connections)
            service.go_on.set()
            assert await stream.read() is not grpc.aio.EOF


@live
async def test_a_large_transfer_begins_beside_the_control_stream_where_no_connection_comes_up(monkeypatch):
    monkeypatch.setattr(connection_module, "APART_S", 0.2)
    async with served() as (connection, service, door):
        async with connection.control_calls() as stub:
            stream = stub.Session()
            assert await stream.read() is not grpc.aio.EOF
            door.is_open.clear()
            async with await connection.bulk_calls(2**21) as bulk:
                await bulk.GetManifest(pb.ManifestRequest(), timeout=BOUND_S)
            assert len(service.peers) == 1
            stream.cancel()
