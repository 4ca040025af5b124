"""The receiver of updates: it continues an upload where it stopped, checks the bytes and makes them durable.

The judge decides about the manifest before the bytes arrive, and about a sound update afterwards; here the bytes are
checked, on a thread if they are many. Accepted means durable: the bytes, the findings about them, and the journal
entry. The judge is in this process or, for an aggregation rank, in the coordinator's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from atoll.ground.durable import DiskFull, QuotaFull
from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest, digest_of, parse_update
from atoll.protocol.part_manifest import PartManifest, part_of
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import ClientId, Digest, RejectReason, RoundId, RunId
from atoll.protocol.wire.background_writer import Behind
from atoll.protocol.wire.bulk_messages import Buffer, Chunk, UploadMessage
from atoll.protocol.wire.channel import CHUNK_BYTES, INLINE_BYTES_MAX
from atoll.protocol.wire.upload_window import Confirmations, chunk_of, window_of
from atoll.server.files.incoming import SMALL_BYTES, Incoming
from atoll.server.files.run_store import KeptUpdate, RunStore
from atoll.server.parts.gathering import newest_first
from atoll.server.transfers.arrivals import Arrivals
from atoll.server.transfers.downloads import BadRequest
from atoll.server.transfers.parts import PartStreams, PartsUnderWay
from atoll.server.transfers.timeouts import FLOOR_BYTES_PER_S, PARTIALS_MAX, next_bytes, patience_of
from atoll.server.transfers.verdicts import refused
from atoll.tensors.codecs.installed import is_installed
from atoll.tensors.codecs.names import fault_of_opening
from atoll.tensors.updates.inspection import Inspection, Inspector

logger = logging.getLogger(__name__)

MAGNITUDE_MAX = 1e30
"""Largest accepted magnitude of an element; float32 ends at 3.4e38, and a fold needs room for its sum."""

PIECES_AT_ONCE = 100
"""Number of pieces of a small update up to which checking is faster than handing it to a thread."""


class Judging(Protocol):
    """Judge of one update; `hosting.judge.Judge` implements it."""

    async def before_bytes(self) -> pb.Verdict | None:
        """Return the verdict that is possible before the bytes arrive; None: the bytes are wanted."""

    async def old_verdict(self) -> pb.Verdict | None:
        """Return the verdict that was given meanwhile, if any."""

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Decide about a sound update that is durable here."""

    async def refuse(self, reason: RejectReason, detail: str) -> pb.Verdict:
        """Refuse the update because of its bytes."""

    async def withdraw(self, digest: Digest) -> bool:
        """Return whether kept parts of another update of the client may be deleted, to make room for this one."""


JudgeOf = Callable[[UpdateManifest, pb.UploadOpen, PartManifest | None], "Judging | pb.Verdict"]
"""Function that returns the judge of an update, or of one of its parts, that a client announces, or at once a verdict
if there is no judge for it."""

Streams = dict[tuple[Digest, int | None], "asyncio.Task[object]"]
"""Streams of one client's update for one round, by the update's digest and the part."""


class Uploads:
    """All updates that this process receives.

    Args:
        judge_of: see `JudgeOf`.
        store_of: returns the store of a run's updates.
        compute_of: returns the threads for a run's checks.
        floor: the speed below which an upload is ended [bytes/s]; 0: none (`timeouts.Patience`).
        parts: the streams of updates in parts.
        on_full: called with the run and the size of an update for which the disk has no room.
        arrivals: counts all bytes that arrive.
    """

    def __init__(
        self,
        judge_of: JudgeOf,
        store_of: Callable[[RunId], RunStore],
        compute_of: Callable[[RunId], Executor],
        *,
        floor: float = FLOOR_BYTES_PER_S,
        parts: PartStreams | None = None,
        arrivals: Arrivals | None = None,
        on_full: Callable[[RunId, int, DiskFull], None] = lambda run_id, num_bytes, error: None,
    ) -> None:
        self._on_full = on_full
        self.arrivals = arrivals or Arrivals()
        self._judge_of, self._store_of, self._compute_of, self._floor = judge_of, store_of, compute_of, floor
        self._receiving: dict[tuple[RunId, RoundId, ClientId], Streams] = {}
        self._parts: PartStreams = parts or PartsUnderWay()
        self._in_flight: dict[RunId, list[Digest]] = {}
        self._watchers: list[tuple[RunId, set[Digest]]] = []
        self._partial: dict[tuple[RunId, ClientId], list[str]] = {}  # started and incomplete ones, the newest first
        self.received_bytes = 0
        """Total size of updates received since this process began [bytes]."""

    @property
    def _window(self) -> int:
        """The window of each currently running upload [bytes]."""
        return window_of(sum(map(len, self._in_flight.values())))

    def _chunk_bytes(self) -> int:
        return chunk_of(self._window)

    def is_in_flight(self, run_id: RunId, digest: Digest) -> bool:
        """Return whether an update is being received or judged: then its bytes must be kept."""
        return digest in self._in_flight.get(run_id, ())

    @contextmanager
    def in_flight_during(self, run_id: RunId) -> Iterator[set[Digest]]:
        """Collect the updates that are in flight at any time within the block: a garbage collection must spare them."""
        watcher = run_id, set(self._in_flight.get(run_id, ()))
        self._watchers.append(watcher)
        try:
            yield watcher[1]
        finally:
            self._watchers.remove(watcher)

    async def receive(
        self, opened: pb.UploadOpen, requests: AsyncIterator[UploadMessage]
    ) -> AsyncIterator[pb.UploadReply]:
        """Yield the replies to one upload: the position to continue from, confirmations, the verdict.

        The stream of a part that is kept while others are missing ends with `kept`.

        Raises:
            BadRequest: the client broke the protocol.
            OSError: the bytes cannot be stored now; the client should try again later.
            Silent: the client sends nothing.
        """
        try:
            manifest = await off_loop(len(opened.manifest), parse_update, opened.manifest)
            part = await off_loop(len(opened.part), part_of, manifest, opened.part)
        except ManifestError as error:
            yield _reply(refused(RejectReason.BAD_MANIFEST, str(error)))
            return
        judge = self._judge_of(manifest, opened, part)
        if isinstance(judge, pb.Verdict):
            yield _reply(judge)
            return
        if (verdict := await judge.before_bytes()) is not None:
            yield _reply(verdict)
            return
        digest = digest_of(opened.manifest)
        upload = _Upload(
            self._store_of(manifest.run_id), manifest, part, digest, judge, self._compute_of(manifest.run_id)
        )
        receive = self._receive_whole if part is None else self._receive_part
        async with (
            self._told_if_full(manifest),
            self._only_one_of(manifest, digest, part),
            self._marked_in_flight(manifest.run_id, digest),
            aclosing(receive(upload, opened.data, requests)) as replies,
        ):
            # a stream replaced by this one may have received the verdict
            if (verdict := await judge.old_verdict()) is not None:
                yield _reply(verdict)
                return
            if (verdict := await upload.refusal_of_codecs()) is not None:
                yield _reply(verdict)
                return
            async for reply in replies:
                yield reply

    async def _receive_whole(
        self, upload: "_Upload", data: bytes, requests: AsyncIterator[UploadMessage]
    ) -> AsyncGenerator[pb.UploadReply, None]:
        """Yield the replies to an upload whose bytes are wanted and that no other stream receives."""
        if not await upload.was_kept_before():
            async with aclosing(self._receive_bytes(upload, data, requests)) as replies:
                async for reply in replies:
                    yield reply
        if upload.refusal is not None:
            yield _reply(upload.refusal)
            return
        self._forget_partial(upload)
        verdict = await upload.judge.decide(upload.kept)
        self.arrivals.over(upload.key, upload.digest)
        yield _reply(verdict)

    async def _receive_part(
        self, upload: "_Upload", data: bytes, requests: AsyncIterator[UploadMessage]
    ) -> AsyncGenerator[pb.UploadReply, None]:
        """Yield the replies to the upload of a part whose bytes no other stream receives."""
        part = upload.part
        assert part is not None
        async with self._parts.of(upload.store, upload.manifest, upload.digest, part, upload.compute) as parts:
            if await parts.begin(part, upload.judge):
                async with aclosing(self._receive_bytes(upload, data, requests)) as replies:
                    async for reply in replies:
                        yield reply
                if upload.refusal is not None and upload.refusal.resend:  # of this part alone
                    yield _reply(upload.refusal)
                    return
                if upload.refusal is not None:
                    parts.refuse(upload.refusal)
                else:
                    await parts.keep(part)
            verdict = await parts.verdict(part, upload.judge)
        if verdict is not None:
            self._forget_partial(upload)
            self.arrivals.over(upload.key, upload.digest)
        yield pb.UploadReply(kept=True) if verdict is None else _reply(verdict)

    async def _receive_bytes(
        self, upload: "_Upload", data: bytes, requests: AsyncIterator[UploadMessage]
    ) -> AsyncGenerator[pb.UploadReply, None]:
        """Yield the position to continue from and the confirmations while the bytes arrive; then check the bytes."""
        await self._discard_older(upload)
        window = self._window
        with upload.open_incoming(reserves_whole=self._parts.come_here) as file:
            if data:
                self.received_bytes += upload.take_at_once(file, data)
            else:
                yield pb.UploadReply(position=file.position, window=window)
            self._note_arrived(upload, file.position)
            confirmations = Confirmations(file.position, window)
            async with aclosing(upload.take(file, requests, self._floor, self._chunk_bytes)) as taken:
                async for position, num_bytes in taken:
                    self.received_bytes += num_bytes
                    self._note_arrived(upload, position)
                    is_last = position == upload.content.num_bytes  # the verdict confirms it
                    if confirmations.is_due(position, num_bytes) and not is_last:
                        window = self._window
                        confirmations.said(position, window)
                        yield pb.UploadReply(position=position, window=window)
            await upload.check(file)

    def _note_arrived(self, upload: "_Upload", position: int) -> None:
        place = upload.part.index if upload.part is not None else 0
        self.arrivals.came(upload.key, upload.digest, upload.manifest.num_bytes, place=place, num_bytes=position)

    async def _discard_older(self, upload: "_Upload") -> None:
        """Discard a client's older partial uploads, so that starting many without finishing cannot fill the disk."""
        run_id, key = upload.manifest.run_id, (upload.manifest.run_id, upload.manifest.client_id)
        self._partial[key], older = newest_first(self._partial.get(key, ()), upload.digest, PARTIALS_MAX)
        for old in map(Digest, older):
            with self.in_flight_during(run_id) as in_flight:
                is_withdrawn = await upload.judge.withdraw(old)
                if old not in in_flight:
                    discard = upload.store.discard_parts if is_withdrawn else upload.store.discard_incoming
                    await on_thread(None, discard, old)

    def _forget_partial(self, upload: "_Upload") -> None:
        key = upload.manifest.run_id, upload.manifest.client_id
        partial = [digest for digest in self._partial.pop(key, []) if digest != upload.digest]
        if partial:
            self._partial[key] = partial

    @asynccontextmanager
    async def _only_one_of(
        self, manifest: UpdateManifest, digest: Digest, part: PartManifest | None
    ) -> AsyncIterator[None]:
        """Cancel the client's older upload for the round: its stream may be half dead and must not keep the file.

        Other parts of the same update continue.
        """
        task, key = asyncio.current_task(), (manifest.run_id, manifest.round_id, manifest.client_id)
        own = digest, part.index if part is not None else None
        assert task is not None
        while older := [stream for of, stream in self._receiving.get(key, {}).items() if of[0] != digest or of == own]:
            for stream in older:
                stream.cancel()
            await asyncio.wait(older)
        streams = self._receiving.setdefault(key, {})
        streams[own] = task
        try:
            yield
        finally:
            if streams.get(own) is task:
                del streams[own]
            if not streams and self._receiving.get(key) is streams:
                del self._receiving[key]

    @asynccontextmanager
    async def _told_if_full(self, manifest: UpdateManifest) -> AsyncIterator[None]:
        """Report to the run that the disk has no room for an update, which its client will send again."""
        try:
            yield
        except DiskFull as error:
            if not isinstance(error, QuotaFull):
                self._on_full(manifest.run_id, manifest.num_bytes, error)
            raise

    @asynccontextmanager
    async def _marked_in_flight(self, run_id: RunId, digest: Digest) -> AsyncIterator[None]:
        """Mark an update as in flight within the block, so that retention spares it."""
        in_flight = self._in_flight.setdefault(run_id, [])
        in_flight.append(digest)
        for watched, seen in self._watchers:
            if watched == run_id:
                seen.add(digest)
        try:
            yield
        finally:
            in_flight.remove(digest)


class _Upload:
    """Incoming bytes of one update, or of one part.

    In the end either `kept` or `refusal` is set, or, for a sound part, neither.
    """

    def __init__(
        self,
        store: RunStore,
        manifest: UpdateManifest,
        part: PartManifest | None,
        digest: Digest,
        judge: Judging,
        compute: Executor,
    ) -> None:
        self.store, self.manifest, self.part, self.digest = store, manifest, part, digest
        self.content: UpdateManifest | PartManifest = part or manifest
        self.judge, self.compute = judge, compute
        self._inspector: Inspector | None = None
        self.kept: KeptUpdate | None = None
        """Sound and durable update."""
        self.refusal: pb.Verdict | None = None
        """Verdict on an update that is not sound."""

    @property
    def key(self) -> tuple[RunId, RoundId, ClientId]:
        """The run, the round and the client of the update."""
        return self.manifest.run_id, self.manifest.round_id, self.manifest.client_id

    async def refusal_of_codecs(self) -> pb.Verdict | None:
        """Open the codecs of installed packages; return the refusal if one is missing here, or has another version."""
        codecs = self.content.codecs
        if any(map(is_installed, codecs)) and (fault := await on_thread(None, fault_of_opening, codecs)):
            return await self.judge.refuse(RejectReason.WRONG_CODEC, f"here {fault}; plain values are accepted")
        return None

    async def was_kept_before(self) -> bool:
        """Look for bytes that were found sound before: then only the decision, or its answer, was lost."""
        if self.store.has_file(self.digest):
            self.kept = await on_thread(self.compute, self.store.kept_before, self.manifest)
        return self.kept is not None

    def open_incoming(self, *, reserves_whole: bool) -> Incoming:
        """Open the file of the bytes received so far; reserve room for only this part, or for the whole update."""
        if self.part is None:
            return self.store.open_incoming(self.digest, self.manifest.num_bytes)
        whole = self.manifest.num_bytes if reserves_whole else 0
        return self.store.open_incoming(self.digest, self.part.num_bytes, part=self.part.index, whole_bytes=whole)

    def take_at_once(self, file: Incoming, data: bytes) -> int:
        """Accept the whole update, which arrived with the manifest; return the number of new bytes."""
        total = self.content.num_bytes
        if len(data) != total or len(data) > INLINE_BYTES_MAX:
            what = f"{count_of(len(data), 'byte')} of an update of {total}"
            raise BadRequest(f"UploadOpen has {what}; allowed: all of them, up to {INLINE_BYTES_MAX}, or none")
        fresh = data[file.position :]
        file.append(fresh)
        crash_points.reached("upload.mid_chunk")
        return len(fresh)

    async def take(
        self, file: Incoming, requests: AsyncIterator[UploadMessage], floor: float, waiting_max: Callable[[], int]
    ) -> AsyncGenerator[tuple[int, int], None]:
        """Accept the chunks, each of which must begin where the last one ended; yield its end and its new bytes.

        The first one may begin at 0 although bytes exist here: the client then did not wait for the position, because
        it has never sent this update. Either another process of its name did, or the client has lost its spool and
        trained again.

        A background writer appends and inspects large updates; it has finished when this generator ends. The bytes
        that wait for it are in memory, confirmed or not.

        Args:
            file: the file for the bytes.
            requests: the messages of the client after UploadOpen.
            floor: see `Uploads`.
            waiting_max: returns the number of bytes that may wait for the writer now; smaller while many uploads run.
        """
        position, total, patience = file.position, self.content.num_bytes, patience_of(floor)
        begin: int | None = None  # position of the next chunk
        behind = Behind(partial(self._append, file), self.compute)
        try:
            while position < total:
                request, waited = await next_bytes(requests, patience)
                if request is None:
                    raise BadRequest(f"the upload ended at byte {position} of {total}")
                if not isinstance(request, Chunk):
                    raise BadRequest("every message after UploadOpen must be a chunk")
                size = len(request.data)
                if begin is None:
                    begin = 0 if request.position == 0 else position
                if request.position != begin or not 1 <= size <= min(CHUNK_BYTES, total - begin):
                    got = f"a chunk of {count_of(size, 'byte')} at {request.position}"
                    raise BadRequest(f"{got} does not continue {begin} of {total}")
                patience.received(size, waited)
                fresh, begin = memoryview(request.data)[max(0, position - begin) :], begin + size
                position += len(fresh)
                if file.is_small:
                    self._append(file, [fresh])
                elif fresh:
                    await behind.put(fresh, waiting_max())
                yield position, len(fresh)
        finally:
            await behind.finish()

    def _append(self, file: Incoming, chunks: Sequence[Buffer]) -> None:
        """Write chunks and inspect them while more arrive, so that the verdict follows soon after the last byte."""
        for data in chunks:
            file.append(data)
            crash_points.reached("upload.mid_chunk")
            if file.is_small:
                continue
            if self._inspector is None:
                self._inspector = file.inspector(self.content.pieces)
            self._inspector.advance(file.position, data)

    async def check(self, file: Incoming) -> None:
        """Check the complete bytes; set `kept` once they are durable, or `refusal`."""
        content = self.content
        crash_points.reached("upload.before_check")
        inspector = self._inspector or file.inspector(content.pieces)
        is_own = any(map(is_installed, content.codecs))  # a user's code, which may take long
        is_quick = content.plain_bytes <= SMALL_BYTES and not is_own  # few encoded bytes may decode to many
        if file.is_small and is_quick and len(content.pieces) <= PIECES_AT_ONCE:
            inspection = self._keep_if_sound(file, inspector)
        else:
            inspection = await on_thread(self.compute, self._keep_if_sound, file, inspector)
        if inspection is None:
            if self.kept is not None:
                crash_points.reached("upload.before_accept")
        elif inspection.wrong_digests:
            names = ", ".join(sorted({piece.tensor for piece in inspection.wrong_digests})[:5])
            what = f"the bytes of {names} do not have the digests of the manifest"
            self.refusal = refused(RejectReason.DIGEST_MISMATCH, what, resend=True)
        else:
            self.refusal = await self.judge.refuse(*_fault_of(inspection))

    def _keep_if_sound(self, file: Incoming, inspector: Inspector) -> Inspection | None:
        """Finish the inspection of complete bytes; keep sound ones, else discard them and return their faults."""
        inspection = inspector.finish()
        if not inspection.is_sound or _beyond_reason(inspection):
            self.store.discard_incoming(self.digest, self.part.index if self.part is not None else None)
            return inspection
        if self.part is None:
            self.kept = self.store.keep(file, self.manifest, inspection)
        else:
            self.store.parts_of(self.manifest, self.digest).keep(file, self.part, inspection)
        return None


def _fault_of(inspection: Inspection) -> tuple[RejectReason, str]:
    """Return why an update is refused although its digests match."""
    if inspection.malformed:
        found = "; ".join(f"{name}: {fault}" for name, fault in sorted(inspection.malformed.items())[:5])
        return RejectReason.BAD_ENCODING, found
    if inspection.non_finite:
        found = ", ".join(f"{name}: {count}" for name, count in sorted(inspection.non_finite.items())[:5])
        return RejectReason.NOT_FINITE, f"values that are NaN or infinite ({found})"
    return RejectReason.NOT_FINITE, f"values beyond {MAGNITUDE_MAX:g} ({_beyond_reason(inspection)})"


def _beyond_reason(inspection: Inspection) -> str:
    """List the tensors with elements beyond MAGNITUDE_MAX: a sum with them may exceed float32 and fail the round."""
    beyond = ((name, m) for name, m in sorted(inspection.magnitudes.items()) if isinstance(m, float))
    return ", ".join(f"{name}: {m:g}" for name, m in beyond if m > MAGNITUDE_MAX)


def _reply(verdict: pb.Verdict) -> pb.UploadReply:
    return pb.UploadReply(verdict=verdict)
