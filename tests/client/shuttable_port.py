"""A port in front of a server's own, which a test can shut to new connections."""

import asyncio
from contextlib import asynccontextmanager, closing, suppress

from tests.client.fake_coordinator import until


class Door:
    """A port in front of another one; while it is shut, new connections are accepted and get no byte, as in a flood."""

    def __init__(self, port):
        self._port, self.is_open, self.num_inside, self.num_turned_away = port, asyncio.Event(), 0, 0
        self.is_open.set()
        self.slams = False  # a new connection is closed at once while it is shut

    async def enter(self, reader, writer):
        with closing(writer):
            if not self.is_open.is_set():
                self.num_turned_away += 1
                if not self.slams:
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


@asynccontextmanager
async def door_before(port):
    """Open a door for the block; its `address` is set. All connections must end before the block does."""
    door = Door(port)
    listening = await asyncio.start_server(door.enter, "127.0.0.1", 0)
    door.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield door
        await until(lambda: not door.num_inside)
    finally:
        listening.close()
