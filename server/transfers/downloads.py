"""The sender of versions: any boxes of the tensors, from any byte on, at most as much as the client has granted."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.wire.bulk_messages import Data, DownloadMessage
from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.protocol.wire.line_fit import LineFit
from atoll.server.files.versions import VersionFile
from atoll.server.transfers.timeouts import SILENCE_S, in_time
from atoll.tensors.box_reader import BoxReader
from atoll.tensors.layout import ITEM_BYTES, Piece
from atoll.tensors.pieces import first_element

BOXES_MAX = 65_536
"""Largest number of boxes that one download may request."""


FOLLOWED_BYTES = 256 * 1024
"""Size from which the client's grants for a download are read even if none is needed [bytes]."""


class NotHeld(LookupError):
    """Error: the file here does not contain the pieces: they are at another rank, or were deleted."""


class BadRequest(ValueError):
    """Error: the client broke the protocol; the message says how."""


async def send_version(
    version: VersionFile,
    opened: pb.DownloadOpen,
    requests: AsyncIterator[pb.DownloadRequest],
) -> AsyncIterator[DownloadMessage]:
    """Yield the replies to one download: its size, its bytes from `position` on, and a digest if boxes were requested.

    Raises:
        BadRequest: a box that the version does not have, more than all of it, or a position beyond the end.
        NotHeld: the file here does not contain all of the boxes.
        FileNotFoundError: the version was deleted.
        Silent: the client grants no credit.
    """
    boxes = _boxes(version, opened)
    _check_held(version, boxes)
    total = sum(box.num_bytes for box in boxes)
    if opened.position > total:
        raise BadRequest(f"position {opened.position} is not in 0..{total}")
    yield pb.DownloadReply(total_bytes=total)
    with (
        _Credit(opened.credit).followed(requests, total) as credit,
        BoxReader(version.path, version.manifest.layout, version.data_start, boxes) as reader,
    ):
        content = _Content(reader, total, is_hashed=bool(opened.boxes))
        await content.skip(opened.position)
        position, clock, fit = opened.position, asyncio.get_running_loop().time, LineFit(CHUNK_BYTES)
        while position < total:
            size = min(fit.num_bytes, total - position, await credit.beyond(position))
            if size <= 0:
                return  # the client has ended its side
            data = await content.read(position, position + size)
            begun = clock()
            with _cancelled_when_stalled():
                yield Data(data)
            fit.confirmed(begun, clock())
            position += size
            crash_points.reached("download.mid")
        if opened.boxes:
            yield pb.DownloadReply(sha256=content.digest())


class _Content:
    """Bytes of one download in their order and, if `is_hashed`, the digest over all of them."""

    def __init__(self, reader: BoxReader, total: int, *, is_hashed: bool) -> None:
        self._reader, self._total = reader, total
        self._sha256 = hashlib.sha256() if is_hashed else None

    async def skip(self, stop: int) -> None:
        """Hash the bytes before `stop`, which the client already has."""
        if self._sha256 is None:
            return
        for start in range(0, stop, CHUNK_BYTES):
            self._sha256.update(await on_thread(None, self._reader.read, start, min(start + CHUNK_BYTES, stop)))

    async def read(self, start: int, stop: int) -> bytes:
        """Read the next bytes."""
        if self._sha256 is None:
            return self._reader.read(start, stop)  # one read, mostly from the page cache after the fold
        data = await off_loop(self._total, self._reader.read, start, stop)  # boxes may consist of many small runs
        self._sha256.update(data)
        return data

    def digest(self) -> bytes:
        """Return the SHA-256 over all bytes up to the last read."""
        assert self._sha256 is not None
        return self._sha256.digest()


@contextmanager
def _cancelled_when_stalled() -> Iterator[None]:
    """Cancel this task if the client does not accept, within SILENCE_S, the message that is sent in the block."""
    task = asyncio.current_task()
    assert task is not None
    stalled = asyncio.get_running_loop().call_later(SILENCE_S, task.cancel)
    try:
        yield
    finally:
        stalled.cancel()


class _Credit:
    """Total number of bytes that the client allows to be sent."""

    def __init__(self, granted: int) -> None:
        self._granted = granted
        self._changed = asyncio.Event()
        self._is_over = False

    @contextmanager
    def followed(self, requests: AsyncIterator[pb.DownloadRequest], total: int) -> "Iterator[_Credit]":
        """Read further grants within the block, each a sign of life, unless a small download is fully granted."""
        is_awaited = self._granted < total or total > FOLLOWED_BYTES
        following = asyncio.ensure_future(self._follow(requests)) if is_awaited else None
        try:
            yield self
        finally:
            if following is not None:
                following.cancel()

    async def _follow(self, requests: AsyncIterator[pb.DownloadRequest]) -> None:
        try:
            async for request in requests:
                self._granted = max(self._granted, request.credit)
                self._changed.set()
        finally:
            self._is_over = True  # the client has ended its side
            self._changed.set()

    async def beyond(self, position: int) -> int:
        """Wait for credit beyond `position` and return it [bytes]; 0: the client has ended its side.

        Raises:
            Silent: no credit arrived for SILENCE_S.
        """
        while self._granted <= position and not self._is_over:
            self._changed.clear()
            await in_time(self._changed.wait())
        return max(0, self._granted - position)


def _boxes(version: VersionFile, opened: pb.DownloadOpen) -> list[Piece]:
    if not opened.boxes:
        return list(version.manifest.pieces)
    if len(opened.boxes) > BOXES_MAX:
        raise BadRequest(f"{count_of(len(opened.boxes), 'box', 'boxes')}; allowed: at most {BOXES_MAX}")
    tensors = {tensor.name: tensor for tensor in version.manifest.layout}
    boxes = []
    for box in opened.boxes:
        whole = tensors.get(box.tensor)
        if whole is None:
            raise BadRequest(f"the version has no tensor {box.tensor!r}")
        offsets, lengths = tuple(box.offsets), tuple(box.lengths)
        if len(offsets) != len(whole.shape) or len(lengths) != len(whole.shape):
            what = f"box {offsets} + {lengths}: tensor {box.tensor!r} has {count_of(len(whole.shape), 'dimension')}"
            raise BadRequest(f"{what}; allowed: as many offsets and lengths")
        if any(n < 1 or o + n > size for o, n, size in zip(offsets, lengths, whole.shape, strict=True)):
            raise BadRequest(f"box {offsets} + {lengths} is not inside tensor {box.tensor!r} of shape {whole.shape}")
        boxes.append(Piece(box.tensor, whole.dtype, offsets, lengths, ""))
    wanted, whole_bytes = sum(box.num_bytes for box in boxes), version.manifest.num_bytes
    if wanted > whole_bytes:
        raise BadRequest(
            f"boxes of {count_of(wanted, 'byte')} in total; allowed: at most the {whole_bytes} of the version"
        )
    return boxes


def _check_held(version: VersionFile, boxes: list[Piece]) -> None:
    """Check that the file contains the boxes: a rank has only one contiguous run of the version's bytes.

    Raises:
        NotHeld: the file does not contain all of the boxes.
    """
    if len(version.held) == version.manifest.num_bytes:
        return
    starts = itertools.accumulate((tensor.num_bytes for tensor in version.manifest.layout), initial=0)
    tensors = {t.name: (t, start) for t, start in zip(version.manifest.layout, starts, strict=False)}
    for box in boxes:
        tensor, start = tensors[box.tensor]
        item = ITEM_BYTES[box.dtype]
        last = replace(box, offsets=tuple(o + n - 1 for o, n in zip(box.offsets, box.lengths, strict=True)))
        begin, end = start + item * first_element(box, tensor), start + item * (first_element(last, tensor) + 1)
        if box.num_bytes and not (version.held.start <= begin and end <= version.held.stop):
            what = f"box {box.offsets} + {box.lengths} of tensor {box.tensor!r}"
            raise NotHeld(f"{what} is not here: ask the aggregation rank that holds it")
