"""The upload of one spooled update, or of one of its parts, at most one window ahead of the receiver.

It resumes where the receiver's copy ends.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import grpc

from atoll.client.disk.spool import Entry, EntryPart
from atoll.client.wire.messages import statistics, too_many
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.disclosure import ANY_SUM, Disclosure, MetricsLeave
from atoll.protocol.wire.bulk_messages import Chunk, UploadMessage
from atoll.protocol.wire.channel import CHUNK_BYTES, INLINE_BYTES_MAX, UPLOAD_WINDOW_BYTES
from atoll.protocol.wire.line_fit import LineFit
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.protocol.wire.upload_window import chunk_of

logger = logging.getLogger(__name__)

SMOOTH_S = 0.05
CHUNK_BYTES_MIN = 4096

UploadStream = Stream[UploadMessage, pb.UploadReply]


class Pace:
    """Rate limit shared by all uploads of an agent: each waits for its turn on one timeline.

    Args:
        bytes_per_s: rate of all of them together; 0: no limit.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self.fit = LineFit(UPLOAD_WINDOW_BYTES)
        """Number of bytes in flight that suits the line, learnt by all uploads."""

    @property
    def chunk_bytes(self) -> int:
        """Chunk size [bytes]: at most the rate times `SMOOTH_S`, for smooth progress."""
        if not self._rate:
            return CHUNK_BYTES
        return min(CHUNK_BYTES, max(CHUNK_BYTES_MIN, int(self._rate * SMOOTH_S)))

    async def take(self, num_bytes: int) -> None:
        """Wait until the rate limit admits `num_bytes`."""
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        begin = max(self._free_at, now)
        self._free_at = begin + num_bytes / self._rate
        if begin > now:
            await asyncio.sleep(begin - now)


async def upload(
    stub: rpc.Stub,
    entry: Entry,
    pace: Pace,
    *,
    is_first_attempt: bool,
    part: EntryPart | None = None,
    disclosure: Disclosure = ANY_SUM,
    on_progress: Callable[[int], None] = lambda position: None,
) -> pb.Verdict | None:
    """Send an update and return the receiver's verdict; None: it keeps the part and waits for others.

    Args:
        stub: the stub of the coordinator, or of an aggregation rank.
        entry: the update, in the spool.
        part: the part of the entry to send; None: the entry has none.
        pace: rate limit, shared by all uploads.
        is_first_attempt: no byte of the update was ever sent; then an update of at most one chunk follows its manifest
            at once, without waiting for the receiver's position, which can only be 0.
        disclosure: the terms on which the metrics of the training leave the site.
        on_progress: called with the number of confirmed bytes, whenever there are more.

    Raises:
        StreamBroken: the upload was cut or refused before the verdict.
        OSError: the spool cannot be read.
    """
    stream: UploadStream = Stream(stub.Upload)
    content = part or entry
    fd = os.open(content.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sending = _Sending(stream, fd, content, pace, on_progress)
        await sending.open(_opened(entry, disclosure, part))
        return await sending.run(at_once=is_first_attempt)
    finally:
        os.close(fd)
        stream.cancel()


def _opened(entry: Entry, disclosure: Disclosure, part: EntryPart | None) -> pb.UploadOpen:
    if fault := too_many(entry.statistics):
        logger.warning("the statistics of %s are not sent: %s", entry.path.name, fault)
    is_shown = disclosure.metrics is MetricsLeave.PER_SITE
    stays = fault or disclosure.metrics is MetricsLeave.NONE
    return pb.UploadOpen(
        manifest=entry.manifest,
        statistics=statistics({} if stays else entry.statistics),
        metrics=disclosure.metrics,
        min_sites=disclosure.min_sites,
        download_seconds=entry.costs.download_seconds,
        train_seconds=entry.costs.train_seconds,
        steps=entry.costs.steps,
        part=part.manifest if part is not None else b"",
        mesh=pb.MeshUse(**asdict(entry.costs.mesh)) if entry.costs.mesh and is_shown else None,
    )


class _Sending:
    """State of one upload: bytes sent, bytes confirmed, the receiver's window."""

    def __init__(
        self, stream: UploadStream, fd: int, content: Entry | EntryPart, pace: Pace, on_progress: Callable[[int], None]
    ) -> None:
        self._stream, self._fd, self._content, self._pace, self._on_progress = stream, fd, content, pace, on_progress
        self._sent = self._confirmed = 0
        self._receiver_window = UPLOAD_WINDOW_BYTES
        self._on_line: deque[tuple[int, float]] = deque()  # ends of the chunks in flight, with their start times
        self._clock = asyncio.get_running_loop().time
        self._opened_at: float | None = None  # until the first answer arrives

    async def open(self, opened: pb.UploadOpen) -> None:
        """Send the manifest, with all bytes of an update of at most INLINE_BYTES_MAX."""
        total = self._content.num_bytes
        if total <= INLINE_BYTES_MAX:
            await self._pace.take(total)
            opened.data = self._read(total)
        self._opened_at = self._clock()
        await self._stream.write(pb.UploadRequest(open=opened))
        if opened.data:
            self._note_sent(total)

    async def run(self, *, at_once: bool) -> pb.Verdict | None:
        """Send the rest of the bytes and return the verdict; None: a part is kept."""
        total = self._content.num_bytes
        is_begun = at_once and INLINE_BYTES_MAX < total <= min(self._pace.chunk_bytes, self._window)
        while True:
            while is_begun and self._sent < total and self._may_send:
                await self._send(min(self._chunk_bytes, total - self._sent))
            reply = await self._stream.read()
            if reply is None:
                raise StreamBroken(grpc.StatusCode.UNAVAILABLE, "the coordinator ended the upload without a verdict")
            if (kind := reply.WhichOneof("reply")) in ("verdict", "kept"):
                with suppress(StreamBroken):
                    await self._stream.read()  # let the call end; this is the last message
                return reply.verdict if kind == "verdict" else None
            self._confirm(reply.position, is_first=not is_begun)
            self._receiver_window = min(UPLOAD_WINDOW_BYTES, reply.window or UPLOAD_WINDOW_BYTES)
            is_begun = True

    @property
    def _window(self) -> int:
        """Number of bytes that may be in flight: within the receiver's window, and suited to the line."""
        return min(self._receiver_window, self._pace.fit.num_bytes)

    @property
    def _chunk_bytes(self) -> int:
        return min(self._pace.chunk_bytes, chunk_of(self._window))

    @property
    def _may_send(self) -> bool:
        return self._sent + self._chunk_bytes - self._confirmed <= self._window

    async def _send(self, num_bytes: int) -> None:
        await self._pace.take(num_bytes)
        self._on_line.append((self._sent + num_bytes, self._clock()))
        data = self._read(num_bytes)  # mostly from the page cache: a thread would cost more than the copy
        await self._stream.write(Chunk(self._sent, data))
        self._note_sent(num_bytes)

    def _read(self, num_bytes: int) -> bytes:
        data = os.pread(self._fd, num_bytes, self._content.data_start + self._sent)
        if len(data) != num_bytes:
            raise OSError(f"{self._content.path} ends before its last piece")
        return data

    def _note_sent(self, num_bytes: int) -> None:
        self._sent += num_bytes
        crash_points.reached("agent.uploading")
        if self._sent == self._content.num_bytes:
            crash_points.reached("agent.uploaded")

    def _confirm(self, position: int, *, is_first: bool) -> None:
        if position > self._content.num_bytes or (not is_first and position > self._sent):
            detail = f"the coordinator claims byte {position} of {self._content.num_bytes}, and {self._sent} were sent"
            raise StreamBroken(grpc.StatusCode.FAILED_PRECONDITION, detail)
        if position > self._confirmed:
            self._on_progress(position)
        self._measure(position)
        self._confirmed = position
        if is_first:
            self._sent = position

    def _measure(self, position: int) -> None:
        """Measure the duration of the bytes up to `position`, or, at the first answer, the empty line's round trip."""
        sent_at, now = None, self._clock()
        while self._on_line and self._on_line[0][0] <= position:
            sent_at = self._on_line.popleft()[1]
        if sent_at is not None:
            self._pace.fit.confirmed(sent_at, now)
        elif self._opened_at is not None:
            self._pace.fit.answered(now - self._opened_at)
        self._opened_at = None
