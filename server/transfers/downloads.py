"""Sends pieces of a version: any boxes, from any byte, never more than the client has granted."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from atoll.aggregation.tensors.box_reader import BoxReader
from atoll.aggregation.tensors.layout import ITEM_BYTES, Piece
from atoll.aggregation.tensors.pieces import first_element
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import crash_points
from atoll.protocol.wire.bulk_messages import Data, DownloadMessage
from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.files.versions import VersionFile
from atoll.server.threads import off_loop, on_thread
from atoll.server.transfers.timeouts import SILENCE_S, in_time

INLINE_BYTES = CHUNK_BYTES
BOXES_MAX = 65_536


class NotHeld(LookupError):
    """The pieces are kept by another rank, or by none any more."""


class BadRequest(ValueError):
    """The client broke the protocol; the message says how."""


async def send_version(
    version: VersionFile,
    opened: pb.DownloadOpen,
    requests: AsyncIterator[pb.DownloadRequest],
) -> AsyncIterator[DownloadMessage]:
    """The replies to one download: its size, its bytes from `position` on, and a digest when boxes were asked for.

    Raises:
        BadRequest: a box that the version does not have, more than all of it, or a position beyond the end.
        NotHeld: not all of the boxes are kept here.
        FileNotFoundError: the version is no longer kept.
        Silent: the client grants no credit.
    """
    boxes = _boxes(version, opened)
    _check_held(version, boxes)
    total = sum(box.num_bytes for box in boxes)
    if opened.position > total:
        raise BadRequest(f"position {opened.position} is not in 0..{total}")
    yield pb.DownloadReply(total_bytes=total)
    credit = _Credit(opened.credit)
    granting = asyncio.ensure_future(credit.follow(requests)) if opened.credit < total else None
    digest = hashlib.sha256()
    loop, handler = asyncio.get_running_loop(), asyncio.current_task()
    assert handler is not None
    stalled: asyncio.TimerHandle | None = None
    try:
        with BoxReader(version.path, version.manifest.layout, version.data_start, boxes) as reader:
            position = opened.position
            if opened.boxes:
                for start, stop in _chunks(position):
                    digest.update(await on_thread(None, reader.read, start, stop))
            while position < total:
                size = min(CHUNK_BYTES, total - position, await credit.beyond(position))
                if size <= 0:
                    return  # the client went away
                if opened.boxes:  # they may lie in many small runs
                    data = await off_loop(total, reader.read, position, position + size)
                    digest.update(data)
                else:
                    data = reader.read(position, position + size)  # one read, mostly of what the fold has just written
                stalled = loop.call_later(SILENCE_S, handler.cancel)  # nobody takes it: the call ends where it waits
                yield Data(data)
                stalled.cancel()
                position += size
                crash_points.reached("download.mid")
        if opened.boxes:
            yield pb.DownloadReply(sha256=digest.digest())
    finally:
        if granting is not None:
            granting.cancel()
        if stalled is not None:
            stalled.cancel()


class _Credit:
    """How many bytes in all the client allows to be sent."""

    def __init__(self, granted: int) -> None:
        self._granted = granted
        self._changed = asyncio.Event()
        self._is_over = False

    async def follow(self, requests: AsyncIterator[pb.DownloadRequest]) -> None:
        """Read the grants until the client ends its side."""
        try:
            async for request in requests:
                self._granted = max(self._granted, request.credit)
                self._changed.set()
        finally:
            self._is_over = True
            self._changed.set()

    async def beyond(self, position: int) -> int:
        """Wait for credit beyond `position`; 0 when none will come."""
        while self._granted <= position and not self._is_over:
            self._changed.clear()
            await in_time(self._changed.wait())
        return max(0, self._granted - position)


def _boxes(version: VersionFile, opened: pb.DownloadOpen) -> list[Piece]:
    if not opened.boxes:
        return list(version.manifest.pieces)
    if len(opened.boxes) > BOXES_MAX:
        raise BadRequest(f"{len(opened.boxes)} boxes are more than {BOXES_MAX}")
    tensors = {tensor.name: tensor for tensor in version.manifest.layout}
    boxes = []
    for box in opened.boxes:
        whole = tensors.get(box.tensor)
        if whole is None:
            raise BadRequest(f"the version has no tensor {box.tensor!r}")
        offsets, lengths = tuple(box.offsets), tuple(box.lengths)
        if len(offsets) != len(whole.shape) or len(lengths) != len(whole.shape):
            raise BadRequest(f"tensor {box.tensor!r} has {len(whole.shape)} dimensions")
        if any(n < 1 or o + n > size for o, n, size in zip(offsets, lengths, whole.shape, strict=True)):
            raise BadRequest(f"box {offsets} + {lengths} is not inside tensor {box.tensor!r} of shape {whole.shape}")
        boxes.append(Piece(box.tensor, whole.dtype, offsets, lengths, ""))
    wanted, whole_bytes = sum(box.num_bytes for box in boxes), version.manifest.num_bytes
    if wanted > whole_bytes:
        raise BadRequest(f"boxes of {wanted} bytes together are more than the {whole_bytes} of the version")
    return boxes


def _check_held(version: VersionFile, boxes: list[Piece]) -> None:
    """The file may hold a run of the version's bytes alone: whoever asks for others asks the wrong rank."""
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
            raise NotHeld(f"box {box.offsets} + {box.lengths} of tensor {box.tensor!r} is not kept here")


def _chunks(stop: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + INLINE_BYTES, stop)) for start in range(0, stop, INLINE_BYTES))
