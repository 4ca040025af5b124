"""The fold of accepted updates into the next version of the global model, off the event loop.

The fold is a function of the accepted set alone. So recovery from a crash at any point repeats it: the result has the
same bits, and its file appears atomically.
"""

import math
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.aggregation.fold.concatenation import concatenate
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.step import Anchor, Step
from atoll.aggregation.fold.streaming import Folded, fold
from atoll.aggregation.masked.fold import fold_masked
from atoll.aggregation.noise.private_sum import PrivateSum
from atoll.ground.durable import naming_full_disk
from atoll.ground.process import crash_points
from atoll.plugins.place import Place
from atoll.protocol.manifest import VersionManifest, digest_of
from atoll.protocol.manifest_limits import check_model_travels
from atoll.protocol.threads import begin_on_thread, on_thread
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.run import RunConfig
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.files.run_store import INCOMING_AGE_MAX_S, RunStore
from atoll.server.files.versions import VersionFile, Versions
from atoll.server.folding.evaluator import Evaluator
from atoll.server.folding.method import Method
from atoll.server.folding.plan import FoldPlan, Private, next_clip_norm, plan_of
from atoll.server.folding.sums import SumsFolded, plan_of_sums, sessions_of
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta
from atoll.server.rounds.events import Aggregate
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.safetensors_file import read_buffers
from atoll.tensors.secure.plan import Vector
from atoll.tensors.updates.reader import StoredUpdate
from atoll.training.worker.warm_start import Start

if TYPE_CHECKING:
    from atoll.server.journal.rows import UpdateRow


class Reducer(Versions):
    """Maker, finder and deleter of the versions of one run.

    Args:
        folder: the folder of the run.
        folding: the executor of folds.
        accepted: the accepted updates by digest; called on a thread.
        settings: the settings of the run.
        is_over: whether the run has ended: see `Method.of`.
        keep_versions: the number of newest versions kept on disk.
        sums_here: whether this process computes the sums: see `Method.of`.
        disk: the limits of the disk space.

    Attributes:
        noise: the key of the run's noise, which a run with differential privacy needs before its first fold.
    """

    def __init__(
        self,
        folder: Path,
        folding: Executor,
        accepted: Callable[[Sequence[Digest]], "dict[Digest, UpdateRow]"],
        *,
        settings: RunConfig,
        is_over: bool,
        keep_versions: int,
        sums_here: bool = True,
        disk: DiskLimits = DiskLimits(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(RunStore(folder, disk=disk, has_values=settings.secure is None))
        self._accepted, self.noise = accepted, b""
        self._folding, self._is_stopping = folding, False
        self.method = Method.of(settings.aggregation, settings.optimizer, is_over=is_over, sums_here=sums_here)
        self._settings, self.keep_versions = settings, keep_versions

    def follow(self, settings: RunConfig) -> None:
        """Apply changed settings of the run, with the same aggregation and optimizer."""
        self._settings, self.keep_versions = settings, settings.model.keep_versions or self.keep_versions

    async def has_room(self, num_bytes: int) -> bool:
        """Return whether the disk has room for `num_bytes` more bytes, beside the space that stays free."""
        return await on_thread(None, self.store.has_room, num_bytes)

    async def write_initial(self, evaluator: Evaluator, seed: int, start: Start | None = None) -> None:
        """Write version 0 from the task's model, or from the values of a file.

        Raises:
            ManifestError: the model, or an update of it, does not fit into a manifest.
        """
        pieces = await evaluator.write_initial(self.store.version_path(Version(0)), seed, start)
        manifest = VersionManifest.of(pieces)
        check_model_travels(manifest, self._settings.aggregation.codec_name)
        self.store.write_manifest(Version(0), manifest.encode())

    async def fold(self, effect: Aggregate) -> Digest:
        """Fold the contributions into the next version, which is durable on return, and return its digest.

        Raises:
            ValueError: the updates cannot be folded.
            DiskFull: the disk has no room for the next version.
            OSError: a file cannot be read or written.
        """
        crash_points.reached("aggregate.before_fold")
        return await begin_on_thread(self._folding, self._fold, effect)

    def _fold(self, effect: Aggregate) -> Digest:
        rows = self._accepted([c.digest for c in effect.contributions])
        plan, metas = self._plan(effect, rows)
        updates = [
            Weighted(
                self.store.stored_update(planned.digest, metas.pop(planned.digest), rows.pop(planned.digest).data),
                planned.weight,
                planned.factor,
                planned.trained_factor,
            )
            for planned in plan.updates
        ]
        return fold_version(self, plan, updates, self.method, threads=os.cpu_count() or 1, between=self._between_tiles)

    def _plan(
        self, effect: Aggregate, rows: "Mapping[Digest, UpdateRow]"
    ) -> tuple[FoldPlan, dict[Digest, StoredUpdateMeta]]:
        metas = {digest: decode_meta(row.meta, where=f"update {digest}") for digest, row in rows.items()}
        base = self.version(effect.base_version)
        shared: dict[str, Any] = {
            "buffers": read_buffers(self.store.version_path(Version(0))),
            "settings": (self._settings.aggregation, self._settings.optimizer_at(effect.base_version + 1)),
            "private": private_of(self._settings, self.noise),
        }
        if effect.sums:
            rules = self._settings.secure_rules
            assert rules is not None
            return plan_of_sums(effect, base, metas, rules=rules, **shared), metas
        plan = plan_of(
            effect,
            base.manifest,
            metas,
            method=self.method,
            digest_of_version=lambda version: self.version(version).digest,
            **shared,
        )
        return plan, metas

    async def next_clip_norm(self, effect: Aggregate) -> float:
        """Return the clip norm of the private round after a folded one; 0: it is fixed, or the run is not private."""
        private = private_of(self._settings, self.noise)
        if private is None or private.rules.adaptive is None:
            return 0.0
        return await begin_on_thread(self._folding, self._next_clip_norm, effect, private)

    def _next_clip_norm(self, effect: Aggregate, private: Private) -> float:
        rows = self._accepted([c.digest for c in effect.contributions])
        metas = {digest: decode_meta(row.meta, where=f"update {digest}") for digest, row in rows.items()}
        base = self.version(effect.base_version)
        return next_clip_norm(effect, base.manifest, base.digest, metas, private)

    async def fold_sums(self, effect: Aggregate) -> SumsFolded:
        """Fold the opened secure sums of a round into the next version, which is durable on return.

        Args:
            effect: with the sums; each was opened before.

        Raises:
            NoSum: no session counts; the error has the reason of each.
            ValueError: the updates cannot be folded.
            DiskFull: the disk has no room for the next version.
            OSError: a file cannot be read or written.
        """
        crash_points.reached("aggregate.before_fold")
        return await begin_on_thread(self._folding, self._fold_sums, effect)

    def _fold_sums(self, effect: Aggregate) -> SumsFolded:
        rows = self._accepted([c.digest for c in effect.contributions])
        plan, metas = self._plan(effect, rows)
        updates = [
            self.store.stored_update(each.digest, metas[each.digest], rows[each.digest].data) for each in plan.updates
        ]
        return fold_sums(
            self, plan, dict(enumerate(updates)), self.method, threads=os.cpu_count() or 1, between=self._between_tiles
        )

    async def whole(self, version: Version) -> Path:
        """Return the path of a file with all bytes of a version."""
        return self.version(version).path

    def publish(self, version: Version) -> None:
        """Prepare a version, which becomes the global model, for downloads."""
        self.version(version)

    def stop(self) -> None:
        """Interrupt a running fold; it can be repeated."""
        self._is_stopping = True

    def _between_tiles(self) -> None:
        if self._is_stopping:
            raise InterruptedError("the coordinator stops")
        crash_points.reached("aggregate.mid_fold")

    async def collect_garbage(
        self, live: Container[Digest], *, pinned_versions: set[Version], current: Version, oldest_base: Version | None
    ) -> None:
        """Delete files that no decision can need any more.

        Args:
            live: the updates to keep; queried from another thread.
            pinned_versions: versions to keep.
            current: the newest committed version.
            oldest_base: the oldest version from which an update can still count; None: there is none. A partial upload
                whose last byte is older than this version is based on an older one and can never count.
        """

        def may_resume(_: Digest, at: float) -> bool:
            return at >= made_at and time.time() - at < INCOMING_AGE_MAX_S

        base = None if oldest_base is None else self.store.version_path(oldest_base)
        made_at = math.inf if base is None else base.stat().st_mtime if base.exists() else 0.0

        collect = partial(
            self.store.collect_garbage,
            live,
            keep_versions=self.keep_versions,
            current=current,
            pinned=pinned_versions,
            keep_incoming=may_resume,
        )
        await on_thread(None, collect)  # ends before the process unlocks the state directory


def private_of(settings: RunConfig, noise: bytes) -> Private | None:
    """Return what the plan of a private sum needs; None: the run has no guarantee for clients."""
    rules = settings.rules.privacy
    if rules is None or rules.noise_by == "site":
        return None
    return Private(rules, settings.round.cohort_size, noise)


def fold_version(
    versions: Versions,
    plan: FoldPlan,
    updates: Sequence[Weighted],
    method: Method,
    *,
    threads: int,
    between: Callable[[], None] | None = None,
) -> Digest:
    """Execute a plan: fold its updates, in its order, into the next version, which is durable on return.

    Args:
        versions: the versions of the run.
        plan: the plan of the fold.
        updates: the updates of the plan, in its order.
        method: the method of the run.
        threads: the number of threads.
        between: called between two tiles; it may raise to interrupt the fold.

    Returns:
        The digest of the next version.

    Raises:
        ValueError: the updates cannot be folded.
        DiskFull: the disk has no room for the next version.
        OSError: a file cannot be read or written.
    """
    store, base, version = versions.store, versions.version(plan.base_version), Version(plan.base_version + 1)
    out = store.version_path(version)
    with naming_full_disk(out):
        if method.grows:
            rows = [item.update for item in updates]
            folded = concatenate(base.path, rows, out, between=between, durable=store.is_durable)
            check_model_travels(VersionManifest.of(folded.pieces))
        else:
            step = step_of(plan, base.manifest.layout, method, store)
            execution = Execution(threads=threads, between=between, device=method.device)
            folded = fold(base.path, updates, out, step=step, execution=execution, durable=store.is_durable)
    return made(store, version, folded, base)


def fold_sums(
    versions: Versions,
    plan: FoldPlan,
    updates: Mapping[int, StoredUpdate],
    method: Method,
    *,
    threads: int,
    between: Callable[[], None] | None = None,
) -> SumsFolded:
    """Execute a plan of secure sums: open them, and fold them into the next version, which is durable on return.

    Args:
        versions: the versions of the run.
        plan: the plan, with sums.
        updates: the masked updates, by their places in the plan.
        method: the method of the run.
        threads: the number of threads.
        between: called between two tiles; it may raise to interrupt the fold.

    Raises:
        NoSum: no session counts; the error has the reason of each.
        ValueError: the updates cannot be folded.
        DiskFull: the disk has no room for the next version.
        OSError: a file cannot be read or written.
    """
    assert plan.sums is not None
    store, base, version = versions.store, versions.version(plan.base_version), Version(plan.base_version + 1)
    layout, out = base.manifest.layout, store.version_path(version)
    with naming_full_disk(out):
        folded, outcome = fold_masked(
            base.path,
            sessions_of(plan, updates),
            out,
            vector=Vector(layout, plan.sums.encoding),
            step=step_of(plan, layout, method, store),
            execution=Execution(threads=threads, between=between),
            durable=store.is_durable,
        )
    return SumsFolded.of(made(store, version, folded, base), outcome)


def made(store: RunStore, version: Version, folded: Folded, base: VersionFile) -> Digest:
    """Write the manifests of a version and of its slots, whose bytes are durable, and return the version's digest."""
    crash_points.reached("aggregate.after_fold")
    for slot, pieces in folded.slots.items():
        of_slot = VersionManifest.of(pieces, piece_bytes=base.manifest.piece_bytes)
        store.write_manifest(version, of_slot.encode(), slot)
    return exists_from_now_on(store, version, folded.pieces, base)


def exists_from_now_on(store: RunStore, version: Version, pieces: Iterable[Piece], base: VersionFile) -> Digest:
    """Write the manifest of a version whose bytes are durable, which makes it exist, and return its digest."""
    manifest = VersionManifest.of(pieces, model_dtypes=base.manifest.model_dtypes).encode()
    store.write_manifest(version, manifest)
    return digest_of(manifest)


def step_of(plan: FoldPlan, layout: Layout, method: Method, store: RunStore) -> Step:
    """Return the step of a fold whose files are in `store`. Version 0 has no slots: they have their initial values."""
    base, version = plan.base_version, Version(plan.base_version + 1)
    before = {slot: store.version_path(base, slot) for slot in method.slots if base}
    after = {slot: store.version_path(version, slot) for slot in method.slots}
    anchor = None
    if plan.anchor is not None:
        anchor = Anchor(store.version_path(plan.anchor.version), plan.anchor.share)
    return Step(
        plan.optimizer.build(),
        plan.trained(layout),
        method.rule,
        scale=plan.scale,
        num_clients=method.num_clients,
        before=before,
        after=after,
        anchor=anchor,
        place=Place(plan.round_id, version, plan.base_digest, shares=plan.shares),
        private=private_sum_of(plan),
        private_sums=None if plan.sums is None else plan.sums.private,
    )


def private_sum_of(plan: FoldPlan) -> PrivateSum | None:
    """Return the noise of a plan's sums; None: they are not private."""
    if plan.noise is None:
        return None
    earlier = tuple((bytes.fromhex(key), factor) for key, factor in plan.noise.earlier)
    return PrivateSum(plan.noise.deviation, plan.noise.divisor, bytes.fromhex(plan.noise.key), earlier)
