"""A real coordinator on a real socket, and a client of bare messages that can do everything wrong."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import InsecureDialer, MutualDialer
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.protocol.manifest import UpdateManifest, VersionManifest, parse_version
from atoll.protocol.settings import load_text
from atoll.protocol.wire.channel import PROTOCOL
from atoll.protocol.wire.stream import first_status
from atoll.server.config.run import RunFile
from atoll.server.process import Accepted, host
from atoll.tensors.layout import Piece
from benchmarks.members import equip
from tests.waiting import BOUND_S

TINY = str(Path(__file__).parent / "tasks" / "four_numbers_task.py") + ":task"
BASE = {
    "round.cohort_size": 2,
    "round.retry_wait": 0,  # the rounds of a test follow each other at once
    "round.failure_rest": 0,
    "evaluation.server_every": 0,
    "coordinator.listen": "127.0.0.1:0",
    "coordinator.insecure": True,
}


class Live:
    """A coordinator that runs in this process, on a socket."""

    def __init__(self, coordinator, ports):
        self.coordinator, self.ports = coordinator, ports
        self.address, self.admin_address = ports.address, ports.admin_address

    def dialer(self, identity):
        """Return the dialer of a member, insecure unless a test says otherwise."""
        if self.coordinator.config.insecure:
            return InsecureDialer()
        state = self.coordinator.config.state
        return MutualDialer(Keeper(equip(state, state.parent / f"{identity.role}-{identity.name}", identity)))

    @property
    def run(self):
        return next(iter([*self.coordinator.running, *self.coordinator.runs.values()]))

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[rpc.Stub]:
        async with self.dialer(Identity(Role.OWNER, "me")).channel(self.admin_address, COORDINATOR) as channel:
            yield rpc.Stub(channel, "Admin")

    @asynccontextmanager
    async def client(self, name, *, as_name=None, **hello) -> AsyncIterator["Client"]:
        identity = Identity(Role.CLIENT, as_name or name)
        async with self.dialer(identity).channel(self.address, COORDINATOR) as channel:
            client = Client(channel, name)
            await client.hello(**hello)
            yield client
            client.control.cancel()


def settings(state, **overrides):
    """Settings as a user would give them; `round__quorum=1` stands for round.quorum."""
    keys = BASE | {"task": TINY, "name": "tiny", "rounds": 3, "coordinator.state": str(state)}
    keys |= {key.replace("__", "."): value for key, value in overrides.items()}
    texts = [f"{k}={v}" if isinstance(v, bool | int | float) else f'{k}="{v}"' for k, v in keys.items()]
    return load_text(RunFile, "", [t.replace("=True", "=true").replace("=False", "=false") for t in texts], name="test")


@asynccontextmanager
async def running(state, *, accept_losses=False, **overrides) -> AsyncIterator[Live]:
    """A coordinator that hosts the tiny task until the block ends."""
    config = settings(state, **overrides)
    ready = asyncio.get_running_loop().create_future()
    process = asyncio.ensure_future(
        host(
            config.coordinator,
            config.run,
            stay=True,
            accepts=Accepted(losses=accept_losses),
            on_ready=lambda c, a: ready.set_result(Live(c, a)),
        )
    )
    done, _ = await asyncio.wait([process, ready], return_when=asyncio.FIRST_COMPLETED)
    if process in done:
        process.result()
    live = ready.result()
    while not live.coordinator.runs:
        await asyncio.sleep(0.01)
        if process.done():
            process.result()
    try:
        yield live
    finally:
        process.cancel()
        await asyncio.wait([process])


class Client:
    """One client that speaks the protocol by hand."""

    def __init__(self, channel, name):
        self.stub, self.name = rpc.Stub(channel, "Coordinator"), name
        self.control = self.ending = None

    async def hello(self, *, tasks=("four_numbers_task:task",), session="s1", protocol=PROTOCOL, **fields):
        self.control = self.stub.Session()
        self.ending = first_status(self.control)
        hello = pb.Hello(protocol=protocol, client_id=self.name, session=session, tasks=tasks, **fields)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # refused before: `control` tells
            await self.control.write(pb.ClientMessage(hello=hello))

    async def next(self, kind, timeout=BOUND_S):
        """The next message of this kind."""
        async with asyncio.timeout(timeout):
            while (message := await self.control.read()) is not grpc.aio.EOF:
                if message.WhichOneof("message") == kind:
                    return getattr(message, kind)
        raise AssertionError(f"the stream ended before {kind}: {(await self.ending).detail}")

    async def download(self, invite, *, position=0, boxes=(), credit=1 << 40):
        """Manifest and bytes of the version of an invitation."""
        reply = await self.stub.GetManifest(pb.ManifestRequest(run_id=invite.run_id, digest=invite.model_digest))
        call = self.stub.Download()
        opened = pb.DownloadOpen(
            run_id=invite.run_id, digest=invite.model_digest, position=position, boxes=boxes, credit=credit
        )
        await call.write(pb.DownloadRequest(open=opened))
        data, sha256 = b"", b""
        async for message in call:
            data += message.data
            sha256 = message.sha256 or sha256
        return parse_version(reply.manifest), data, sha256

    async def upload(self, manifest, data, /, *, cut_at=None, chunk=1 << 20, **opened):
        """The verdict on an update; None when the stream was cut on purpose at that byte."""
        call = self.stub.Upload()
        encoded = manifest if isinstance(manifest, bytes) else manifest.encode()
        await call.write(pb.UploadRequest(open=pb.UploadOpen(manifest=encoded, **opened)))
        async for reply in call:
            if reply.WhichOneof("reply") == "verdict":
                return reply.verdict
            self.resumed_at = getattr(self, "resumed_at", [])
            position = reply.position
            self.resumed_at.append(position)
            if cut_at is not None and position >= cut_at:
                call.cancel()
                return None
            part = data[position : position + chunk]
            if part:
                await call.write(pb.UploadRequest(chunk=pb.Chunk(position=position, data=part)))
            else:
                await call.done_writing()
        raise AssertionError("no verdict")

    async def train(self, invite, *, value=1.0, **claims):
        """An honest update of all ones times `value`, and its manifest; claims overwrite what it says of itself."""
        version, _, _ = await self.download(invite)
        return update_of(invite, self.name, version, value=value, **claims)


def update_of(invite, client, version: VersionManifest, *, value=1.0, **claims):
    arrays = {p.tensor: _array(p, value) for p in version.pieces}
    pieces = tuple(replace(p, sha256=hashlib.sha256(arrays[p.tensor].tobytes()).hexdigest()) for p in version.pieces)
    fields = {
        "run_id": invite.run_id,
        "round_id": invite.round_id,
        "client_id": client,
        "base_version": invite.base_version,
        "base_digest": invite.model_digest,
        "num_examples": 10,
        "work": 1.0,
        "pieces": pieces,
    }
    manifest = UpdateManifest(**(fields | claims))
    return manifest, b"".join(arrays[p.tensor].tobytes() for p in version.pieces)


def _array(piece: Piece, value: float) -> np.ndarray:
    dtype = {"F32": np.float32, "I64": np.int64}[piece.dtype]
    return np.full(piece.lengths, value, dtype)
