"""Pulls the missing pieces of a version. Never more is under way than one window beyond what is on disk."""

import asyncio

import grpc

from atoll.aggregation.layout import Piece
from atoll.client.models import PartialVersion
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.behind import Behind
from atoll.protocol.bulk import Data, DownloadMessage
from atoll.protocol.channel import DOWNLOAD_WINDOW_BYTES, GRANT_BYTES
from atoll.protocol.stream import Stream, StreamBroken
from atoll.protocol.vocabulary import Digest, RunId

BOXES_MAX = 1000
"""Pieces that one call asks for by name, so that the request stays small."""


async def download(
    stub: rpc.CoordinatorStub | rpc.AggregatorStub, run_id: RunId, digest: Digest, partial: PartialVersion
) -> int:
    """Fetch what the version lacks, or the first `BOXES_MAX` pieces of it; call again until it is complete.

    Returns:
        Bytes that have come.

    Raises:
        StreamBroken: cut, refused, or the coordinator does not do what the protocol says.
        PieceDamaged: a piece came wrong; it is wanted again.
        OSError: the disk.
    """
    if partial.wants_the_rest and partial.is_whole:
        boxes: list[Piece] = []
        position = partial.data_bytes
        total = position - partial.filled_bytes + sum(piece.num_bytes for piece in partial.wanted)
    else:
        boxes = partial.wanted[:BOXES_MAX]
        position, total = partial.filled_bytes, sum(piece.num_bytes for piece in boxes)
    opened = pb.DownloadOpen(
        run_id=run_id, digest=digest, boxes=map(_box, boxes), position=position, credit=position + DOWNLOAD_WINDOW_BYTES
    )
    stream: Stream[pb.DownloadRequest, DownloadMessage] = Stream(stub.Download)
    behind = Behind(partial.append_all)
    try:
        await stream.write(pb.DownloadRequest(open=opened))
        await _receive(stream, behind, position=position, total=total)
    finally:
        stream.cancel()
        await behind.finish()
    return total - position


def _box(piece: Piece) -> pb.Box:
    return pb.Box(tensor=piece.tensor, offsets=piece.offsets, lengths=piece.lengths)


async def _receive(
    stream: Stream[pb.DownloadRequest, DownloadMessage], behind: Behind, *, position: int, total: int
) -> None:
    granted = position + DOWNLOAD_WINDOW_BYTES
    granting: asyncio.Future[None] | None = None
    while (reply := await stream.read()) is not None:
        if isinstance(reply, Data):
            position += len(reply.data)
            if position > total:
                raise _protocol_error(f"more than the {total} bytes came that were asked for")
            await behind.put(reply.data)
            if granted < total and position + DOWNLOAD_WINDOW_BYTES >= granted + GRANT_BYTES:
                granted = position + DOWNLOAD_WINDOW_BYTES
                if granting is not None:
                    await granting
                granting = asyncio.ensure_future(stream.write(pb.DownloadRequest(credit=granted)))
        elif reply.WhichOneof("reply") == "total_bytes" and reply.total_bytes != total:
            raise _protocol_error(f"{reply.total_bytes} bytes were announced, {total} were asked for")
    if position < total:
        raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"the download ended at byte {position} of {total}")


def _protocol_error(detail: str) -> StreamBroken:
    return StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, detail)
