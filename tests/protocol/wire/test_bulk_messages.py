import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.wire.bulk_messages import (
    Chunk,
    Data,
    read_download,
    read_upload,
    varint,
    write_download,
    write_upload,
)

positions = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
contents = st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes))


@given(positions, contents)
def test_a_chunk_is_written_as_protobuf_writes_it_and_read_back(position, data):
    encoded = write_upload(Chunk(position, memoryview(data)))
    theirs = pb.UploadRequest.FromString(encoded)
    assert (theirs.chunk.position, theirs.chunk.data) == (position, data)
    if data:  # protobuf leaves out what is empty
        assert encoded == pb.UploadRequest(chunk=pb.Chunk(position=position, data=data)).SerializeToString()
    found = read_upload(encoded)
    assert isinstance(found, Chunk)
    assert (found.position, bytes(found.data), found.WhichOneof("request")) == (position, data, "chunk")


@given(contents)
def test_bytes_of_a_version_are_written_as_protobuf_writes_them_and_read_back(data):
    encoded = write_download(Data(data))
    assert encoded == pb.DownloadReply(data=data).SerializeToString()
    found = read_download(encoded)
    assert isinstance(found, Data)
    assert (bytes(found.data), found.WhichOneof("reply")) == (data, "data")


def test_what_is_read_is_no_copy():
    encoded = write_upload(Chunk(7, b"x" * 1000))
    assert read_upload(encoded).data.obj is encoded
    encoded = write_download(Data(b"x" * 1000))
    assert read_download(encoded).data.obj is encoded


@pytest.mark.parametrize(
    "message", [pb.UploadRequest(open=pb.UploadOpen(manifest=b"m", data=b"d")), pb.UploadRequest()], ids=repr
)
def test_other_requests_go_through_protobuf(message):
    assert read_upload(write_upload(message)) == message


@pytest.mark.parametrize(
    "message",
    [pb.DownloadReply(total_bytes=0), pb.DownloadReply(total_bytes=1 << 40), pb.DownloadReply(sha256=b"s" * 32)],
    ids=repr,
)
def test_other_replies_go_through_protobuf(message):
    assert read_download(write_download(message)) == message


def inner(*fields: bytes) -> bytes:
    content = b"".join(fields)
    return b"\x12" + varint(len(content)) + content


POSITION, DATA = b"\x08\x05", b"\x12\x03abc"


@pytest.mark.parametrize(
    ("encoded", "position", "data"),
    [
        (inner(DATA, POSITION), 5, b"abc"),  # in another order
        (inner(POSITION, b"\x12\x01x", DATA), 5, b"abc"),  # the last one counts
        (inner(POSITION, DATA, b"\x18\x01"), 5, b"abc"),  # a field that a later version has
        (inner(b"\x08\x85\x00", DATA), 5, b"abc"),  # a varint that is longer than it must be
        (inner(POSITION) + inner(DATA), 5, b"abc"),  # a message in two parts is one
        (inner(POSITION, DATA) + b"\x1a\x00", 5, b"abc"),
        (inner(), 0, b""),
    ],
)
def test_a_chunk_of_any_other_form_is_what_protobuf_says(encoded, position, data):
    theirs = pb.UploadRequest.FromString(encoded).chunk
    found = read_upload(encoded)
    assert isinstance(found, Chunk)
    assert (found.position, bytes(found.data)) == (theirs.position, theirs.data) == (position, data)


@given(st.binary(max_size=60), st.integers(0, 59), st.integers(0, 255))
def test_any_bytes_are_read_or_refused_as_protobuf_does(noise, at, byte):
    damaged = bytearray(write_upload(Chunk(77, noise)))
    damaged[at % len(damaged)] = byte
    for encoded in (noise, bytes(damaged), b"\x12" + noise):
        _same(encoded, read_upload, pb.UploadRequest, lambda m: (m.chunk.position, m.chunk.data))
        _same(encoded, read_download, pb.DownloadReply, lambda m: (m.data,))


def _same(encoded, read, kind, values):
    try:
        theirs = kind.FromString(encoded)
    except DecodeError:
        with pytest.raises(DecodeError):
            read(encoded)
        return
    found = read(encoded)
    if isinstance(found, Chunk | Data):
        own = (found.position, bytes(found.data)) if isinstance(found, Chunk) else (bytes(found.data),)
        assert own == values(theirs)
    else:
        assert found == theirs
