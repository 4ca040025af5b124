"""Receives one update: its manifest is judged first, then its bytes are taken from where they stopped, then checked.

The order of checks is that of the cost: what the manifest alone gives away is refused before a byte is sent, and the
bytes are looked at when all are there, those of a large one on a thread. Accepted means durable: bytes, what is known
of them, and the journal entry.
"""

import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from atoll.aggregation.inspection import Inspection
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import steps
from atoll.protocol.channel import CHUNK_BYTES, INLINE_BYTES_MAX
from atoll.protocol.manifest import ManifestError, UpdateManifest, check_against, digest_of, parse_update
from atoll.protocol.vocabulary import Digest, Fate, RejectReason
from atoll.server.coordinator import Coordinator
from atoll.server.downloads import BadRequest
from atoll.server.driver import RunDriver
from atoll.server.events import Accept, Reject, Sums, Update, UpdateReceived, UpdateRefused, UploadBegun
from atoll.server.incoming import SMALL_BYTES, Incoming
from atoll.server.messages import sums_of
from atoll.server.silence import next_of
from atoll.server.store import KeptUpdate, RunStore
from atoll.server.threads import off_loop

logger = logging.getLogger(__name__)

MAGNITUDE_MAX = 1e30
"""Largest |element| of an update that is worth calling a number; float32 ends at 3.4e38."""

DAY_S = 86400.0

PIECES_AT_ONCE = 100
"""So many pieces of a small update are looked at sooner than a thread takes it."""


async def receive_update(
    coordinator: Coordinator, opened: pb.UploadOpen, requests: AsyncIterator[pb.UploadRequest]
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
        yield _verdict(RejectReason.BAD_MANIFEST, str(error))
        return
    run = coordinator.runs.get(manifest.run_id)
    if run is None:
        yield _verdict(RejectReason.RUN_ENDED, f"there is no run {manifest.run_id!r} here")
        return
    upload = _Upload(run, manifest, _update(manifest, digest_of(opened.manifest), opened))
    if (verdict := await upload.verdict_without_bytes()) is not None:
        yield verdict
        return
    async with coordinator.only_upload_of(run, upload.update), coordinator.in_flight(run, upload.update.digest):
        if run.machine.is_accepted(upload.update):  # by the stream that this one has ended
            yield await upload.old_verdict()
            return
        kept = await upload.kept_before(coordinator)
        if kept is None:
            with run.reducer.store.open_incoming(upload.update.digest, manifest.num_bytes) as file:
                if opened.data:
                    upload.take_at_once(file, opened.data)
                else:
                    yield pb.UploadReply(position=file.position)
                async for position in upload.take(file, requests):
                    if position < manifest.num_bytes:  # of the end the verdict tells
                        yield pb.UploadReply(position=position)
                judged = await upload.judged(coordinator, file)
            if isinstance(judged, pb.UploadReply):
                yield judged
                return
            kept = judged
        yield await upload.verdict(kept)


@dataclass(frozen=True, slots=True)
class _Upload:
    """One update on its way in."""

    run: RunDriver
    manifest: UpdateManifest
    update: Update

    async def verdict_without_bytes(self) -> pb.UploadReply | None:
        """What can be said before the bytes come; None when they are wanted."""
        run, update = self.run, self.update
        if (refusal := run.machine.refusal(update)) is not None:
            await run.on_disk()  # nothing changes by it, so it is not written down; but what it rests on must be
            return _verdict(*refusal)
        if run.machine.is_accepted(update):
            return await self.old_verdict()
        if run.machine.is_hopeless(update):
            return await self.verdict(None)
        base = run.reducer.known(update.base_version)
        if base is None or base.digest != self.manifest.base_digest:
            return await self._refuse(
                RejectReason.WRONG_BASE, f"this run has no version {update.base_version} {self.manifest.base_digest}"
            )
        layout, num_pieces = base.manifest.layout, len(self.manifest.pieces)
        if faults := await off_loop(100 * num_pieces, check_against, layout, self.manifest):
            return await self._refuse(RejectReason.WRONG_LAYOUT, "; ".join(faults)[:2000])
        if fault := codec_fault(self.manifest, run.config.aggregation.codec_name):
            return await self._refuse(RejectReason.WRONG_CODEC, fault)
        if run.is_first_upload(update):
            run.post(UploadBegun(update.client_id, update.round_id))
        return None

    async def kept_before(self, coordinator: Coordinator) -> KeptUpdate | None:
        """Its bytes, when they were found sound before, and only the decision or its answer was lost."""
        store = self.run.reducer.store
        if not store.has_file(self.update.digest):
            return None
        return await coordinator.on_thread(store.kept_before, self.manifest)

    async def old_verdict(self) -> pb.UploadReply:
        """It was accepted before: nothing changes, and the answer is repeated when what it rests on is on disk."""
        record = self.run.machine.record_of(self.update.round_id)
        assert record is not None
        is_carried = record.clients[self.update.client_id].fate is Fate.CARRIED
        await self.run.on_disk()
        return _accepted(is_carried=is_carried)

    def take_at_once(self, file: Incoming, data: bytes) -> None:
        """Take what came with the manifest: everything."""
        if len(data) != self.manifest.num_bytes or len(data) > INLINE_BYTES_MAX:
            what = f"{len(data)} bytes of an update of {self.manifest.num_bytes}"
            raise BadRequest(f"UploadOpen has {what}: allowed are all of them, up to {INLINE_BYTES_MAX}, or none")
        file.append(data[file.position :])
        steps.reached("upload.mid_chunk")

    async def take(self, file: Incoming, requests: AsyncIterator[pb.UploadRequest]) -> AsyncIterator[int]:
        """Append the chunks; each must begin where the last one ended."""
        total = self.manifest.num_bytes
        while file.position < total:
            request = await next_of(requests)
            if request is None:
                raise BadRequest(f"the upload ended at byte {file.position} of {total}")
            if request.WhichOneof("request") != "chunk":
                raise BadRequest("after UploadOpen come chunks")
            chunk = request.chunk
            if chunk.position != file.position or not 1 <= len(chunk.data) <= min(CHUNK_BYTES, total - file.position):
                got = f"a chunk of {len(chunk.data)} bytes at {chunk.position}"
                raise BadRequest(f"{got} does not continue {file.position} of {total}")
            await off_loop(len(chunk.data), file.append, chunk.data)
            steps.reached("upload.mid_chunk")
            yield file.position

    async def judged(self, coordinator: Coordinator, file: Incoming) -> KeptUpdate | pb.UploadReply:
        """All bytes are there: check them and make them durable, or say what is wrong."""
        store = self.run.reducer.store
        steps.reached("upload.before_check")
        is_quick = self.manifest.plain_bytes <= SMALL_BYTES  # also when few bytes decode to many
        if file.is_small and is_quick and len(self.manifest.pieces) <= PIECES_AT_ONCE:
            inspection, kept = _keep_if_sound(store, file, self.manifest)
        else:
            inspection, kept = await coordinator.on_thread(_keep_if_sound, store, file, self.manifest)
        if kept is not None:
            steps.reached("upload.before_accept")
            return kept
        if inspection.wrong_digests:
            names = ", ".join(sorted({piece.tensor for piece in inspection.wrong_digests})[:5])
            return _verdict(RejectReason.DIGEST_MISMATCH, f"the bytes of {names} are not those of the manifest", True)
        if inspection.malformed:
            found = "; ".join(f"{name}: {fault}" for name, fault in sorted(inspection.malformed.items())[:5])
            return await self._refuse(RejectReason.BAD_ENCODING, found)
        if inspection.non_finite:
            found = ", ".join(f"{name}: {count}" for name, count in sorted(inspection.non_finite.items())[:5])
            return await self._refuse(RejectReason.NOT_FINITE, f"values that are NaN or infinite ({found})")
        huge = _beyond_reason(inspection)
        return await self._refuse(RejectReason.NOT_FINITE, f"values beyond {MAGNITUDE_MAX:g} ({huge})")

    async def verdict(self, kept: KeptUpdate | None) -> pb.UploadReply:
        """Let the machine decide; what it says is on disk."""
        for effect in await self.run.post(UpdateReceived(self.update), kept):
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                return _accepted(is_carried=effect.carried)
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                return _verdict(effect.reason, effect.detail)
        raise AssertionError("the machine did not answer an update")

    async def _refuse(self, reason: RejectReason, detail: str) -> pb.UploadReply:
        if self.run.is_news_of(self.update.client_id, self.update.round_id):
            await self.run.post(UpdateRefused(self.update.client_id, self.update.round_id, reason, detail))
        return _verdict(reason, detail)


def codec_fault(manifest: UpdateManifest, allowed: str) -> str:
    """Why a run with this codec does not take an update; empty when it does: plain pieces are always taken."""
    if not (wrong := sorted(manifest.codecs - {allowed})):
        return ""
    return f"the update is encoded with {', '.join(wrong)}; allowed: {f'{allowed}, or ' if allowed else ''}plain values"


def _beyond_reason(inspection: Inspection) -> str:
    """Finite values so large that a sum with them would leave float32, and fail the whole round; empty when none."""
    beyond = ((name, m) for name, m in sorted(inspection.magnitudes.items()) if isinstance(m, float))
    return ", ".join(f"{name}: {m:g}" for name, m in beyond if m > MAGNITUDE_MAX)


def _keep_if_sound(store: RunStore, file: Incoming, manifest: UpdateManifest) -> tuple[Inspection, KeptUpdate | None]:
    """Look at a complete upload, and keep it or forget it."""
    inspection = file.inspect(manifest.pieces)
    if inspection.is_sound and not _beyond_reason(inspection):
        return inspection, store.keep(file, manifest, inspection)
    store.discard_incoming(manifest.digest)
    return inspection, None


def _update(manifest: UpdateManifest, digest: Digest, opened: pb.UploadOpen) -> Update:
    return Update(
        client_id=manifest.client_id,
        round_id=manifest.round_id,
        base_version=manifest.base_version,
        digest=digest,
        num_examples=manifest.num_examples,
        work=manifest.work,
        num_bytes=manifest.num_bytes,
        plain_bytes=manifest.plain_bytes,
        statistics=_statistics(opened),
        download_seconds=_seconds(opened.download_seconds),
        train_seconds=_seconds(opened.train_seconds),
    )


def _statistics(opened: pb.UploadOpen) -> Sums:
    """Bounded and finite, or none at all: statistics are for looking at, and cost no update."""
    sums = sums_of(opened.statistics)
    if sums is None or not all(math.isfinite(value) for numbers in sums.values() for value in numbers):
        return {}
    return sums


def _seconds(value: float) -> float:
    return min(max(value, 0.0), DAY_S) if math.isfinite(value) else 0.0


def _accepted(*, is_carried: bool) -> pb.UploadReply:
    return pb.UploadReply(verdict=pb.Verdict(accepted=True, detail="late" if is_carried else ""))


def _verdict(reason: RejectReason, detail: str, resend: bool = False) -> pb.UploadReply:
    return pb.UploadReply(verdict=pb.Verdict(accepted=False, reason=reason, detail=detail[:2000], resend=resend))
