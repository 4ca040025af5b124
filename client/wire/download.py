"""The download of a version's missing pieces: at most one window of bytes is in flight beyond those on disk.

A large download runs on a thread, over a blocking connection, which is 6 % faster. Smaller downloads, and a large one
that does not begin in time, use the session's connection, on the event loop.
"""

import asyncio
import logging
import time
from queue import SimpleQueue
from typing import Any

import grpc

from atoll.client.disk.model_cache import PartialVersion
from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.threads import on_own_thread
from atoll.protocol.vocabulary import Digest, RunId
from atoll.protocol.wire.background_writer import Behind
from atoll.protocol.wire.bulk_messages import Data, DownloadMessage
from atoll.protocol.wire.channel import DOWNLOAD_WINDOW_BYTES, GRANT_BYTES, MIB
from atoll.protocol.wire.stream import Stream, StreamBroken, broken_streams

logger = logging.getLogger(__name__)

BOXES_MAX = 1000
"""Largest number of pieces that one call requests by name, so that the request stays small."""

LARGE_BYTES = 8 * MIB
"""Size from which a download is worth a thread and a second connection; for a small model, this would double the
connections of 2,000 clients."""

BEGIN_S = 2.0
"""Time after which a large download that has not begun moves to the other connection [s]: the server's port may be
flooded."""

TELL_S = 2.0
"""Time after which a download grants credit again although it is not needed: a sign of life [s]."""

NOT_REACHED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
"""Status codes of a call that never reached the server: it failed locally, or was given up after `BEGIN_S`."""


async def download(
    channel: RotatingChannel[rpc.Stub],
    run_id: RunId,
    digest: Digest,
    partial: PartialVersion,
) -> None:
    """Fetch the pieces that a version lacks, at most `BOXES_MAX` of them; repeat until it is complete.

    Args:
        channel: the channel to the coordinator or an aggregation rank.
        run_id: run of the version.
        digest: the digest of the version's manifest.
        partial: receives the bytes.

    Raises:
        StreamBroken: the call was cut or refused, or the server broke the protocol.
        PieceDamaged: a piece arrived damaged; it must be fetched again.
        OSError: the disk fails.
    """
    fetch = _Fetch(run_id, digest, partial)
    if fetch.num_bytes >= LARGE_BYTES:
        async with channel.blocking_calls() as stub:
            if await _on_thread(stub, fetch):
                return
    async with await channel.bulk_calls(fetch.num_bytes) as stub:
        await _on_loop(stub, fetch)


class _Fetch:
    """Progress of one call, and its request."""

    def __init__(self, run_id: RunId, digest: Digest, partial: PartialVersion) -> None:
        self.partial = partial
        if partial.wants_the_rest and partial.is_whole:
            boxes = []
            self._position = partial.data_bytes
            self._total = self._position - partial.filled_bytes + sum(piece.num_bytes for piece in partial.wanted)
        else:
            boxes = partial.wanted[:BOXES_MAX]
            self._position, self._total = partial.filled_bytes, sum(piece.num_bytes for piece in boxes)
        self._granted = self._position + DOWNLOAD_WINDOW_BYTES
        self.has_begun, self._told_at = False, time.monotonic()
        opened = pb.DownloadOpen(
            run_id=run_id,
            digest=digest,
            boxes=[pb.Box(tensor=piece.tensor, offsets=piece.offsets, lengths=piece.lengths) for piece in boxes],
            position=self._position,
            credit=self._granted,
        )
        self.first_request = pb.DownloadRequest(open=opened)

    @property
    def num_bytes(self) -> int:
        """Bytes that have not arrived yet."""
        return self._total - self._position

    def note(self, reply: DownloadMessage) -> pb.DownloadRequest | None:
        """Count the bytes of a reply, and return the next credit grant if it is due.

        The caller sends the grant once the operating system has the bytes.

        Raises:
            StreamBroken: the reply does not match the request.
        """
        self.has_begun = True
        if isinstance(reply, Data):
            self._position += len(reply.data)
            if self._position > self._total:
                raise _protocol_error(f"more bytes arrived than the {self._total} requested")
            is_due = self._granted < self._total
            is_due = is_due and self._position + DOWNLOAD_WINDOW_BYTES >= self._granted + GRANT_BYTES
            if is_due or time.monotonic() - self._told_at >= TELL_S:
                self._granted, self._told_at = self._position + DOWNLOAD_WINDOW_BYTES, time.monotonic()
                return pb.DownloadRequest(credit=self._granted)
        elif reply.WhichOneof("reply") == "total_bytes" and reply.total_bytes != self._total:
            raise _protocol_error(
                f"{count_of(reply.total_bytes, 'byte was', 'bytes were')} announced, {self._total} were requested"
            )
        return None

    def check_complete(self) -> None:
        """Check at the end of the call that all bytes have arrived; raises StreamBroken."""
        if self._position < self._total:
            detail = f"the download ended at byte {self._position} of {self._total}"
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, detail)


async def _on_loop(stub: Any, fetch: _Fetch) -> None:
    stream: Stream[pb.DownloadRequest, DownloadMessage] = Stream(stub.Download)
    writer = Behind(fetch.partial.append_all)
    granting: asyncio.Future[None] | None = None
    try:
        await stream.write(fetch.first_request)
        while (reply := await stream.read()) is not None:
            grant = fetch.note(reply)
            if isinstance(reply, Data):
                await writer.put(reply.data)
            if grant is not None:
                if granting is not None:
                    await granting
                granting = asyncio.ensure_future(stream.write(grant))
        fetch.check_complete()
    finally:
        stream.cancel()
        await writer.finish()


async def _on_thread(stub: Any, fetch: _Fetch) -> bool:
    """Download over the blocking connection; return whether the server answered. Raises the errors of `download`."""
    requests: SimpleQueue[pb.DownloadRequest | None] = SimpleQueue()
    requests.put(fetch.first_request)
    call = stub.Download(iter(requests.get, None))
    giving_up = asyncio.get_running_loop().call_later(BEGIN_S, lambda: fetch.has_begun or call.cancel())
    try:
        await on_own_thread(_receive, call, requests, fetch, stop=call.cancel)
    except StreamBroken as error:
        if fetch.has_begun or error.code not in NOT_REACHED:
            raise
        logger.debug("a large download uses the session's connection: %s", error)
        return False
    finally:
        giving_up.cancel()
    return True


def _receive(call: Any, requests: "SimpleQueue[pb.DownloadRequest | None]", fetch: _Fetch) -> None:
    try:
        with broken_streams():
            for reply in call:
                grant = fetch.note(reply)
                if isinstance(reply, Data):
                    fetch.partial.append_all([reply.data])
                if grant is not None:
                    requests.put(grant)
        fetch.check_complete()
    finally:
        call.cancel()
        requests.put(None)  # ends the gRPC thread that sends them


def _protocol_error(detail: str) -> StreamBroken:
    return StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, detail)
