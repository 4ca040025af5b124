"""A transfer by hand with grpcio, for this single purpose, as the baseline of the data plane.

    python -m benchmarks.tight_wire serve CREDENTIALS FOLDER CHUNK_KIB     the server, which prints its port
    python -m benchmarks.tight_wire drive CREDENTIALS FOLDER CHUNK_KIB PORT SOURCE SIZE
                                                                            the client; reads up|down duties|raw

Mutual TLS, raw bytes without protobuf, blocking gRPC on both sides, one call for each transfer, only the library's flow
control. With duties the receiver hashes with SHA-256, writes to a new file, and after an upload calls fdatasync. There
is no manifest, no position to resume from, and no inspection of the numbers.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, server_name, to_pem
from atoll.protocol.identity.names import COORDINATOR, Identity, Role

OPTIONS = [("grpc.max_receive_message_length", 1 << 26), ("grpc.max_send_message_length", 1 << 26)]
DUTIES, RAW = b"duties", b"raw"
UP, DOWN = "tight-up", "tight-down"
SIDES = {"server": COORDINATOR, "client": Identity(Role.CLIENT, "tight")}


def make_credentials(folder: Path) -> None:
    """Make an authority, and a certificate for each side."""
    now = time.time()
    issuer = Issuer.create("tight loop", now=now)
    (folder / "ca.pem").write_bytes(to_pem(issuer.certificate))
    for side, identity in SIDES.items():
        key = new_key()
        (folder / f"{side}.key").write_bytes(key_to_pem(key))
        (folder / f"{side}.pem").write_bytes(to_pem(issuer.issue(key.public_key(), identity, now=now)))


class Receiver:
    """The receiver of one transfer."""

    def __init__(self, path: Path, *, has_duties: bool, is_durable: bool) -> None:
        self._sha256, self._has_duties, self._is_durable = hashlib.sha256(), has_duties, is_durable
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) if has_duties else -1

    def receive(self, chunks: Iterable[bytes]) -> str:
        """Receive all chunks, and return the SHA-256."""
        for chunk in chunks:
            if self._has_duties:
                self._sha256.update(chunk)
                os.write(self._fd, chunk)
        if self._has_duties:
            if self._is_durable:
                os.fdatasync(self._fd)
            os.close(self._fd)
        return self._sha256.hexdigest()


def new_file(folder: Path, kind: str) -> Path:
    """Return the path of the next transfer."""
    return folder / f"{kind}.{time.monotonic_ns():020}"


def keep_two(folder: Path) -> None:
    """Delete all but the last two files of each kind, as an agent does; outside of the measurement."""
    for kind in (UP, DOWN):
        for old in sorted(folder.glob(f"{kind}.*"))[:-2]:
            old.unlink()


def chunks_of(path: Path, size: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        for begin in range(0, size, chunk_bytes):
            yield os.pread(fd, min(chunk_bytes, size - begin), begin)
    finally:
        os.close(fd)


def serve(credentials: Path, folder: Path, chunk_bytes: int) -> None:
    """Serve until standard input ends."""

    def up(chunks: Iterator[bytes], context: Any) -> bytes:
        has_duties = next(chunks) == DUTIES
        return Receiver(new_file(folder, UP), has_duties=has_duties, is_durable=True).receive(chunks).encode()

    def down(request: bytes, context: Any) -> Iterator[bytes]:
        path, size = json.loads(request)
        return chunks_of(Path(path), size, chunk_bytes)

    handlers = {
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Tight", handlers),))
    pair = [((credentials / "server.key").read_bytes(), (credentials / "server.pem").read_bytes())]
    ssl = grpc.ssl_server_credentials(pair, (credentials / "ca.pem").read_bytes(), require_client_auth=True)
    print(server.add_secure_port("127.0.0.1:0", ssl), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(0)


def drive(credentials: Path, folder: Path, chunk_bytes: int, port: str, source: Path, size: int) -> None:
    """Run the transfers that standard input asks for, and print the seconds of each on a line."""
    pair = [(credentials / f"client.{kind}").read_bytes() for kind in ("key", "pem")]
    ssl = grpc.ssl_channel_credentials((credentials / "ca.pem").read_bytes(), *pair)
    name = ("grpc.ssl_target_name_override", server_name(SIDES["server"]))
    with grpc.secure_channel(f"127.0.0.1:{port}", ssl, options=[*OPTIONS, name]) as channel:
        up, down = channel.stream_unary("/Tight/Up"), channel.unary_stream("/Tight/Down")

        def uploading(has_duties: bool) -> Iterator[bytes]:
            yield DUTIES if has_duties else RAW
            yield from chunks_of(source, size, chunk_bytes)

        grpc.channel_ready_future(channel).result(30)
        print("ready", flush=True)
        for line in sys.stdin:
            way, kind = line.split()
            has_duties = kind == "duties"
            begun = time.perf_counter()
            if way == "up":
                up(uploading(has_duties))
            else:
                receiver = Receiver(new_file(folder, DOWN), has_duties=has_duties, is_durable=False)
                receiver.receive(down(json.dumps([str(source), size]).encode()))
            seconds = time.perf_counter() - begun
            keep_two(folder)
            print(seconds, flush=True)


def main() -> None:
    """Run one of the two sides."""
    what, credentials, folder, chunk_kib, *rest = sys.argv[1:]
    chunk_bytes = int(chunk_kib) << 10
    if what == "serve":
        serve(Path(credentials), Path(folder), chunk_bytes)
    else:
        port, source, size = rest
        drive(Path(credentials), Path(folder), chunk_bytes, port, Path(source), int(size))


if __name__ == "__main__":
    main()
