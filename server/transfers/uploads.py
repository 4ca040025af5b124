"""Receives one update: its bytes are taken from where they stopped, checked, and made durable.

What its manifest says is judged before (`judge`), and the sound update after; here are the bytes, which are looked at
when all are there, those of a large one on a thread. Accepted means durable: bytes, what is known of them, and the
journal entry. The judge may be in this process or, for an aggregation rank, in the coordinator's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from atoll.aggregation.updates.inspection import Inspection, Inspector
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import crash_points
from atoll.protocol.manifest import ManifestError, UpdateManifest, digest_of, parse_update
from atoll.protocol.vocabulary import ClientId, Digest, RejectReason, RoundId, RunId
from atoll.protocol.wire.background_writer import Behind
from atoll.protocol.wire.bulk_messages import Buffer, Chunk, UploadMessage
from atoll.protocol.wire.channel import CHUNK_BYTES, INLINE_BYTES_MAX
from atoll.protocol.wire.upload_window import Confirmations, chunk_of, window_of
from atoll.server.files.incoming import SMALL_BYTES, Incoming
from atoll.server.files.run_store import KeptUpdate, RunStore
from atoll.server.threads import off_loop, on_thread
from atoll.server.transfers.downloads import BadRequest
from atoll.server.transfers.timeouts import FLOOR_BYTES_PER_S, PARTIALS_MAX, next_bytes, patience_of
from atoll.server.transfers.verdicts import refused

logger = logging.getLogger(__name__)

MAGNITUDE_MAX = 1e30
"""Largest |element| of an update that is worth calling a number; float32 ends at 3.4e38."""

PIECES_AT_ONCE = 100
"""So many pieces of a small update are looked at sooner than a thread takes it."""


class Judging(Protocol):
    """Who decides about one update; `judge.Judge` is one."""

    async def before_bytes(self) -> pb.Verdict | None:
        """What can be said before the bytes come; None when they are wanted."""

    async def old_verdict(self) -> pb.Verdict | None:
        """What was decided meanwhile."""

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """About a sound update that is durable here."""

    async def refuse(self, reason: RejectReason, detail: str) -> pb.Verdict:
        """Because of its bytes."""


JudgeOf = Callable[[UpdateManifest, pb.UploadOpen], "Judging | pb.Verdict"]
"""Who decides about what a client announces; or at once why nobody does."""


class Uploads:
    """All updates that this process receives.

    Args:
        judge_of: see there.
        store_of: where a run's updates lie.
        compute_of: for what takes the processor.
        floor: bytes a second below which an upload is ended; 0: none (`limits.Patience`).
    """

    def __init__(
        self,
        judge_of: JudgeOf,
        store_of: Callable[[RunId], RunStore],
        compute_of: Callable[[RunId], Executor],
        *,
        floor: float = FLOOR_BYTES_PER_S,
    ) -> None:
        self._judge_of, self._store_of, self._compute_of, self._floor = judge_of, store_of, compute_of, floor
        self._receiving: dict[tuple[RunId, RoundId, ClientId], asyncio.Task[object]] = {}
        self._in_flight: dict[RunId, list[Digest]] = {}
        self._noting: list[tuple[RunId, set[Digest]]] = []
        self._partial: dict[tuple[RunId, ClientId], list[Digest]] = {}  # begun and not whole, the newest last
        self.received_bytes = 0
        """Of updates, since this process began."""

    @property
    def _window(self) -> int:
        """Of each upload that is under way now."""
        return window_of(sum(map(len, self._in_flight.values())))

    def _chunk_bytes(self) -> int:
        return chunk_of(self._window)

    def is_in_flight(self, run_id: RunId, digest: Digest) -> bool:
        """Whether an update is being received or judged just now: its bytes must stay."""
        return digest in self._in_flight.get(run_id, ())

    @contextmanager
    def noting(self, run_id: RunId) -> Iterator[set[Digest]]:
        """The updates that are in flight at any time within the block: what was said of them may be old already."""
        noted = run_id, set(self._in_flight.get(run_id, ()))
        self._noting.append(noted)
        try:
            yield noted[1]
        finally:
            self._noting.remove(noted)

    async def receive(
        self, opened: pb.UploadOpen, requests: AsyncIterator[UploadMessage]
    ) -> AsyncIterator[pb.UploadReply]:
        """The replies to one upload: the position to go on from, the progress, the verdict.

        Raises:
            BadRequest: the client broke the protocol.
            OSError: the bytes cannot be stored now; the client should try again later.
            Silent: the client sends nothing.
        """
        try:
            manifest = await off_loop(len(opened.manifest), parse_update, opened.manifest)
        except ManifestError as error:
            yield _reply(refused(RejectReason.BAD_MANIFEST, str(error)))
            return
        judge = self._judge_of(manifest, opened)
        verdict = judge if isinstance(judge, pb.Verdict) else await judge.before_bytes()
        if isinstance(judge, pb.Verdict) or verdict is not None:
            yield pb.UploadReply(verdict=verdict)
            return
        digest = digest_of(opened.manifest)
        async with self._only_one_of(manifest), self._held(manifest.run_id, digest):
            if (verdict := await judge.old_verdict()) is not None:  # by the stream that this one has ended
                yield _reply(verdict)
                return
            run_id = manifest.run_id
            upload = _Upload(self._store_of(run_id), manifest, digest, judge, self._compute_of(run_id))
            kept = await upload.kept_before()
            if kept is None:
                await self._forget_older(manifest, upload.store)
                window = self._window
                with upload.store.open_incoming(digest, manifest.num_bytes) as file:
                    if opened.data:
                        self._count(upload.take_at_once(file, opened.data))
                    else:
                        yield pb.UploadReply(position=file.position, window=window)
                    confirmations = Confirmations(file.position, window)
                    async with aclosing(upload.take(file, requests, self._floor, self._chunk_bytes)) as taken:
                        async for position, num_bytes in taken:
                            self._count(num_bytes)
                            is_due = confirmations.is_due(position, num_bytes)
                            if is_due and position < manifest.num_bytes:  # of the end the verdict tells
                                window = self._window
                                confirmations.said(position, window)
                                yield pb.UploadReply(position=position, window=window)
                    judged = await upload.judged(file)
                if isinstance(judged, pb.Verdict):
                    yield _reply(judged)
                    return
                kept = judged
            self._is_whole(manifest)
            yield _reply(await judge.decide(kept))

    async def _forget_older(self, manifest: UpdateManifest, store: RunStore) -> None:
        """A client finishes one upload after the other; whoever begins many and ends none shall not fill the disk."""
        partial = self._partial.setdefault((manifest.run_id, manifest.client_id), [])
        if manifest.digest in partial:
            partial.remove(manifest.digest)
        partial.append(manifest.digest)
        for old in partial[:-PARTIALS_MAX]:
            partial.remove(old)
            if not self.is_in_flight(manifest.run_id, old):
                await on_thread(None, store.discard_incoming, old)

    def _is_whole(self, manifest: UpdateManifest) -> None:
        key = manifest.run_id, manifest.client_id
        partial = [digest for digest in self._partial.pop(key, []) if digest != manifest.digest]
        if partial:
            self._partial[key] = partial

    def _count(self, num_bytes: int) -> None:
        self.received_bytes += num_bytes

    @asynccontextmanager
    async def _only_one_of(self, manifest: UpdateManifest) -> AsyncIterator[None]:
        """A client's newest upload for a round wins: an older stream may be half dead and must not own the file."""
        task, part = asyncio.current_task(), (manifest.run_id, manifest.round_id, manifest.client_id)
        assert task is not None
        while (older := self._receiving.get(part)) is not None:
            older.cancel()
            await asyncio.wait([older])
        self._receiving[part] = task
        try:
            yield
        finally:
            if self._receiving.get(part) is task:
                del self._receiving[part]

    @asynccontextmanager
    async def _held(self, run_id: RunId, digest: Digest) -> AsyncIterator[None]:
        """Retention spares what is being received and judged."""
        held = self._in_flight.setdefault(run_id, [])
        held.append(digest)
        for noting, noted in self._noting:
            if noting == run_id:
                noted.add(digest)
        try:
            yield
        finally:
            held.remove(digest)


class _Upload:
    """The bytes of one update on their way in."""

    def __init__(
        self, store: RunStore, manifest: UpdateManifest, digest: Digest, judge: Judging, compute: Executor
    ) -> None:
        self.store, self._manifest, self._digest = store, manifest, digest
        self._judge, self._compute = judge, compute
        self._inspector: Inspector | None = None

    async def kept_before(self) -> KeptUpdate | None:
        """Its bytes, when they were found sound before, and only the decision or its answer was lost."""
        if not self.store.has_file(self._digest):
            return None
        return await on_thread(self._compute, self.store.kept_before, self._manifest)

    def take_at_once(self, file: Incoming, data: bytes) -> int:
        """Take what came with the manifest: everything. Returns how much of it was new."""
        total = self._manifest.num_bytes
        if len(data) != total or len(data) > INLINE_BYTES_MAX:
            what = f"{len(data)} bytes of an update of {total}"
            raise BadRequest(f"UploadOpen has {what}: allowed are all of them, up to {INLINE_BYTES_MAX}, or none")
        fresh = data[file.position :]
        file.append(fresh)
        crash_points.reached("upload.mid_chunk")
        return len(fresh)

    async def take(
        self, file: Incoming, requests: AsyncIterator[UploadMessage], floor: float, waiting_max: Callable[[], int]
    ) -> AsyncGenerator[tuple[int, int], None]:
        """Take the chunks; each must begin where the last one ended. Gives the position, and how much is new.

        They are written and looked at behind this loop; all of it is done when the last position has been given. Bytes
        that wait for that are in memory, confirmed or not: of a crowd's uploads fewer may, as of what is in flight.
        """
        position, total, patience = file.position, self._manifest.num_bytes, patience_of(floor)
        behind = Behind(partial(self._append, file), self._compute)
        try:
            while position < total:
                request, waited = await next_bytes(requests, patience)
                if request is None:
                    raise BadRequest(f"the upload ended at byte {position} of {total}")
                if not isinstance(request, Chunk):
                    raise BadRequest("after UploadOpen come chunks")
                size = len(request.data)
                if request.position != position or not 1 <= size <= min(CHUNK_BYTES, total - position):
                    got = f"a chunk of {size} bytes at {request.position}"
                    raise BadRequest(f"{got} does not continue {position} of {total}")
                patience.received(size, waited)
                position += size
                if file.is_small:
                    self._append(file, [request.data])
                else:
                    await behind.put(request.data, waiting_max())
                yield position, size
        finally:
            await behind.finish()

    def _append(self, file: Incoming, chunks: Sequence[Buffer]) -> None:
        """Write what has come, and look at it while more comes: the verdict is to be soon after the last byte."""
        for data in chunks:
            file.append(data)
            crash_points.reached("upload.mid_chunk")
            if file.is_small:
                continue
            if self._inspector is None:
                self._inspector = file.inspector(self._manifest.pieces)
            self._inspector.advance(file.position, data)

    async def judged(self, file: Incoming) -> KeptUpdate | pb.Verdict:
        """All bytes are there: check them and make them durable, or say what is wrong."""
        manifest = self._manifest
        crash_points.reached("upload.before_check")
        inspector = self._inspector or file.inspector(manifest.pieces)
        is_quick = manifest.plain_bytes <= SMALL_BYTES  # also when few bytes decode to many
        if file.is_small and is_quick and len(manifest.pieces) <= PIECES_AT_ONCE:
            inspection, kept = _keep_if_sound(self.store, file, manifest, inspector)
        else:
            inspection, kept = await on_thread(self._compute, _keep_if_sound, self.store, file, manifest, inspector)
        if kept is not None:
            crash_points.reached("upload.before_accept")
            return kept
        if inspection.wrong_digests:
            names = ", ".join(sorted({piece.tensor for piece in inspection.wrong_digests})[:5])
            what = f"the bytes of {names} are not those of the manifest"
            return refused(RejectReason.DIGEST_MISMATCH, what, resend=True)
        return await self._judge.refuse(*_fault_of(inspection))


def _fault_of(inspection: Inspection) -> tuple[RejectReason, str]:
    """Why an update whose digests are right does not count."""
    if inspection.malformed:
        found = "; ".join(f"{name}: {fault}" for name, fault in sorted(inspection.malformed.items())[:5])
        return RejectReason.BAD_ENCODING, found
    if inspection.non_finite:
        found = ", ".join(f"{name}: {count}" for name, count in sorted(inspection.non_finite.items())[:5])
        return RejectReason.NOT_FINITE, f"values that are NaN or infinite ({found})"
    return RejectReason.NOT_FINITE, f"values beyond {MAGNITUDE_MAX:g} ({_beyond_reason(inspection)})"


def _beyond_reason(inspection: Inspection) -> str:
    """Finite values so large that a sum with them would leave float32, and fail the whole round; empty when none."""
    beyond = ((name, m) for name, m in sorted(inspection.magnitudes.items()) if isinstance(m, float))
    return ", ".join(f"{name}: {m:g}" for name, m in beyond if m > MAGNITUDE_MAX)


def _keep_if_sound(
    store: RunStore, file: Incoming, manifest: UpdateManifest, inspector: Inspector
) -> tuple[Inspection, KeptUpdate | None]:
    """Look at what is left of a complete upload, and keep it or forget it."""
    inspection = inspector.finish()
    if inspection.is_sound and not _beyond_reason(inspection):
        return inspection, store.keep(file, manifest, inspection)
    store.discard_incoming(manifest.digest)
    return inspection, None


def _reply(verdict: pb.Verdict) -> pb.UploadReply:
    return pb.UploadReply(verdict=verdict)
