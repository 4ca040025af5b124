"""A scripted coordinator for tests of the agent, on a real socket.

Like the real one it keeps the received bytes of an update across cuts; it counts every byte.
"""

import asyncio
import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np

from atoll.client.config import AgentConfig
from atoll.client.process import run_agent
from atoll.client.work.runner import Training
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.manifest import VersionManifest, parse_update
from atoll.protocol.wire.channel import CHUNK_BYTES, DOWNLOAD_WINDOW_BYTES, UPLOAD_WINDOW_BYTES, server_options
from atoll.protocol.wire.upload_window import Confirmations
from atoll.task.arrays import layout_of
from atoll.tensors.pieces import cut_layout, piece_bytes_of
from atoll.tensors.safetensors_file import write
from tests.waiting import BOUND_S

MIB = 2**20


def live(test):
    """Run an async test on a loop of its own, within a minute."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def bounded():
            async with asyncio.timeout(BOUND_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


class Version:
    """A version of the global model in memory."""

    def __init__(self, arrays):
        layout, self.bytes_of, pieces = layout_of(arrays), {}, []
        for piece in cut_layout(layout, piece_bytes_of(layout)):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
            data = self.bytes_of[piece.tensor, piece.offsets] = arrays[piece.tensor][box].tobytes()
            pieces.append(replace(piece, sha256=hashlib.sha256(data).hexdigest()))
        self.manifest = VersionManifest.of(pieces)
        self.data = b"".join(self.bytes_of.values())
        self.digest = self.manifest.digest


def model(seed=0, **sizes):
    """Random float32 vectors by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in (sizes or {"w": 4}).items()}


class Lagoon:
    """The servicer; a test sets `*_cuts` beforehand, the positions [bytes] at each of which a transfer is cut once."""

    def __init__(self):
        self.versions = {}
        self.hellos, self.messages = [], asyncio.Queue()
        self.pushes = None  # of the newest stream
        self.welcome = pb.Welcome(heartbeat_s=5.0, lease_s=15.0)
        self.session_status = None
        self.signed = None  # what becomes of each message that is pushed to a client
        self.download_cuts, self.upload_cuts = [], []
        self.download_end = 1 << 60  # where a download goes no further
        self.answers_first_download = True
        self.window, self.chunk_sizes = 0, []
        self.damage = Counter()  # tensor -> how many more times it comes damaged
        self.calls, self.opened, self.asked = Counter(), [], []
        self.peers = defaultdict(list)  # over which connection each call came, by its method
        self.sent_bytes = self.received_bytes = 0
        self.received = {}
        self.verdicts = {}
        self.lose_verdicts = 0
        self.upload_status = None
        self.knows_no_inline_data = False  # as before an update could ride with its manifest
        self.verdict, self.early_verdict = pb.Verdict(accepted=True), None
        self.accepted, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()  # until a test holds the verdicts back

    def add(self, version):
        self.versions[version.digest] = version
        return version

    # ------------------------------------------------------------ control

    async def Session(self, requests, context):
        self.calls["Session"] += 1
        hello = (await anext(requests)).hello
        self.hellos.append(hello)
        if self.session_status is not None:
            await context.abort(*self.session_status)
        pushes = self.pushes = asyncio.Queue()
        reader = asyncio.ensure_future(self._read(requests, pushes))
        try:
            yield self._signed(pb.ServerMessage(welcome=self.welcome), hello)
            while (message := await pushes.get()) is not None:
                if isinstance(message, tuple):
                    await context.abort(*message)
                yield self._signed(message, hello)
        finally:
            reader.cancel()

    def _signed(self, message, hello):
        return message if self.signed is None else self.signed(message, hello.client_id)

    async def _read(self, requests, pushes):
        async for message in requests:
            self.messages.put_nowait(message)
        pushes.put_nowait(None)

    async def heard(self, kind):
        """Wait for the next message of a kind, and return it."""
        while (message := await self.messages.get()).WhichOneof("message") != kind:
            pass
        return getattr(message, kind)

    async def connected(self, count=1):
        while len(self.hellos) < count:
            await asyncio.sleep(0.005)

    async def invite(self, version, *, round_id=1, time_left=30.0, inline=True, **fields):
        fields = {"task": "tiny:task", "run_id": "run-1", "local": "{}"} | fields
        invite = pb.Invite(
            round_id=round_id,
            base_version=round_id - 1,
            model_digest=version.digest,
            time_left_s=time_left,
            seed=7,
            manifest=version.manifest.encode() if inline else b"",
            **fields,
        )
        await self.push(invite=invite)

    async def push(self, **message):
        await self.connected()
        self.pushes.put_nowait(pb.ServerMessage(**message))

    # ------------------------------------------------------------ data

    async def GetManifest(self, request, context):
        self.calls["GetManifest"] += 1
        self.peers["GetManifest"].append(context.peer())
        return pb.ManifestReply(manifest=self.versions[request.digest].manifest.encode())

    async def Download(self, requests, context):
        self.calls["Download"] += 1
        self.peers["Download"].append(context.peer())
        if self.calls["Download"] == 1 and not self.answers_first_download:
            await asyncio.Event().wait()
        opened = (await anext(requests)).open
        self.opened.append(opened)
        if opened.digest not in self.versions:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such version")
        version = self.versions[opened.digest]
        boxes = [(box.tensor, tuple(box.offsets)) for box in opened.boxes] or list(version.bytes_of)
        self.asked.append([name for name, _ in boxes])
        data = b"".join(self._damaged(box[0], version.bytes_of[box]) for box in boxes)
        yield pb.DownloadReply(total_bytes=len(data))
        position, credit = opened.position, opened.credit
        while position < len(data):
            if position >= self.download_end:
                await asyncio.Event().wait()
            while credit <= position:
                credit = (await anext(requests)).credit
            assert credit - position <= DOWNLOAD_WINDOW_BYTES
            size = min(CHUNK_BYTES, len(data) - position, credit - position)
            cut = _cut(self.download_cuts, position, size)
            if cut is not None:
                size = cut - position
            self.sent_bytes += size
            if size:
                yield pb.DownloadReply(data=data[position : position + size])
            if cut is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            position += size
        yield pb.DownloadReply(sha256=hashlib.sha256(data).digest() if opened.boxes else b"")

    def _damaged(self, name, data):
        if self.damage[name] > 0:
            self.damage[name] -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    async def Upload(self, requests, context):
        self.calls["Upload"] += 1
        opened = (await anext(requests)).open
        self.opened.append(opened)
        if self.upload_status is not None:
            await context.abort(*self.upload_status)
        manifest = parse_update(opened.manifest)
        if manifest.digest in self.verdicts:
            await self._may_answer(context)
            yield pb.UploadReply(verdict=self.verdicts[manifest.digest])
            self.accepted.set()
            return
        held = self.received.setdefault(manifest.digest, bytearray())
        if self.knows_no_inline_data:
            opened.data = b""
        if opened.data:
            held.clear()
        else:
            yield pb.UploadReply(position=len(held), window=self.window)
        confirmed = len(held)
        while len(held) < manifest.num_bytes:
            chunk = pb.Chunk(data=opened.data) if opened.data else (await anext(requests)).chunk
            self._look_at(chunk, len(held), confirmed)
            cut = _cut(self.upload_cuts, len(held), len(chunk.data))
            if cut is not None:
                held += chunk.data[: cut - len(held)]
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut by the test")
            held += chunk.data
            if self.early_verdict is not None:
                yield pb.UploadReply(verdict=self.early_verdict)
                return
            if Confirmations(confirmed, self.window or UPLOAD_WINDOW_BYTES).is_due(len(held), len(chunk.data)):
                confirmed = len(held)
                yield pb.UploadReply(position=confirmed, window=self.window)
        self._judge(manifest, held)
        await self._may_answer(context)
        yield pb.UploadReply(verdict=self.verdict)
        self.accepted.set()

    def _look_at(self, chunk, position, confirmed):
        self.received_bytes += len(chunk.data)
        self.chunk_sizes.append(len(chunk.data))
        assert chunk.position == position
        assert len(chunk.data) <= CHUNK_BYTES
        assert position + len(chunk.data) - confirmed <= (self.window or UPLOAD_WINDOW_BYTES)

    def _judge(self, manifest, held):
        for piece, data in zip(manifest.pieces, _split(manifest, held), strict=True):
            assert hashlib.sha256(data).hexdigest() == piece.sha256
        if not self.verdict.resend:
            self.verdicts[manifest.digest] = self.verdict
        else:
            held.clear()

    async def _may_answer(self, context):
        await self.answers.wait()
        if self.lose_verdicts:
            self.lose_verdicts -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the verdict is lost")


def _cut(cuts, position, size):
    """Take the first cut within the next bytes from the list, and return it."""
    for cut in cuts:
        if position <= cut < position + size:
            cuts.remove(cut)
            return cut
    return None


def _split(manifest, data):
    ends = list(itertools.accumulate(piece.num_bytes for piece in manifest.pieces))
    return [bytes(data[end - piece.num_bytes : end]) for piece, end in zip(manifest.pieces, ends, strict=True)]


@asynccontextmanager
async def lagoon(port=0):
    """Serve a `Lagoon` for the block; its `address` is set."""
    servicer, server = Lagoon(), grpc.aio.server(options=server_options())
    rpc.add_servicer(servicer, server, "Coordinator")
    servicer.port = server.add_insecure_port(f"127.0.0.1:{port}")
    servicer.address, servicer.server = f"127.0.0.1:{servicer.port}", server
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


class Instant:
    """A runner in this process, whose update is all ones, at once or when the test sets `go`."""

    def __init__(self, arrays=None):
        self.arrays = arrays or {"w": np.ones(4, np.float32)}
        self.orders, self.calls = [], []
        self.go, self.begun = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.error = None

    async def describe(self):
        return 10

    async def train(self, order):
        self.orders.append(order)
        self.begun.set()
        await self.go.wait()
        if self.error:
            raise self.error
        pieces = write(order.out, self.arrays)
        return Training(pieces=pieces, num_examples=10, work=1.0, statistics={"loss": (2.0, 10.0)}, seconds=0.25)

    async def evaluate(self, order):
        self.orders.append(order)
        if self.error:
            raise self.error
        return {"accuracy": (7.0, 10.0)}

    def extend(self, budget):
        self.calls.append(("extend", budget))

    def stop(self):
        self.calls.append("stop")
        self.go.set()

    def kill(self):
        self.calls.append("kill")

    def run_ended(self, run_id):
        """Do nothing: there are no data."""

    async def close(self):
        self.calls.append("close")


def config(lagoon_, state, **fields):
    fields = {"site": "north", "reconnect_min": 0.01, "reconnect_max": 0.2} | fields
    settings = AgentConfig(state=state, insecure=True, **fields)
    return settings.model_copy(update={"coordinator": lagoon_.address})  # a test may play another machine


@asynccontextmanager
async def agent(lagoon_, state, runner=None, *, authorities=None, **fields):
    """Run an agent in this process for the block; it must still run at the end unless the test expects its end."""
    runner = runner or Instant()
    settings = config(lagoon_, state, **fields)
    tasks = {"tiny:task": "x:task"}
    running = run_agent(settings, tasks, runner=runner, handle_signals=False, authorities=authorities)
    task = asyncio.ensure_future(running)
    try:
        yield task
        if task.done():
            assert task.result() == 0
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():  # a shutdown that fails may leave a connection open
            task.result()


async def until(condition, timeout=BOUND_S):
    """Poll a condition until it is true."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
