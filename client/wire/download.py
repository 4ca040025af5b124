"""Pulls the missing pieces of a version. Never more is under way than one window beyond what is on disk.

A large download is read on a thread, over a connection whose calls block: faster by 6 %. If nothing comes over that
one in time, and for all smaller ones, it is the session's own connection, on the event loop.
"""

import asyncio
import logging
from queue import SimpleQueue
from typing import Any

import grpc

from atoll.client.disk.model_cache import PartialVersion
from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.threads import on_own_thread
from atoll.protocol.vocabulary import Digest, RunId
from atoll.protocol.wire.background_writer import Behind
from atoll.protocol.wire.bulk_messages import Data, DownloadMessage
from atoll.protocol.wire.channel import DOWNLOAD_WINDOW_BYTES, GRANT_BYTES, MIB
from atoll.protocol.wire.stream import Stream, StreamBroken, broken_streams

logger = logging.getLogger(__name__)

BOXES_MAX = 1000
"""Pieces that one call asks for by name, so that the request stays small."""

LARGE_BYTES = 8 * MIB
"""So much is worth a thread and a connection of its own: of 2,000 clients of a small model that would be 2,000 more."""

BEGIN_S = 2.0
"""A large download that has not begun by then takes the other way: strangers may be flooding the server's port."""

NOT_REACHED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
"""How a call ends that nobody answered: by itself, or given up after `BEGIN_S`."""


async def download(
    connection: RotatingChannel[rpc.CoordinatorStub] | RotatingChannel[rpc.AggregatorStub],
    run_id: RunId,
    digest: Digest,
    partial: PartialVersion,
) -> None:
    """Fetch what the version lacks, or the first `BOXES_MAX` pieces of it; call again until it is complete.

    Raises:
        StreamBroken: cut, refused, or the coordinator does not do what the protocol says.
        PieceDamaged: a piece came wrong; it is wanted again.
        OSError: the disk.
    """
    fetch = _Fetch(run_id, digest, partial)
    if fetch.num_bytes >= LARGE_BYTES:
        async with connection.blocking_calls() as stub:
            if await _on_thread(stub, fetch):
                return
    async with connection.calls() as stub:
        await _on_loop(stub, fetch)


class _Fetch:
    """What one call asks for, and how far it has come."""

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
        self.has_begun = False
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
        """That are still to come."""
        return self._total - self._position

    def came(self, reply: DownloadMessage) -> pb.DownloadRequest | None:
        """Note what came; a further grant when it is time for one, to be sent when the bytes are with the disk.

        Raises:
            StreamBroken: not what was asked for.
        """
        self.has_begun = True
        if isinstance(reply, Data):
            self._position += len(reply.data)
            if self._position > self._total:
                raise _protocol_error(f"more than the {self._total} bytes came that were asked for")
            if self._granted < self._total and self._position + DOWNLOAD_WINDOW_BYTES >= self._granted + GRANT_BYTES:
                self._granted = self._position + DOWNLOAD_WINDOW_BYTES
                return pb.DownloadRequest(credit=self._granted)
        elif reply.WhichOneof("reply") == "total_bytes" and reply.total_bytes != self._total:
            raise _protocol_error(f"{reply.total_bytes} bytes were announced, {self._total} were asked for")
        return None

    def ended(self) -> None:
        """The other side says that this was all. Raises StreamBroken when it was not."""
        if self._position < self._total:
            detail = f"the download ended at byte {self._position} of {self._total}"
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, detail)


async def _on_loop(stub: Any, fetch: _Fetch) -> None:
    stream: Stream[pb.DownloadRequest, DownloadMessage] = Stream(stub.Download)
    behind = Behind(fetch.partial.append_all)
    granting: asyncio.Future[None] | None = None
    try:
        await stream.write(fetch.first_request)
        while (reply := await stream.read()) is not None:
            grant = fetch.came(reply)
            if isinstance(reply, Data):
                await behind.put(reply.data)
            if grant is not None:
                if granting is not None:
                    await granting
                granting = asyncio.ensure_future(stream.write(grant))
        fetch.ended()
    finally:
        stream.cancel()
        await behind.finish()


async def _on_thread(stub: Any, fetch: _Fetch) -> bool:
    """Whether it was to be had this way; raises as `download`."""
    requests: SimpleQueue[pb.DownloadRequest | None] = SimpleQueue()
    requests.put(fetch.first_request)
    call = stub.Download(iter(requests.get, None))
    giving_up = asyncio.get_running_loop().call_later(BEGIN_S, lambda: fetch.has_begun or call.cancel())
    try:
        await on_own_thread(_receive, call, requests, fetch, stop=call.cancel)
    except StreamBroken as error:
        if fetch.has_begun or error.code not in NOT_REACHED:
            raise
        logger.debug("a large download goes over the session's own connection: %s", error)
        return False
    finally:
        giving_up.cancel()
    return True


def _receive(call: Any, requests: "SimpleQueue[pb.DownloadRequest | None]", fetch: _Fetch) -> None:
    try:
        with broken_streams():
            for reply in call:
                grant = fetch.came(reply)
                if isinstance(reply, Data):
                    fetch.partial.append_all([reply.data])
                if grant is not None:
                    requests.put(grant)
        fetch.ended()
    finally:
        call.cancel()
        requests.put(None)  # which ends gRPC's thread that sends them


def _protocol_error(detail: str) -> StreamBroken:
    return StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, detail)
