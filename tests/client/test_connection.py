"""Calls over connections that follow each other: a real server, behind a door that can be shut to new connections."""

import asyncio
from contextlib import asynccontextmanager, closing, suppress

import grpc

from atoll.client import connection as connection_module
from atoll.client.connection import Connection
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol import channel as limits
from atoll.protocol.channel import client_options, server_options
from tests.client.lagoon import live, until


class Door:
    """A port before another one; while it is shut, who comes is let in and hears nothing, as in a flood."""

    def __init__(self, port):
        self._port, self.is_open, self.num_inside, self.num_turned_away = port, asyncio.Event(), 0, 0
        self.is_open.set()

    async def enter(self, reader, writer):
        with closing(writer):
            if not self.is_open.is_set():
                self.num_turned_away += 1
                await reader.read()
                return
            self.num_inside += 1
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))
            self.num_inside -= 1


async def carry(reader, writer):
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class Answering(rpc.CoordinatorServicer):
    """Tells apart by whom it is called."""

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
    rpc.add_CoordinatorServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    door = Door(port)
    listening = await asyncio.start_server(door.enter, "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    connection = Connection(lambda: grpc.aio.insecure_channel(address, options=client_options()), rpc.CoordinatorStub)
    fresh = asyncio.create_task(connection.keep_fresh())
    try:
        yield connection, service, door
        assert not fresh.done()
    finally:
        fresh.cancel()
        await connection.close()
        await server.stop(0)
        await until(lambda: not door.num_inside)
        listening.close()


async def call(connection, seconds=10.0):
    async with connection.calls() as stub:
        await stub.GetManifest(pb.ManifestRequest(), timeout=seconds)


async def call_on(connection, service, num_peers):
    """Call again and again, without a call that fails, until it came over so many connections."""
    while len(set(service.peers)) < num_peers:
        await call(connection)
        await asyncio.sleep(0.01)


@live
async def test_calls_change_over_before_the_server_ends_a_connection_and_what_is_under_way_goes_on(monkeypatch):
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
            await call(connection, seconds=1.0)
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
        async with connection.calls() as stub, asyncio.timeout(10):
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
