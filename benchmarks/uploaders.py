"""Clients that only upload: `python -m benchmarks.uploaders COORDINATOR FIRST COUNT RANK_ADDRESS...`.

Each client has its control stream and a connection to its rank, and sends bytes that were generated, hashed and packed
into messages before. The line `ready ROUND` reports that all clients are invited and prepared; the line `go` on
standard input starts all uploads at once; then one line of JSON has the instants of the first byte and of the last
acceptance.
"""

import asyncio
import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from atoll.aggregation.tensors.layout import Piece
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.names import COORDINATOR, aggregator
from atoll.protocol.manifest import UpdateManifest, VersionManifest, parse_version
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.protocol.wire.channel import CHUNK_BYTES, PROTOCOL, UPLOAD_WINDOW_BYTES
from benchmarks.members import member

TASK = "benchmarks.tasks:noise"


@dataclass
class Uploader:
    """One client; its update is the same in every round, except for the number of rounds in the manifest."""

    name: str
    seed: int
    coordinator: grpc.aio.Channel
    ranks: list[grpc.aio.Channel]
    chunks: list[bytes] = field(default_factory=list)
    pieces: tuple[Piece, ...] = ()
    opened: bytes = b""
    invite: pb.Invite = field(default_factory=pb.Invite)

    async def invited(self) -> int:
        """Wait for the next invitation, prepare its upload, and return the round."""
        while (message := await self.control.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") == "invite":
                self.invite = message.invite
                break
        else:
            raise RuntimeError(f"{self.name}: {await self.control.details()}")
        if not self.pieces:
            request = pb.ManifestRequest(run_id=self.invite.run_id, digest=self.invite.model_digest)
            reply = await rpc.CoordinatorStub(self.coordinator).GetManifest(request)
            self._prepare(parse_version(reply.manifest))
        manifest = UpdateManifest(
            run_id=RunId(self.invite.run_id),
            round_id=RoundId(self.invite.round_id),
            client_id=ClientId(self.name),
            base_version=Version(self.invite.base_version),
            base_digest=Digest(self.invite.model_digest),
            num_examples=1 + self.seed,
            work=1.0,
            pieces=self.pieces,
        )
        self.opened = pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())).SerializeToString()
        return int(self.invite.round_id)

    async def connect(self) -> None:
        """Open the control stream with a Hello."""
        self.control = rpc.CoordinatorStub(self.coordinator).Session()
        hello = pb.Hello(protocol=PROTOCOL, client_id=self.name, session="1", tasks=[TASK])
        await self.control.write(pb.ClientMessage(hello=hello))

    def _prepare(self, version: VersionManifest) -> None:
        generator, data, pieces = np.random.default_rng(self.seed), bytearray(), []
        for piece in version.pieces:
            values = (
                generator.standard_normal(piece.num_elements, np.float32)
                if piece.dtype == "F32"
                else np.ones(piece.num_elements, np.int64)
            )
            data += values.tobytes()
            digest = hashlib.sha256(values.tobytes()).hexdigest()
            pieces.append(Piece(piece.tensor, piece.dtype, piece.offsets, piece.lengths, digest))
        self.pieces = tuple(pieces)
        self.chunks = [
            pb.UploadRequest(
                chunk=pb.Chunk(position=start, data=bytes(data[start : start + CHUNK_BYTES]))
            ).SerializeToString()
            for start in range(0, len(data), CHUNK_BYTES)
        ]

    async def upload(self) -> tuple[float, float]:
        """Send the update; return the instants of its begin and its acceptance."""
        call = self.ranks[self.invite.rank].stream_stream(
            "/atoll.v1.Aggregator/Upload", response_deserializer=pb.UploadReply.FromString
        )()
        begun = time.monotonic()
        await call.write(self.opened)
        sent = confirmed = 0
        while (reply := await call.read()) is not grpc.aio.EOF:
            if reply.WhichOneof("reply") == "verdict":
                if not reply.verdict.accepted:
                    raise RuntimeError(f"{self.name}: {reply.verdict.reason}: {reply.verdict.detail}")
                return begun, time.monotonic()
            confirmed = reply.position
            while sent < len(self.chunks) and (sent + 1) * CHUNK_BYTES - confirmed <= UPLOAD_WINDOW_BYTES:
                await call.write(self.chunks[sent])
                sent += 1
        raise RuntimeError(f"{self.name}: {await call.details()}")


async def main() -> None:
    """Upload on demand, until standard input ends."""
    coordinator, state, first, count, *ranks = sys.argv[1:]
    clients = []
    for number in range(int(first), int(first) + int(count)):
        name = f"client-{number}"
        place = await member(Path(state), Path(state).parent / name, name, coordinator)
        dial = place.dialer.channel
        to_ranks = [dial(address, aggregator(rank)) for rank, address in enumerate(ranks)]
        clients.append(Uploader(name, number, dial(coordinator, COORDINATOR), to_ranks))
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
