"""The messages that carry bulk bytes: protobuf's encoding, read and written by hand to save protobuf's copy.

Reading a chunk makes a view of the message that gRPC has received; writing one joins a short header with the bytes. All
other messages on these streams, and chunks in any other valid encoding, go through protobuf.

    UploadRequest   { chunk = 2: Chunk { position = 1: varint, data = 2: bytes } }
    DownloadReply   { data = 2: bytes }
"""

from dataclasses import dataclass
from typing import Final, Literal

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.services import Stub, add_servicer

Buffer = bytes | bytearray | memoryview

_VARINT_1, _BYTES_2 = 0x08, 0x12
"""Tags of field 1 as a varint and of field 2 as bytes: (number << 3) | wire type."""

_VARINT_BYTES_MAX = 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of an update; `data` is a view of the message and keeps it alive."""

    position: int
    """Position of the first byte in the concatenated pieces of the update."""
    data: Buffer

    def WhichOneof(self, oneof: str) -> Literal["chunk"]:
        """Return the field that is set, like the `UploadRequest` that this replaces."""
        return "chunk"


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a version; `data` is a view of the message and keeps it alive."""

    data: Buffer

    def WhichOneof(self, oneof: str) -> Literal["data"]:
        """Return the field that is set, like the `DownloadReply` that this replaces."""
        return "data"


UploadMessage = pb.UploadRequest | Chunk
DownloadMessage = pb.DownloadReply | Data


# ---------------------------------------------------------------- writing


def write_upload(message: UploadMessage) -> bytes:
    """Serialize a message of an upload."""
    if isinstance(message, pb.UploadRequest):
        encoded: bytes = message.SerializeToString()
        return encoded
    position = b"" if not message.position else bytes([_VARINT_1]) + varint(message.position)  # proto3 omits a 0
    inner = position + bytes([_BYTES_2]) + varint(len(message.data))
    return b"".join((bytes([_BYTES_2]), varint(len(inner) + len(message.data)), inner, message.data))


def write_download(message: DownloadMessage) -> bytes:
    """Serialize a message of a download."""
    if isinstance(message, pb.DownloadReply):
        encoded: bytes = message.SerializeToString()
        return encoded
    return b"".join((bytes([_BYTES_2]), varint(len(message.data)), message.data))


def varint(value: int) -> bytes:
    """Encode an unsigned integer as protobuf's varint: seven bits a byte, least significant first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


# ---------------------------------------------------------------- reading


def read_upload(encoded: bytes) -> UploadMessage:
    """Parse a message of an upload.

    Raises:
        google.protobuf.message.DecodeError: the bytes are not such a message.
    """
    if encoded[:1] == b"\x12" and (chunk := _chunk(encoded)) is not None:
        return chunk
    message = pb.UploadRequest.FromString(encoded)
    return Chunk(message.chunk.position, message.chunk.data) if message.HasField("chunk") else message


def read_download(encoded: bytes) -> DownloadMessage:
    """Parse a message of a download; raises the errors of `read_upload`."""
    if encoded[:1] == b"\x12":
        size, begin = _read_varint(encoded, 1)
        if begin and begin + size == len(encoded):
            return Data(memoryview(encoded)[begin:])
    message = pb.DownloadReply.FromString(encoded)
    return Data(message.data) if message.WhichOneof("reply") == "data" else message


def _chunk(encoded: bytes) -> Chunk | None:
    """Parse a chunk in the encoding of `write_upload`; None: the message has another encoding."""
    size, at = _read_varint(encoded, 1)
    if not at or at + size != len(encoded):
        return None
    position = 0
    if encoded[at : at + 1] == b"\x08":
        position, at = _read_varint(encoded, at + 1)
    if not at or encoded[at : at + 1] != b"\x12":
        return None
    size, at = _read_varint(encoded, at + 1)
    if not at or at + size != len(encoded) or position >= 1 << 64:
        return None
    return Chunk(position, memoryview(encoded)[at:])


def _read_varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Read a varint; return it and the offset after it, or 0 and 0 if there is none."""
    value = 0
    for place, byte in enumerate(encoded[at : at + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return 0, 0


# ---------------------------------------------------------------- gRPC

_CALLED: Final = {
    "Upload": (write_upload, pb.UploadReply.FromString),
    "Download": (pb.DownloadRequest.SerializeToString, read_download),
}
_ANSWERED: Final = {
    "Upload": (pb.UploadReply.SerializeToString, read_upload),
    "Download": (write_download, pb.DownloadRequest.FromString),
}


def coordinator_stub(channel: grpc.aio.Channel | grpc.Channel) -> Stub:
    """Return the coordinator's stub, whose transfers use the messages of this module.

    Args:
        channel: a channel for asyncio, or a blocking one for threads.
    """
    return Stub(channel, "Coordinator", _CALLED)


def aggregator_stub(channel: grpc.aio.Channel | grpc.Channel) -> Stub:
    """Return an aggregation rank's stub, whose transfers use the messages of this module."""
    return Stub(channel, "Aggregator", _CALLED)


def add_coordinator(servicer: object, server: grpc.aio.Server) -> None:
    """Register the coordinator's service at a server; its transfers use the messages of this module."""
    add_servicer(servicer, server, "Coordinator", _ANSWERED)


def add_aggregator(servicer: object, server: grpc.aio.Server) -> None:
    """Register an aggregation rank's service at a server; its transfers use the messages of this module."""
    add_servicer(servicer, server, "Aggregator", _ANSWERED)
