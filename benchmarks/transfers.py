"""Clients that only transfer, with the agent's own code: `python -m benchmarks.transfers`.

    ADDRESS COORDINATOR_STATE FOLDER COUNT

Each client has a control stream and, once invited, downloads the version into its model cache (each piece checked by
its SHA-256) and uploads an update of the version's size, from a file that all clients share, until the verdict. The
process reads `invited`, `down`, `up` and `up N` (in N parts) from standard input, does this for all clients at once,
and prints the durations as a line of JSON.
"""

import asyncio
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path

import grpc
import numpy as np

from atoll.client.disk.model_cache import ModelCache
from atoll.client.disk.spool import NO_COSTS, Entry, EntryPart
from atoll.client.wire.control_stream import Link
from atoll.client.wire.download import download
from atoll.client.wire.part_uploads import verdict_on
from atoll.client.wire.upload import Pace, upload
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.manifest import UpdateManifest, VersionManifest, digest_of, parse_version
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.protocol.wire.allocator import keep_freed_memory
from atoll.protocol.wire.channel import PROTOCOL
from atoll.tensors.layout import Piece
from benchmarks.members import member

TASK = "benchmarks.tasks:noise"
BLOCK_ELEMENTS = 1 << 22


@dataclass
class Material:
    """The upload of all clients: one file of noise in the shape of the version, written and hashed once."""

    path: Path
    pieces: tuple[Piece, ...] = ()

    def make(self, version: VersionManifest) -> None:
        """Write the file, and store the digest of each piece."""
        if self.pieces:
            return
        generator, pieces = np.random.default_rng(7), []
        with self.path.open("wb") as file:
            for piece in version.pieces:
                digest = hashlib.sha256()
                for begin in range(0, piece.num_elements, BLOCK_ELEMENTS):
                    count = min(BLOCK_ELEMENTS, piece.num_elements - begin)
                    is_float = piece.dtype == "F32"
                    values = generator.standard_normal(count, np.float32) if is_float else np.ones(count, np.int64)
                    digest.update(values.data)
                    file.write(values.data)
                pieces.append(with_changes(piece, sha256=digest.hexdigest()))
            os.fsync(file.fileno())
        self.pieces = tuple(pieces)

    def parts(self, count: int) -> tuple[tuple[PartManifest, int], ...]:
        """Return the file's pieces in parts of about one size, each with the position of its first byte."""
        if not count:
            return ()
        total, position = sum(piece.num_bytes for piece in self.pieces), 0
        groups: list[list[Piece]] = [[] for _ in range(count)]
        for piece in self.pieces:
            groups[min(count - 1, position * count // total)].append(piece)
            position += piece.num_bytes
        parts = [PartManifest(index, tuple(group)) for index, group in enumerate(groups)]
        begins = itertools.accumulate((part.num_bytes for part in parts), initial=0)
        return tuple(zip(parts, begins, strict=False))


@dataclass
class Client:
    """One client with its control stream."""

    name: str
    folder: Path
    dialer: Dialer
    address: str
    material: Material
    invite: pb.Invite = field(default_factory=pb.Invite)
    _tidying: "asyncio.Future[None] | None" = None

    async def join(self) -> None:
        """Open the control stream with a Hello, and begin to listen."""
        self._cache = ModelCache(self.folder)
        self._cache.scan()
        self._link = Link(self.dialer, self.address)
        await self._link.open(pb.Hello(protocol=PROTOCOL, client_id=self.name, session="1", tasks=[TASK]))
        self._invitations: asyncio.Queue[pb.Invite] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (message := await self._link.receive()) is not None:
            if message.WhichOneof("message") == "invite":
                self._invitations.put_nowait(message.invite)

    async def invited(self) -> float:
        """Wait for an invitation, prepare its transfers, and return the seconds of that."""
        begun = time.perf_counter()
        getting = asyncio.create_task(self._invitations.get())
        await asyncio.wait({getting, self._listening}, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            raise RuntimeError(f"{self.name}: the coordinator is gone")
        self.invite = getting.result()
        request = pb.ManifestRequest(run_id=self.invite.run_id, digest=self.invite.model_digest)
        async with self._link.calls() as stub:
            self._version = parse_version((await stub.GetManifest(request)).manifest)
        self.material.make(self._version)
        return time.perf_counter() - begun

    async def down(self) -> float:
        """Download the version of the invitation, and return the seconds."""
        run_id, digest = RunId(self.invite.run_id), Digest(self.invite.model_digest)
        if self._tidying is not None:
            await self._tidying
        copy = self._cache.begin(digest, self._version, reuse=False)
        begun = time.perf_counter()
        copy.resume()
        while not copy.is_complete:
            await download(self._link.connection, run_id, digest, copy)
        self._cache.finish(digest, self._version, copy)
        seconds = time.perf_counter() - begun
        self._tidying = asyncio.ensure_future(on_thread(None, self._cache.tidy))  # while it trains, as an agent does
        return seconds

    async def up(self, num_parts: int = 0) -> float:
        """Upload, and return the seconds until the acceptance.

        Args:
            num_parts: the number of parts, each on its own stream; 0: the update is sent as a whole.
        """
        parts = self.material.parts(num_parts)
        manifest = UpdateManifest(
            run_id=RunId(self.invite.run_id),
            round_id=RoundId(self.invite.round_id),
            client_id=ClientId(self.name),
            base_version=Version(self.invite.base_version),
            base_digest=Digest(self.invite.model_digest),
            num_examples=1,
            work=1.0,
            pieces=() if parts else self.material.pieces,
            parts=tuple(part.listed for part, _ in parts),
        )
        encoded = manifest.encode()
        entry = Entry(self.material.path, encoded, digest_of(encoded), 0, manifest.num_bytes, {}, NO_COSTS)
        contents = [EntryPart(entry.path, part.encode(), part.num_bytes, begin) for part, begin in parts] or [None]
        begun = time.perf_counter()
        async with self._link.calls() as stub:
            send = partial(upload, stub, entry, Pace(0), is_first_attempt=False)
            verdict = await verdict_on([partial(send, part=content) for content in contents])
        if not verdict.accepted:
            raise RuntimeError(f"{self.name}: {verdict.reason}: {verdict.detail}")
        return time.perf_counter() - begun

    async def leave(self) -> None:
        """Close the connection."""
        self._listening.cancel()
        await self._link.close()


WAYS: dict[str, Callable[..., Awaitable[float]]] = {
    "invited": Client.invited,
    "down": Client.down,
    "up": Client.up,
}


async def main() -> None:
    """Transfer on demand, until standard input ends."""
    address, coordinator_state, place, count = sys.argv[1:]
    folder = Path(place)
    material = Material(folder / "update.bin")
    clients = []
    for number in range(int(count)):
        name, models = f"client-{number}", folder / f"client-{number}" / "models"
        models.mkdir(parents=True, exist_ok=True)
        place_of = await member(Path(coordinator_state), models.parent, name, address)
        client = Client(name, models, place_of.dialer, address, material)
        await client.join()
        clients.append(client)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        begun = time.perf_counter()
        way, *numbers = line.split()
        seconds = await asyncio.gather(*(WAYS[way](client, *map(int, numbers)) for client in clients))
        print(json.dumps({"each": seconds, "all": time.perf_counter() - begun}), flush=True)
    await asyncio.gather(*(client.leave() for client in clients))


if __name__ == "__main__":
    keep_freed_memory()  # as `atoll agent` does
    try:
        asyncio.run(main())
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"{error.code()}: {error.details()}") from None
