"""A line with troubles between real sockets."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from atoll.drills.line import Line
from atoll.drills.troubles import Troubles
from tests.waiting import BOUND_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ends:
    """An echo at the far end of a line, and connections to its near end."""

    def __init__(self, line: Line, near: int, events: list[dict[str, Any]]) -> None:
        self.line, self.near, self.events = line, near, events
        self.writers = list[asyncio.StreamWriter]()

    async def call(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.near)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def did(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["did"] == what]

    async def until(self, what: str, times: int = 1) -> None:
        async with asyncio.timeout(BOUND_S):
            while len(self.did(what)) < times:
                await asyncio.sleep(0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def over(troubles: Troubles, act: Callable[[Ends], Awaitable[None]], *, has_far: bool = True) -> None:
    """Act on a line to an echo."""

    async def main() -> None:
        far = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = far.sockets[0].getsockname()[1]
        if not has_far:
            far.close()
            await far.wait_closed()
        events: list[dict[str, Any]] = []
        line = Line(("127.0.0.1", port), troubles, lambda did, **details: events.append({"did": did, **details}))
        listening = line.listening("127.0.0.1", 0)
        ends = Ends(line, listening.getsockname()[1], events)
        serving = asyncio.create_task(line.serve(listening))
        try:
            async with asyncio.timeout(2 * BOUND_S):
                await act(ends)
        finally:
            await ends.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            far.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "troubles", [Troubles(), Troubles(jitter_s=0.01, seed=5), Troubles(rate=3e6)], ids=["none", "jitter", "rate"]
)
def test_bytes_arrive_whole_and_in_order(troubles: Troubles) -> None:
    async def act(ends: Ends) -> None:
        content = random.Random(1).randbytes(300_000)
        reader, writer = await ends.call()

        async def send() -> None:
            writer.write(content)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read(-1) == content
        await sending
        writer.close()
        await ends.until("ended")
        assert ends.did("ended") == [{"did": "ended", "connection": 1, "up": 300_000, "down": 300_000}]

    over(troubles, act)


def test_a_line_delays_and_has_a_rate() -> None:
    async def act(ends: Ends) -> None:
        reader, writer = await ends.call()
        begun = time.monotonic()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert time.monotonic() - begun >= 0.2  # there and back
        begun = time.monotonic()
        writer.write(bytes(60_000))
        await reader.readexactly(60_000)
        assert time.monotonic() - begun >= 0.6  # at 100 kB/s, of which the buffers hide none
        writer.close()

    over(Troubles(latency_s=0.1, rate=100e3), act)


def test_a_cut_ends_both_sides_by_a_reset_and_later_connections_pass() -> None:
    async def act(ends: Ends) -> None:
        reader, writer = await ends.call()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        ends.line.cut(is_half_open=False)
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        await ends.until("ended")
        reader, writer = await ends.call()
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"
        writer.close()
        assert ends.did("cut") == [{"did": "cut", "connections": [1], "half_open": False}]

    over(Troubles(), act)


def test_a_half_open_connection_passes_nothing_until_an_end_leaves() -> None:
    async def act(ends: Ends) -> None:
        reader, writer = await ends.call()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        ends.line.cut(is_half_open=True)
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.5)
        assert not ends.did("ended")
        writer.close()
        await ends.until("ended")

    over(Troubles(), act)


def test_cuts_come_by_themselves() -> None:
    async def act(ends: Ends) -> None:
        await ends.until("cut", 3)
        assert [event["half_open"] for event in ends.did("cut")[:3]] == [True] * 3

    over(Troubles(cut_every_s=0.05, half_open=1.0), act)


def test_a_held_line_gives_no_byte_of_a_connection_that_was_given_up() -> None:
    async def act(ends: Ends) -> None:
        ends.line.is_held = True
        _, writer = await ends.call()
        writer.write(b"a")
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.2)
        ends.line.is_held = False
        await asyncio.sleep(0.2)
        assert ends.events == []

    over(Troubles(), act)


def test_a_far_end_that_is_away_ends_the_connection() -> None:
    async def act(ends: Ends) -> None:
        reader, _ = await ends.call()
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)
        assert ends.did("not connected")[0]["connection"] == 1

    over(Troubles(), act, has_far=False)
