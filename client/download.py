"""Pulls the missing pieces of a version. Never more is under way than one window beyond what is on disk."""

import grpc

from atoll.aggregation.layout import Piece
from atoll.client.models import PartialVersion
from atoll.client.threads import off_loop
from atoll.client.transport import Stream, StreamBroken
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol import steps
from atoll.protocol.channel import CHUNK_BYTES, WINDOW_BYTES
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
        run_id=run_id, digest=digest, boxes=map(_box, boxes), position=position, credit=position + WINDOW_BYTES
    )
    stream: Stream[pb.DownloadRequest, pb.DownloadReply] = Stream(stub.Download)
    try:
        await stream.write(pb.DownloadRequest(open=opened))
        await _receive(stream, partial, position=position, total=total)
    finally:
        stream.cancel()
    return total - position


def _box(piece: Piece) -> pb.Box:
    return pb.Box(tensor=piece.tensor, offsets=piece.offsets, lengths=piece.lengths)


async def _receive(
    stream: Stream[pb.DownloadRequest, pb.DownloadReply], partial: PartialVersion, *, position: int, total: int
) -> None:
    granted = position + WINDOW_BYTES
    while (reply := await stream.read()) is not None:
        match reply.WhichOneof("reply"):
            case "total_bytes":
                if reply.total_bytes != total:
                    raise _protocol_error(f"{reply.total_bytes} bytes were announced, {total} were asked for")
            case "data":
                if position + len(reply.data) > total:
                    raise _protocol_error(f"more than the {total} bytes came that were asked for")
                await off_loop(partial.num_bytes, partial.append, reply.data)  # it may copy much from older versions
                position += len(reply.data)
                steps.reached("agent.downloading")
                if granted < total and position + WINDOW_BYTES >= granted + CHUNK_BYTES:
                    granted = position + WINDOW_BYTES
                    await stream.write(pb.DownloadRequest(credit=granted))
            case _:
                pass  # the digest of everything: each piece has been checked by itself
    if position < total:
        raise StreamBroken(grpc.StatusCode.UNAVAILABLE, f"the download ended at byte {position} of {total}")


def _protocol_error(detail: str) -> StreamBroken:
    return StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, detail)
