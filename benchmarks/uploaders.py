"""Clients that only upload: `python -m benchmarks.uploaders COORDINATOR FIRST COUNT PARTS RANK_ADDRESS...`.

Each client has its control stream and a connection to its rank, and sends bytes that were generated, hashed and packed
into messages before. The line `ready ROUND` reports that all clients are invited and prepared; the line `go` on
standard input starts all uploads at once; then one line of JSON has the instants of the first byte and of the last
acceptance.

With PARTS above 0 each update comes in that many parts of equal size, spread over the ranks, all at once.
"""

import asyncio
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.names import COORDINATOR, aggregator
from atoll.protocol.manifest import UpdateManifest, VersionManifest, parse_version
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.protocol.wire.channel import CHUNK_BYTES, PROTOCOL, UPLOAD_WINDOW_BYTES
from atoll.tensors.layout import Piece
from benchmarks.members import member

TASK = "benchmarks.tasks:noise"


@dataclass
class Uploader:
    """One client; its update is the same in every round, except for the number of rounds in the manifest."""

    name: str
    seed: int
    coordinator: grpc.aio.Channel
    ranks: list[grpc.aio.Channel]
    num_parts: int = 0
    streams: list[tuple[PartManifest, list[bytes]]] = field(default_factory=list)
    """The pieces of each stream, and the messages with their bytes; of an update without parts one stream."""
    opened: list[bytes] = field(default_factory=list)
    invite: pb.Invite = field(default_factory=pb.Invite)

    async def invited(self) -> int:
        """Wait for the next invitation, prepare its upload, and return the round."""
        while (message := await self.control.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "invite":
                self.invite = message.invite
                break
        else:
            raise RuntimeError(f"{self.name}: {await self.control.details()}")
        if not self.streams:
            request = pb.ManifestRequest(run_id=self.invite.run_id, digest=self.invite.model_digest)
            reply = await rpc.Stub(self.coordinator, "Coordinator").GetManifest(request)
            self._prepare(parse_version(reply.manifest))
        parts = [part for part, _ in self.streams] if self.num_parts else []
        manifest = UpdateManifest(
            run_id=RunId(self.invite.run_id),
            round_id=RoundId(self.invite.round_id),
            client_id=ClientId(self.name),
            base_version=Version(self.invite.base_version),
            base_digest=Digest(self.invite.model_digest),
            num_examples=1 + self.seed,
            work=1.0,
            pieces=() if parts else self.streams[0][0].pieces,
            parts=tuple(part.listed for part in parts),
        )
        root = manifest.encode()
        opened = [pb.UploadOpen(manifest=root, part=part.encode()) for part in parts] or [pb.UploadOpen(manifest=root)]
        self.opened = [pb.UploadRequest(open=of_stream).SerializeToString() for of_stream in opened]
        return int(self.invite.round_id)

    async def connect(self) -> None:
        """Open the control stream with a Hello."""
        self.control = rpc.Stub(self.coordinator, "Coordinator").Session()
        hello = pb.Hello(protocol=PROTOCOL, client_id=self.name, session="1", tasks=[TASK], spreads_parts=True)
        await self.control.write(pb.ClientMessage(hello=hello))

    def _prepare(self, version: VersionManifest) -> None:
        generator, num_streams = np.random.default_rng(self.seed), self.num_parts or 1
        data, pieces = [bytearray() for _ in range(num_streams)], [list[Piece]() for _ in range(num_streams)]
        for piece in version.pieces:
            values = (
                generator.standard_normal(piece.num_elements, np.float32)
                if piece.dtype == "F32"
                else np.ones(piece.num_elements, np.int64)
            )
            for index, (box, raw) in enumerate(_rows_of(piece, values, num_streams)):
                data[index] += raw
                pieces[index].append(box)
        self.streams = [
            (PartManifest(index, tuple(of_stream)), _chunks_of(bytes(data[index])))
            for index, of_stream in enumerate(pieces)
        ]

    async def upload(self) -> tuple[float, float]:
        """Send the update; return the instants of its begin and its acceptance."""
        begun = time.monotonic()
        verdicts = await asyncio.gather(*(self._send(index) for index in range(len(self.streams))))
        if not any(verdict is not None and verdict.accepted for verdict in verdicts):
            raise RuntimeError(f"{self.name}: {verdicts}")
        return begun, time.monotonic()

    async def _send(self, index: int) -> pb.Verdict | None:
        """Send a stream, again as an agent does; return the verdict, None of a part that is kept."""
        while True:
            try:
                return await self._sent(index)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)

    async def _sent(self, index: int) -> pb.Verdict | None:
        call = self.ranks[(self.invite.rank + index) % len(self.ranks)].stream_stream(
            "/atoll.v1.Aggregator/Upload", response_deserializer=pb.UploadReply.FromString
        )()
        await call.write(self.opened[index])
        chunks, sent, window = self.streams[index][1], 0, UPLOAD_WINDOW_BYTES
        while (reply := await call.read()) is not grpc.aio.EOF:
            if (kind := reply.WhichOneof("reply")) != "position":
                return reply.verdict if kind == "verdict" else None
            window = reply.window or window
            while sent < len(chunks) and (sent + 1) * CHUNK_BYTES - reply.position <= max(window, CHUNK_BYTES):
                await call.write(chunks[sent])
                sent += 1
        raise RuntimeError(f"{self.name}: {await call.details()}")


def _rows_of(piece: Piece, values: NDArray[Any], num_parts: int) -> Iterator[tuple[Piece, bytes]]:
    """Yield the boxes of a piece, its rows in equal shares, and their bytes; one that cannot be cut is one box."""
    num_rows = piece.lengths[0] if piece.lengths else 1
    bounds = [num_rows * part // num_parts for part in range(num_parts + 1)]
    shaped = values.reshape(piece.lengths)
    for begin, end in itertools.pairwise(bounds if num_rows >= num_parts else [0, num_rows]):
        raw = (shaped[begin:end] if piece.lengths else shaped).tobytes()
        offsets, lengths = piece.offsets, piece.lengths
        if lengths:
            offsets, lengths = (offsets[0] + begin, *offsets[1:]), (end - begin, *lengths[1:])
        yield Piece(piece.tensor, piece.dtype, offsets, lengths, hashlib.sha256(raw).hexdigest()), raw


def _chunks_of(data: bytes) -> list[bytes]:
    return [
        pb.UploadRequest(chunk=pb.Chunk(position=start, data=data[start : start + CHUNK_BYTES])).SerializeToString()
        for start in range(0, len(data), CHUNK_BYTES)
    ]


async def main() -> None:
    """Upload on demand, until standard input ends."""
    coordinator, state, first, count, num_parts, *ranks = sys.argv[1:]
    clients = []
    for number in range(int(first), int(first) + int(count)):
        name = f"client-{number}"
        place = await member(Path(state), Path(state).parent / name, name, coordinator)
        dial = place.dialer.channel
        to_ranks = [dial(address, aggregator(rank)) for rank, address in enumerate(ranks)]
        clients.append(Uploader(name, number, dial(coordinator, COORDINATOR), to_ranks, int(num_parts)))
    for client in clients:
        await client.connect()
    while True:
        rounds = await asyncio.gather(*(client.invited() for client in clients))
        print(f"ready {max(rounds)}", flush=True)
        if not (await asyncio.to_thread(sys.stdin.readline)).strip():
            return
        times = await asyncio.gather(*(client.upload() for client in clients))
        print(json.dumps({"first": min(t[0] for t in times), "last": max(t[1] for t in times)}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
