"""The judge of an update in a run of rounds."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from atoll.ground.printable import count_of
from atoll.ground.strict_json import INT64_MAX
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure
from atoll.protocol.manifest import UpdateManifest, check_against, digest_of
from atoll.protocol.part_manifest import PartManifest, check_part, check_parts
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import Digest, Fate, RejectReason
from atoll.protocol.wire.mesh_use import MeshUse
from atoll.server.config.aggregation import PARTIAL_ACCEPTS
from atoll.server.folding.sums import expected_layout, faults_of_words
from atoll.server.hosting.judge import Judge, accepted
from atoll.server.hosting.messages import sums_of
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.rounds.events import Sums, Update
from atoll.task.metrics import only_finite
from atoll.tensors.codecs.chunks import encoded_bytes
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import BESIDE, Layout

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class UpdateJudge(Judge[RunDriver]):
    """Judge of one update in a run of rounds, before and after its bytes arrive."""

    @classmethod
    def of(
        cls, run: RunDriver, manifest: UpdateManifest, opened: pb.UploadOpen, part: PartManifest | None = None
    ) -> "UpdateJudge":
        """Make the judge of an update that a client announces, or of a part of one."""
        tells_metrics = run.config.privacy is None  # which have no noise
        update = _update(manifest, digest_of(opened.manifest), opened, tells_metrics=tells_metrics)
        return cls(run, manifest, update, part)

    @property
    def may_omit(self) -> bool:
        """Return whether the update may omit whole tensors."""
        return self.run.config.aggregation.partial

    async def on_manifest(self) -> pb.Verdict | None:
        """Return the refusal that follows from the manifest; None: it is sound."""
        run, update = self.run, self.update
        if run.machine.is_hopeless(update):
            return await self.decide(None)
        base = run.reducer.known(update.base_version)
        if base is None or base.digest != self.manifest.base_digest:
            return await self.refuse(
                RejectReason.WRONG_BASE, f"this run has no version {update.base_version} {self.manifest.base_digest}"
            )
        layout, num_pieces = self._expected(base.manifest.layout), len((self.part or self.manifest).pieces)
        if fault := self._fault_of_rows():
            return await self.refuse(RejectReason.WRONG_LAYOUT, fault)
        if faults := await off_loop(100 * num_pieces, partial(self._faults_of_pieces, layout)):
            return await self.refuse(RejectReason.WRONG_LAYOUT, "; ".join(faults)[:2000])
        judge_codec = partial(codec_fault, self.part or self.manifest, run.config.aggregation.codec_name)
        if fault := await off_loop(100 * num_pieces, judge_codec):
            return await self.refuse(RejectReason.WRONG_CODEC, fault)
        return None

    def _expected(self, layout: Layout) -> Layout:
        """Return the tensors of an update, by those of its base version."""
        return expected_layout(layout, self.run.config.secure_rules)

    def _fault_of_rows(self) -> str:
        """Return why an update cannot be appended to the model; "" if it can, or nothing is appended."""
        aggregation = self.run.config.aggregation
        if aggregation.grows and self.part is not None:
            return "an update of rows to append must be sent whole, not in parts"
        return aggregation.fault_of_rows(self.manifest.num_bytes)

    def _faults_of_pieces(self, layout: Layout) -> list[str]:
        """List the faults of the announced pieces: of the whole update, or of a part by itself."""
        if self.run.config.secure is not None and (
            faults := faults_of_words(layout, (self.part or self.manifest).pieces)
        ):
            return faults
        if self.part is not None:
            return check_part(layout, self.part)
        may_omit = self.may_omit and len(self.manifest.pieces) > 0
        faults = check_against(layout, self.manifest, may_omit=may_omit, grows=self.run.config.aggregation.grows)
        leaves_out = len({piece.tensor for piece in self.manifest.pieces}) < len(layout) and not self.may_omit
        return [*([PARTIAL_ACCEPTS] if leaves_out and faults else []), *faults]

    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Return the refusal of an update whose combined parts do not cover each element of the model once."""
        base = self.run.reducer.known(self.update.base_version)
        if base is None:  # it existed when the first part was announced
            return await self.refuse(RejectReason.WRONG_BASE, f"version {self.update.base_version} is gone")
        check = partial(check_parts, self._expected(base.manifest.layout), parts, may_omit=self.may_omit)
        if faults := await on_thread(None, check):
            return await self.refuse(RejectReason.WRONG_LAYOUT, "; ".join(faults)[:2000])
        return None

    async def old_verdict(self) -> pb.Verdict | None:
        """Repeat the verdict on an already accepted update, once its grounds are on disk; None: it was not accepted."""
        if not self.run.machine.is_accepted(self.update):
            return None
        record = self.run.machine.record_of(self.update.round_id)
        assert record is not None
        is_carried = record.clients[self.update.client_id].fate is Fate.CARRIED
        await self.run.on_disk()
        return accepted(is_carried=is_carried)


def codec_fault(manifest: UpdateManifest | PartManifest, allowed: str) -> str:
    """Return why a run with this codec refuses an update; "": it accepts it. Plain values are always accepted."""
    if wrong := sorted(manifest.codecs - {allowed}):
        also = f"{allowed}, or " if allowed else ""
        return f"the update is encoded with {', '.join(wrong)}; allowed: {also}plain values"
    for piece in manifest.pieces:  # server and client must add the same values to their control variates
        if piece.codec and piece.tensor.startswith(BESIDE):
            return f"{piece.tensor!r} is encoded with {piece.codec}; allowed of control variates: plain values"
        if piece.codec and (size := encoded_bytes(parse_codec(allowed), piece.num_elements)) != piece.num_bytes:
            got = count_of(piece.num_bytes, "byte")
            return f"{piece.tensor!r} is encoded with {allowed} in {got}; allowed of its elements: {size}"
    return ""


def _update(manifest: UpdateManifest, digest: Digest, opened: pb.UploadOpen, *, tells_metrics: bool) -> Update:
    return Update(
        client_id=manifest.client_id,
        round_id=manifest.round_id,
        base_version=manifest.base_version,
        digest=digest,
        num_examples=manifest.num_examples,
        work=manifest.work,
        num_bytes=manifest.num_bytes,
        plain_bytes=manifest.plain_bytes,
        statistics=_statistics(opened) if tells_metrics else {},
        download_seconds=_seconds(opened.download_seconds),
        train_seconds=_seconds(opened.train_seconds),
        disclosure=Disclosure.read(opened.metrics, opened.min_sites),
        mesh=_mesh(opened),
        steps=min(opened.steps, INT64_MAX),
        attempt=manifest.attempt,
    )


def _mesh(opened: pb.UploadOpen) -> MeshUse | None:
    """Return the use of a client's mesh; None if there was none, or for an older agent."""
    mesh = opened.mesh
    return MeshUse.read(mesh.num_ranks, mesh.peak_bytes, mesh.steps_per_s, mesh.flops_per_s, mesh.peak_flops)


def _statistics(opened: pb.UploadOpen) -> Sums:
    """Return the statistics of an update; {} if they are too large, which is no reason to refuse it.

    Sums that are not finite are refused, each metric by itself.
    """
    sums = sums_of(opened.statistics)
    return {} if sums is None else only_finite(sums)


def _seconds(value: float) -> float:
    return min(max(value, 0.0), DAY_S) if math.isfinite(value) else 0.0
