"""Receives one update: its manifest is judged first, then its bytes are taken from where they stopped, then checked.

The order of checks is that of the cost: what the manifest alone gives away is refused before a byte is sent, and the
bytes are looked at once, on a thread, when all are there. Accepted means durable: bytes, sidecar and journal entry.
"""

import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from atoll.aggregation.inspection import Inspection
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import steps
from atoll.protocol.channel import CHUNK_BYTES
from atoll.protocol.manifest import ManifestError, UpdateManifest, check_against, parse_update
from atoll.protocol.vocabulary import Digest, RejectReason
from atoll.server.coordinator import Coordinator
from atoll.server.downloads import BadRequest
from atoll.server.driver import RunDriver
from atoll.server.events import Accept, Reject, Sums, Update, UpdateReceived, UpdateRefused, UploadBegun
from atoll.server.messages import sums_of
from atoll.server.store import Incoming, RunStore

logger = logging.getLogger(__name__)

METRICS_MAX = 100
STATISTICS_MAX = 10_000
DAY_S = 86400.0


async def receive_update(
    coordinator: Coordinator, opened: pb.UploadOpen, requests: AsyncIterator[pb.UploadRequest]
) -> AsyncIterator[pb.UploadReply]:
    """The replies to one upload: the position to go on from, the progress, the verdict.

    Raises:
        BadRequest: the client broke the protocol.
        OSError: the bytes cannot be stored now; the client should try again later.
    """
    try:
        manifest = parse_update(opened.manifest)
    except ManifestError as error:
        yield _verdict(RejectReason.BAD_MANIFEST, str(error))
        return
    run = coordinator.runs.get(manifest.run_id)
    if run is None:
        yield _verdict(RejectReason.RUN_ENDED, f"there is no run {manifest.run_id!r} here")
        return
    upload = _Upload(run, manifest, _update(manifest, opened))
    if (verdict := await upload.verdict_without_bytes()) is not None:
        yield verdict
        return
    async with coordinator.only_upload_of(upload.update.digest), coordinator.in_flight(run, upload.update.digest):
        with run.reducer.store.open_incoming(upload.update.digest, manifest.num_bytes) as file:
            yield pb.UploadReply(position=file.position)
            async for position in upload.take(file, requests):
                if position < manifest.num_bytes:  # of the end the verdict tells
                    yield pb.UploadReply(position=position)
        yield await upload.verdict(coordinator)


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
            return _verdict(*refusal)  # nothing changes by it, so nothing is written down
        if run.machine.is_accepted(update) or run.machine.is_hopeless(update):
            return await self._decide()
        base = run.reducer.known(update.base_version)
        if base is None or base.digest != self.manifest.base_digest:
            return await self._refuse(
                RejectReason.WRONG_BASE, f"this run has no version {update.base_version} {self.manifest.base_digest}"
            )
        if faults := check_against(base.layout, self.manifest):
            return await self._refuse(RejectReason.WRONG_LAYOUT, "; ".join(faults)[:2000])
        run.post(UploadBegun(update.client_id, update.round_id))
        return None

    async def take(self, file: Incoming, requests: AsyncIterator[pb.UploadRequest]) -> AsyncIterator[int]:
        """Append the chunks; each must begin where the last one ended."""
        total = self.manifest.num_bytes
        while file.position < total:
            request = await anext(requests, None)
            if request is None:
                return
            if request.WhichOneof("request") != "chunk":
                raise BadRequest("after UploadOpen come chunks")
            chunk = request.chunk
            if chunk.position != file.position or not 1 <= len(chunk.data) <= min(CHUNK_BYTES, total - file.position):
                got = f"a chunk of {len(chunk.data)} bytes at {chunk.position}"
                raise BadRequest(f"{got} does not continue {file.position} of {total}")
            file.append(chunk.data)
            steps.reached("upload.mid_chunk")
            yield file.position

    async def verdict(self, coordinator: Coordinator) -> pb.UploadReply:
        """All bytes are there: check them, make them durable, let the machine decide."""
        store, update = self.run.reducer.store, self.update
        steps.reached("upload.before_check")
        inspection = await coordinator.on_thread(_keep_if_sound, store, update.digest, self.manifest)
        if inspection.wrong_digests:
            names = ", ".join(sorted({piece.tensor for piece in inspection.wrong_digests})[:5])
            return _verdict(RejectReason.DIGEST_MISMATCH, f"the bytes of {names} are not those of the manifest", True)
        if inspection.non_finite:
            found = ", ".join(f"{name}: {count}" for name, count in sorted(inspection.non_finite.items())[:5])
            return await self._refuse(RejectReason.NOT_FINITE, f"values that are NaN or infinite ({found})")
        steps.reached("upload.before_accept")
        return await self._decide()

    async def _decide(self) -> pb.UploadReply:
        for effect in await self.run.post(UpdateReceived(self.update)):
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                return pb.UploadReply(verdict=pb.Verdict(accepted=True, detail="late" if effect.carried else ""))
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                return _verdict(effect.reason, effect.detail)
        raise AssertionError("the machine did not answer an update")

    async def _refuse(self, reason: RejectReason, detail: str) -> pb.UploadReply:
        await self.run.post(UpdateRefused(self.update.client_id, self.update.round_id, reason, detail))
        return _verdict(reason, detail)


def _keep_if_sound(store: RunStore, digest: Digest, manifest: UpdateManifest) -> Inspection:
    """Look at a complete upload, and make it a stored update or forget it."""
    inspection = store.inspect_incoming(digest, manifest.pieces)
    if inspection.is_sound:
        store.promote(digest, manifest, inspection)
    else:
        store.discard_incoming(digest)
    return inspection


def _update(manifest: UpdateManifest, opened: pb.UploadOpen) -> Update:
    return Update(
        client_id=manifest.client_id,
        round_id=manifest.round_id,
        base_version=manifest.base_version,
        digest=manifest.digest,
        num_examples=manifest.num_examples,
        work=manifest.work,
        num_bytes=manifest.num_bytes,
        statistics=_statistics(opened),
        download_seconds=_seconds(opened.download_seconds),
        train_seconds=_seconds(opened.train_seconds),
    )


def _statistics(opened: pb.UploadOpen) -> Sums:
    """Bounded and finite, or none at all: statistics are for looking at, and cost no update."""
    sums = sums_of(opened.statistics)
    values = [value for numbers in sums.values() for value in numbers]
    if len(sums) > METRICS_MAX or len(values) > STATISTICS_MAX or not all(map(math.isfinite, values)):
        return {}
    return sums


def _seconds(value: float) -> float:
    return min(max(value, 0.0), DAY_S) if math.isfinite(value) else 0.0


def _verdict(reason: RejectReason, detail: str, resend: bool = False) -> pb.UploadReply:
    return pb.UploadReply(verdict=pb.Verdict(accepted=False, reason=reason, detail=detail[:2000], resend=resend))
