"""Empty rounds by hand, with the duties of ours and nothing else: the measure for the latency of a round.

    python -m benchmarks.tight_rounds serve FOLDER COHORT             prints its port, reads how many rounds to do
    python -m benchmarks.tight_rounds attend FOLDER PORT FIRST COUNT  COUNT clients in one process

One stream for each client over mutual TLS, raw bytes (no protobuf), `grpc.aio` on both sides. The duties of a round of
n clients, with the sizes that ours has:

    server  two commits (the round is open; the cohort is drawn); n signed invitations that carry the model; for each
            update a SHA-256, a check that its numbers are finite, and two entries and a row in a group commit; n
            verdicts; the updates read back, their mean, and a version and its manifest, both synced
    client  the signature and the model's SHA-256 checked; the model written; the number of the invitation synced
            (against a replay); the update written, read back, hashed, synced and renamed into the spool; sent;
            deleted after the verdict

A round counts, as ours, from its opening to its durable version. After that, outside the time as in ours, come the rows
of its commit, and the deletion of those that they replace. There are no deadlines, leases, policies, logs or resumable
transfers.
"""

import asyncio
import hashlib
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.protocol.identity.certificates import server_name
from benchmarks.tight_journal import Entry, TightJournal, Update
from benchmarks.tight_wire import SIDES, make_credentials

METHOD = "/Tight/Attend"
SIGNING_KEY = "signing.key"
SIGNATURE_BYTES = 64
DIALS_AT_ONCE = 50

# What ours has for this model, in bytes: counted on 2026-11-25.
VALUES_BYTES = 16  # four float32
MODEL_BYTES = 80  # with their header
INVITATION_BYTES = 517
MANIFEST_BYTES = 208  # of a version
UPLOAD_BYTES = 415  # manifest and update of one client
SEEN_BYTES = 178  # a client's note of each invitation
SPOOLED_BYTES = 555  # behind an update in the spool
BEGUN, RECEIVED, META = 42, 283, 488  # of an update: two entries of the journal, and its row
NAME_BYTES = 17  # of a client, in the entry of its cohort
RECORD_BYTES, MEMBER_BYTES = 513, 2100  # of a client: in the record of a round, and in a snapshot


class Upload:
    """One update that waits for its commit."""

    def __init__(self, message: bytes) -> None:
        digest = hashlib.sha256(message).hexdigest()
        self.values = message[-VALUES_BYTES:]
        assert np.isfinite(np.frombuffer(self.values, np.float32)).all()
        self.row: Update = (digest, "m" * META, self.values)
        self.is_durable = asyncio.get_running_loop().create_future()


class Server:
    """The server: the clients' streams, the journal, and one round after the other.

    Args:
        folder: of its own.
        cohort: clients in a round.
    """

    def __init__(self, folder: Path, cohort: int) -> None:
        self._folder, self._cohort = folder, cohort
        self._journal, self._disk = TightJournal(folder / "tight.db"), ThreadPoolExecutor(1)
        self._key = Ed25519PrivateKey.from_private_bytes((folder / SIGNING_KEY).read_bytes())
        self._streams: list[Any] = []
        self._rng = random.Random(0)
        self._model = bytes(MODEL_BYTES)
        self._seq = self._round = 0
        self._waiting: list[Upload] = []
        self._wake, self._is_whole, self._is_answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._num_missing = self._num_unanswered = 0
        self.num_commits = 0

    async def attend(self, requests: Any, context: Any) -> None:
        """Serve one client's stream."""
        await context.read()
        self._streams.append(context)
        await context.write(b"welcome")
        while isinstance(message := await context.read(), bytes):
            upload = Upload(message)
            self._waiting.append(upload)
            self._wake.set()
            await upload.is_durable
            await context.write(b"accepted")
            self._num_unanswered -= 1
            if not self._num_unanswered:
                self._is_answered.set()

    async def write(self) -> None:
        """Write group commits, each of the updates that came while the last one was being written."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            uploads, self._waiting = self._waiting, []
            if not uploads:
                continue
            pair = (("UploadBegun", BEGUN), ("UpdateReceived", RECEIVED))
            entries = [self._entry(kind, size) for _ in uploads for kind, size in pair]
            await self._commit(entries, [upload.row for upload in uploads])
            for upload in uploads:
                upload.is_durable.set_result(None)
            self._num_missing -= len(uploads)
            if not self._num_missing:
                self._is_whole.set()

    async def rounds(self, count: int) -> dict[str, Any]:
        """Run rounds; return the seconds and the commits of each."""
        seconds, commits = [], []
        for _ in range(count):
            before = self.num_commits
            seconds.append(await self._one_round())
            commits.append(self.num_commits - before)
        return {"seconds": seconds, "commits": commits}

    async def _one_round(self) -> float:
        begun, self._round = time.perf_counter(), self._round + 1
        self._num_missing = self._num_unanswered = self._cohort
        self._is_whole.clear()
        self._is_answered.clear()
        await self._commit([self._entry("RoundDue", 2)])
        cohort = self._rng.sample(self._streams, self._cohort)
        await self._commit([self._entry("CohortDrawn", NAME_BYTES * self._cohort)])
        await asyncio.gather(*(stream.write(self._invitation()) for stream in cohort))
        await self._is_whole.wait()
        await self._on_disk(self._publish)
        seconds = time.perf_counter() - begun
        await self._on_disk(self._close)
        await self._is_answered.wait()  # a stream takes one message at a time
        return seconds

    def _publish(self) -> None:
        """Make the next version from the updates in the journal, durable."""
        values = [np.frombuffer(data, np.float32) for data in self._journal.updates()]
        assert len(values) == self._cohort
        mean = np.mean(values, axis=0, dtype=np.float64).astype(np.float32)
        self._model = self._model[:-VALUES_BYTES] + mean.tobytes()
        stem = self._folder / f"{self._round:06}"
        parts = {stem.with_suffix(".safetensors"): self._model, stem.with_suffix(".json"): bytes(MANIFEST_BYTES)}
        for path, data in parts.items():
            write_synced(path.with_suffix(".part"), data)
            os.rename(path.with_suffix(".part"), path)
        sync_folder(self._folder)

    def _close(self) -> None:
        """Write the rows of a round's commit, and delete those that they replace."""
        number, size = self._round, self._cohort
        entries, pages = [self._entry("Aggregated", 96)], [(self._seq, 0, "p" * MEMBER_BYTES * size)]
        self._journal.commit(entries, pages=pages, record=(number, "r" * RECORD_BYTES * size))
        self._journal.prune(self._seq)
        self.num_commits += 2

    def _invitation(self) -> bytes:
        body = self._model + bytes(INVITATION_BYTES - SIGNATURE_BYTES - MODEL_BYTES)
        return self._key.sign(body) + body

    def _entry(self, kind: str, size: int) -> Entry:
        self._seq += 1
        return self._seq, time.time(), kind, "b" * size

    async def _commit(self, entries: list[Entry], updates: list[Update] | None = None) -> None:
        self.num_commits += 1
        await self._on_disk(self._journal.commit, entries, updates or [])

    async def _on_disk(self, work: Any, *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)


class Client:
    """One client: its files and its end of the stream."""

    def __init__(self, folder: Path, channel: grpc.aio.Channel, key: Ed25519PublicKey) -> None:
        folder.mkdir(parents=True)
        self._folder, self._key = folder, key
        self._manifest = folder.name.encode().ljust(SPOOLED_BYTES)  # no two are the same
        self._call: Any = channel.stream_stream(METHOD)()
        self._spooled = folder / "spooled"

    async def connect(self) -> None:
        """Open the stream, and wait for the server's answer."""
        await self._call.write(b"hello")
        await self._call.read()

    async def serve(self) -> None:
        """Answer every invitation until the server is gone."""
        loop = asyncio.get_running_loop()
        while isinstance(message := await self._call.read(), bytes):
            if message == b"accepted":
                self._spooled.unlink()
            else:
                await self._call.write(await loop.run_in_executor(None, self._work, message))

    def _work(self, message: bytes) -> bytes:
        body = message[SIGNATURE_BYTES:]
        self._key.verify(message[:SIGNATURE_BYTES], body)
        model, update = body[:MODEL_BYTES], self._folder / "update"
        hashlib.sha256(model[-VALUES_BYTES:]).hexdigest()
        (self._folder / "model").write_bytes(model)
        update.write_bytes(model[:-VALUES_BYTES] + np.ones(4, np.float32).tobytes())
        write_synced(self._folder / "seen", bytes(SEEN_BYTES))
        hashlib.sha256(update.read_bytes()).hexdigest()
        write_synced(update, self._manifest, flags=os.O_APPEND)
        os.rename(update, self._spooled)
        sync_folder(self._folder)
        spooled = self._spooled.read_bytes()
        return spooled[MODEL_BYTES:][: UPLOAD_BYTES - VALUES_BYTES] + spooled[:MODEL_BYTES][-VALUES_BYTES:]


def prepare(folder: Path) -> None:
    """Make the certificates and the signing key of both sides."""
    make_credentials(folder)
    (folder / SIGNING_KEY).write_bytes(Ed25519PrivateKey.generate().private_bytes_raw())


def write_synced(path: Path, data: bytes, *, flags: int = os.O_TRUNC) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


async def serve(folder: Path, cohort: int) -> None:
    """Serve until standard input ends."""
    rounds = Server(folder, cohort)
    handler: Any = grpc.stream_stream_rpc_method_handler(rounds.attend)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Tight", {"Attend": handler}),))
    own = [((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())]
    ssl = grpc.ssl_server_credentials(own, (folder / "ca.pem").read_bytes(), require_client_auth=True)
    print(server.add_secure_port("127.0.0.1:0", ssl), flush=True)
    await server.start()
    writing = asyncio.ensure_future(rounds.write())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = asyncio.ensure_future(rounds.rounds(int(line)))
        await asyncio.wait([asked, writing], return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()  # raises its error
        print(json.dumps(asked.result()), flush=True)
    writing.cancel()
    await server.stop(0)


async def attend(folder: Path, port: str, first: int, count: int) -> None:
    """Run clients until the server is gone."""
    own = [(folder / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
    ssl = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *own)
    name = ("grpc.ssl_target_name_override", server_name(SIDES["server"]))
    options = [name, ("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
    key = Ed25519PrivateKey.from_private_bytes((folder / SIGNING_KEY).read_bytes()).public_key()
    clients = []
    for number in range(first, first + count):
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", ssl, options=options)
        clients.append(Client(folder / "tight-clients" / f"{number:05d}", channel, key))
    for begin in range(0, count, DIALS_AT_ONCE):
        await asyncio.gather(*(client.connect() for client in clients[begin : begin + DIALS_AT_ONCE]))
    print("ready", flush=True)
    await asyncio.gather(*(client.serve() for client in clients))


def main() -> None:
    """Run one of the two sides."""
    what, folder, *rest = sys.argv[1:]
    if what == "serve":
        asyncio.run(serve(Path(folder), int(rest[0])))
    else:
        asyncio.run(attend(Path(folder), rest[0], int(rest[1]), int(rest[2])))


if __name__ == "__main__":
    main()
