"""The streams of one update: one for each part, several concurrently, and one verdict."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.wire.stream import StreamBroken

STREAMS_MAX = 4
"""Concurrent streams of one update in parts; further parts wait."""

REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})
"""Status codes that no retry of the upload changes: the two sides are incompatible."""

Send = Callable[[], Awaitable[pb.Verdict | None]]
"""Function that sends one part and returns the verdict on the update; None: the part is kept, others are missing."""


async def verdict_on(parts: Sequence[Send]) -> pb.Verdict:
    """Send all parts of an update and return its verdict; the first verdict ends the other streams.

    Only a damaged part is requested again: the other parts continue, so that they are kept.

    Args:
        parts: functions that send one part each; for an update without parts, one function that sends all of it.

    Raises:
        StreamBroken: a stream was cut or refused, and there is no verdict; kept parts are not sent again.
        OSError: the spool cannot be read.
    """
    streams = asyncio.Semaphore(STREAMS_MAX)

    async def sent(send: Send) -> pb.Verdict | None:
        async with streams:
            return await send()

    running = [asyncio.ensure_future(sent(send)) for send in parts]
    resend, cut = None, None
    try:
        for done in asyncio.as_completed(running):
            try:
                verdict = await done
            except StreamBroken as error:
                if error.code in REFUSED:
                    raise
                cut = error
                continue
            if verdict is not None and not verdict.resend:
                return verdict
            resend = verdict or resend
    finally:
        for stream in running:
            stream.cancel()
        await asyncio.wait(running)
        for stream in running:
            stream.cancelled() or stream.exception()  # marks it as retrieved; one stream's error is enough
    if resend is not None and cut is None:
        return resend
    raise cut or StreamBroken(grpc.StatusCode.UNAVAILABLE, "every part is kept, and there is no verdict yet")
