"""From accepted updates to the next version of the global model, off the event loop.

The fold is a function of the accepted set alone, so a crash at any point of it is repaired by doing it again: the same
bits come out, and the file appears under its name whole or not at all.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.aggregation.fold import Weighted, fold
from atoll.aggregation.inspection import inspect
from atoll.aggregation.layout import CONTROL, FLOATS, Layout, Piece
from atoll.aggregation.step import Step
from atoll.aggregation.tensorfile import parse_header, read_buffers
from atoll.protocol import steps
from atoll.protocol.channel import INLINE_BYTES_MAX
from atoll.protocol.manifest import VersionManifest, digest_of, parse_update, parse_version
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.codec import StoreCorrupted, StoredUpdateMeta, decode_meta
from atoll.server.durable import naming_full_disk
from atoll.server.evaluator import Evaluator
from atoll.server.events import Aggregate
from atoll.server.journal import UpdateRow
from atoll.server.method import Method
from atoll.server.store import INCOMING_AGE_MAX_S, RunStore
from atoll.server.threads import on_thread

VERSIONS_CACHED_MAX = 8


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A version of the global model, on disk and ready to be sent."""

    version: Version
    digest: Digest
    path: Path
    pieces: tuple[Piece, ...]
    layout: Layout
    data_start: int
    manifest_bytes: bytes
    model_dtypes: tuple[str, ...]
    small_data: bytes  # of all pieces, when they ride in an invitation; otherwise nothing


class Reducer:
    """The versions of one run: made, found, served, and forgotten."""

    def __init__(
        self,
        folder: Path,
        folding: Executor,
        accepted: Callable[[Sequence[Digest]], dict[Digest, UpdateRow]],
        *,
        method: Method,
        keep_versions: int,
    ) -> None:
        self.store = RunStore(folder)
        self._accepted = accepted  # asked on a thread
        self._folding, self._is_stopping = folding, False
        self._method, self._keep_versions = method, keep_versions
        self._cache: dict[Version, VersionFile] = {}

    def version(self, version: Version) -> VersionFile:
        """A version that is on disk.

        Raises:
            OSError: it is not, or is damaged.
        """
        file = self._cache.get(version)
        if file is None:
            manifest_bytes = self.store.read_manifest(version)
            manifest = parse_version(manifest_bytes)
            path = self.store.version_path(version)
            _, data_start = parse_header(path)
            file = VersionFile(
                version,
                digest_of(manifest_bytes),
                path,
                manifest.pieces,
                manifest.layout,
                data_start,
                manifest_bytes,
                manifest.model_dtypes,
                _small_data(path, data_start, manifest.num_bytes),
            )
            self._cache = {**dict(list(self._cache.items())[1 - VERSIONS_CACHED_MAX :]), version: file}
        return file

    def num_bytes(self, version: Version) -> int:
        """Size of a version's file."""
        return self.version(version).path.stat().st_size

    def known(self, version: Version) -> VersionFile | None:
        """A version, or None when it never was or is no longer kept."""
        try:
            return self.version(version)
        except FileNotFoundError:
            return None

    def by_digest(self, digest: str) -> VersionFile | None:
        """The kept version with this identity."""
        cached = next((v for v in self._cache.values() if v.digest == digest), None)
        if cached is not None:
            return cached
        newest_first = sorted(self.store.versions(), reverse=True)
        found = (v for v in map(self.known, newest_first) if v is not None and v.digest == digest)
        return next(found, None)

    async def write_initial(self, evaluator: Evaluator, seed: int) -> None:
        """Version 0, from the task's own model."""
        pieces = await evaluator.write_initial(self.store.version_path(Version(0)), seed)
        self.store.write_manifest(Version(0), VersionManifest(pieces).encode())

    async def fold(self, effect: Aggregate) -> Digest:
        """The exact weighted mean of the contributions, added to their base: the next version, durable.

        Raises:
            ValueError: the updates cannot be folded.
            DiskFull: there is no room for the next version.
            OSError: a file cannot be read or written.
        """
        steps.reached("aggregate.before_fold")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._folding, self._fold, effect)

    def _fold(self, effect: Aggregate) -> Digest:
        base = self.version(effect.base_version)
        weights = self._method.weights(effect.contributions)
        rows = self._accepted([c.digest for c in effect.contributions])
        metas = {c.digest: decode_meta(rows[c.digest].meta, where=f"update {c.digest}") for c in effect.contributions}
        factors = self._method.factors([_float_norm(meta, base) for meta in metas.values()])
        nova = self._method.normalized(weights, (parse_update(meta.manifest) for meta in metas.values()))
        updates = [
            Weighted(
                self.store.stored_update(c.digest, metas.pop(c.digest), rows.pop(c.digest).data), weight, f, nova_f
            )
            for c, weight, f, nova_f in zip(effect.contributions, weights, factors, nova.factors, strict=True)
        ]
        version = Version(effect.base_version + 1)
        out = self.store.version_path(version)
        with naming_full_disk(out):
            step = self._step(base, version, nova.scale)
            folded = fold(base.path, updates, out, step=step, threads=os.cpu_count() or 1, between=self._between_tiles)
        steps.reached("aggregate.after_fold")
        for slot, pieces in folded.slots.items():
            self.store.write_manifest(version, VersionManifest(pieces).encode(), slot)
        manifest = VersionManifest(folded.pieces, base.model_dtypes).encode()
        self.store.write_manifest(version, manifest)
        return digest_of(manifest)

    def _step(self, base: VersionFile, version: Version, scale: float) -> Step:
        """Version 0 has no slots: there they are as they begin."""
        slots = self._method.slots
        before = {slot: self.store.version_path(base.version, slot) for slot in slots if base.version}
        after = {slot: self.store.version_path(version, slot) for slot in slots}
        buffers = read_buffers(base.path)
        names = (tensor.name for tensor in base.layout if not tensor.name.startswith(CONTROL))
        trained, method = frozenset(name for name in names if name not in buffers), self._method
        return Step(method.optimizer, trained, method.rule, scale, method.num_clients, before, after)

    def publish(self, version: Version) -> None:
        """From now on this is the global model."""
        self.version(version)

    def recover(self, version: Version) -> None:
        """After a crash: the current version must be whole, to the bit, and so must what the optimizer keeps beside it.

        Raises:
            OSError: it is not.
        """
        _check_whole(self.version(version).path, self.version(version).pieces)
        for slot in self._method.slots if version else ():
            manifest = parse_version(self.store.read_manifest(version, slot))
            _check_whole(self.store.version_path(version, slot), manifest.pieces)

    def stop(self) -> None:
        """End a fold that is under way; it can be done again."""
        self._is_stopping = True

    def _between_tiles(self) -> None:
        if self._is_stopping:
            raise InterruptedError("the coordinator stops")
        steps.reached("aggregate.mid_fold")

    async def collect_garbage(
        self, live: Container[Digest], *, pinned_versions: set[Version], current: Version, oldest_base: Version | None
    ) -> None:
        """Delete what no decision can need any more; `live` is asked from another thread.

        A part of an update whose last byte came before `oldest_base` was made is of an older base, and can never
        count; None: no part can.
        """

        def may_go_on(_: Digest, at: float) -> bool:
            return at >= made_at and time.time() - at < INCOMING_AGE_MAX_S

        base = None if oldest_base is None else self.store.version_path(oldest_base)
        made_at = math.inf if base is None else base.stat().st_mtime if base.exists() else 0.0

        collect = partial(
            self.store.collect_garbage,
            live,
            keep_versions=self._keep_versions,
            current=current,
            pinned=pinned_versions,
            keep_incoming=may_go_on,
        )
        await on_thread(None, collect)  # it ends before the process lets go of the state directory


def _check_whole(path: Path, pieces: tuple[Piece, ...]) -> None:
    _, data_start = parse_header(path)
    if wrong := inspect(path, pieces, data_start=data_start).wrong_digests:
        names = ", ".join(repr(piece.tensor) for piece in wrong[:5])
        raise StoreCorrupted(f"{path} is damaged (tensors {names}): put it back from a backup")


def _float_norm(meta: StoredUpdateMeta, base: VersionFile) -> float:
    """Euclidean length of an update's float tensors."""
    floats = {tensor.name for tensor in base.layout if tensor.dtype in FLOATS}
    return math.sqrt(math.fsum(square for name, square in meta.squared_norms.items() if name in floats))


def _small_data(path: Path, start: int, num_bytes: int) -> bytes:
    if num_bytes > INLINE_BYTES_MAX:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)
