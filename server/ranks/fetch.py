"""The download of pieces of a version: a rank fetches its part of version 0, the coordinator all parts of a version.

A part is read from its file if this is on the same machine, else over the wire. Every piece is checked.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import aggregator
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.threads import off_loop
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.tensors.layout import Piece
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileWriter, parse_header

BOXES_AT_ONCE = 1000
"""Number of pieces that one call requests, so that the request stays small."""

SILENCE_S = 60.0
"""Longest time without a message before a download is given up [s]."""


class NotFetched(OSError):
    """Error: the pieces cannot be downloaded now."""


class NoSuchVersion(NotFetched):
    """Error: the coordinator knows no such version, or no such run."""


async def fetch_manifest(stub: rpc.Stub, run_id: RunId, digest: Digest) -> tuple[Version, VersionManifest, bytes]:
    """Fetch a version's number, manifest and encoded manifest from the coordinator.

    Raises:
        NoSuchVersion: the coordinator has no such version.
        NotFetched: the coordinator cannot be asked now, or its answer does not match.
    """
    try:
        reply = await stub.GetManifest(pb.ManifestRequest(run_id=run_id, digest=digest), timeout=SILENCE_S)
    except grpc.aio.AioRpcError as error:
        kind = NoSuchVersion if error.code() is grpc.StatusCode.NOT_FOUND else NotFetched
        raise kind(f"the manifest of version {digest[:12]}: {error.code().name}: {error.details()}") from None
    encoded: bytes = reply.manifest
    if digest_of(encoded) != digest:
        raise NotFetched(f"the coordinator has sent a manifest that does not match version {digest[:12]}")
    return Version(reply.version), await off_loop(len(encoded), parse_version, encoded), encoded


async def gather(
    addresses: Sequence[str],
    run_id: RunId,
    digest: Digest,
    manifest: VersionManifest,
    out: Path,
    note: dict[str, str],
    *,
    dialer: Dialer,
    shards: Sequence[Path] = (),
) -> None:
    """Assemble a complete version from the ranks' parts; `out` appears atomically, after all checks.

    Args:
        addresses: the data planes of all ranks; "" for a rank that is away.
        run_id: the run.
        digest: the version's digest.
        manifest: the version's manifest.
        out: the path of the safetensors file.
        note: the metadata of its header.
        dialer: opens the channels to the ranks.
        shards: the shard files of all ranks; files that exist on this machine are read instead of downloaded.

    Raises:
        NotFetched: a rank is away, or does not have its part.
        OSError: a file cannot be read or written.
    """
    with TensorFileWriter(out, manifest.layout, metadata=note, piece_bytes=manifest.piece_bytes) as writer:
        for rank, address in enumerate(addresses):
            pieces = owned_pieces(manifest.pieces, rank, len(addresses))
            if not pieces:
                continue
            if shards and shards[rank].exists():
                await off_loop(manifest.num_bytes, _append_shard, writer, shards[rank], pieces)
                continue
            if not address:
                raise NotFetched(
                    f"version {digest[:12]} is in {count_of(len(addresses), 'part')}, and "
                    f"aggregation rank {rank}, which has one "
                    "of them, is away: start the coordinator and its ranks"
                )
            async with dialer.channel(address, aggregator(rank)) as channel:
                await fetch_into(writer, rpc.Stub(channel, "Aggregator").Download, run_id, digest, pieces)
        await off_loop(manifest.num_bytes, writer.finish)


async def fetch_into(
    writer: TensorFileWriter, download: Any, run_id: RunId, digest: Digest, pieces: Sequence[Piece]
) -> None:
    """Append pieces of a version to a file, each checked, from the service whose `Download` method is given.

    Raises:
        NotFetched: the service cannot be reached, does not have the pieces, or sends wrong ones.
    """
    wanted = [piece for piece in pieces if piece.num_bytes]
    for start in range(0, len(wanted), BOXES_AT_ONCE):
        some = wanted[start : start + BOXES_AT_ONCE]
        data, index = bytearray(), 0
        async for block in _blocks(download, run_id, digest, some):
            data += block
            while index < len(some) and len(data) >= some[index].num_bytes:
                piece = some[index]
                await off_loop(piece.num_bytes, _append, writer, piece, bytes(data[: piece.num_bytes]))
                del data[: piece.num_bytes]
                index += 1
        if index < len(some):
            raise NotFetched(f"the download of version {digest[:12]} ended before tensor {some[index].tensor!r}")


def _append(writer: TensorFileWriter, piece: Piece, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != piece.sha256:
        raise NotFetched(
            f"tensor {piece.tensor!r}: {count_of(piece.num_bytes, 'byte does', 'bytes do')} not "
            "have the SHA-256 of the manifest"
        )
    writer.append(np.frombuffer(data, NUMPY_DTYPES[piece.dtype]))


def _append_shard(writer: TensorFileWriter, shard: Path, pieces: Sequence[Piece]) -> None:
    with shard.open("rb") as file:
        file.seek(parse_header(shard)[1])
        for piece in pieces:
            try:
                _append(writer, piece, file.read(piece.num_bytes))
            except NotFetched as error:
                raise NotFetched(f"{shard} is damaged: {error}") from None


async def _blocks(download: Any, run_id: RunId, digest: Digest, pieces: Sequence[Piece]) -> AsyncIterator[bytes]:
    boxes = [pb.Box(tensor=piece.tensor, offsets=piece.offsets, lengths=piece.lengths) for piece in pieces]
    total, position = sum(piece.num_bytes for piece in pieces), 0
    stream: Stream[pb.DownloadRequest, Any] = Stream(download)
    try:
        opened = pb.DownloadOpen(run_id=run_id, digest=digest, boxes=boxes, credit=total)  # HTTP/2 limits the flow
        async with asyncio.timeout(SILENCE_S):
            await stream.write(pb.DownloadRequest(open=opened))
        while position < total:
            async with asyncio.timeout(SILENCE_S):
                reply = await stream.read()
            if reply is None:
                return
            if reply.data:
                position += len(reply.data)
                yield reply.data
    except (StreamBroken, TimeoutError) as error:
        why = error if isinstance(error, StreamBroken) else f"silent for {SILENCE_S:g} s"
        raise NotFetched(f"version {digest[:12]} cannot be fetched{_now(error)}: {why}") from None
    finally:
        stream.cancel()


def _now(error: StreamBroken | TimeoutError) -> str:
    """Return "" for a persistent error (permission denied), " now" for all others."""
    is_denied = isinstance(error, StreamBroken) and error.code is grpc.StatusCode.PERMISSION_DENIED
    return "" if is_denied else " now"
