"""From accepted updates to the next version of the global model, off the event loop.

The fold is a function of the accepted set alone, so a crash at any point of it is repaired by doing it again: the same
bits come out, and the file appears under its name whole or not at all.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.fold import Weighted, fold
from atoll.aggregation.inspection import inspect
from atoll.aggregation.layout import Layout, Piece
from atoll.aggregation.tensorfile import parse_header
from atoll.aggregation.weights import Share, integer_weights
from atoll.protocol import steps
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.codec import StoreCorrupted
from atoll.server.durable import naming_full_disk
from atoll.server.evaluator import Evaluator
from atoll.server.events import Aggregate
from atoll.server.store import RunStore

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


class Reducer:
    """The versions of one run: made, found, served, and forgotten."""

    def __init__(self, folder: Path, compute: Executor, *, keep_versions: int) -> None:
        self.store = RunStore(folder)
        self._compute = compute
        self._keep_versions = keep_versions
        self._cache: dict[Version, VersionFile] = {}

    def version(self, version: Version) -> VersionFile:
        """A version that is on disk.

        Raises:
            OSError: it is not, or is damaged.
        """
        if version not in self._cache:
            manifest_bytes = self.store.read_manifest(version)
            manifest = parse_version(manifest_bytes)
            path = self.store.version_path(version)
            _, data_start = parse_header(path)
            self._cache[version] = VersionFile(
                version,
                digest_of(manifest_bytes),
                path,
                manifest.pieces,
                manifest.layout,
                data_start,
                manifest_bytes,
                manifest.model_dtypes,
            )
            for old in sorted(self._cache)[:-VERSIONS_CACHED_MAX]:
                del self._cache[old]
        return self._cache[version]

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
        return await loop.run_in_executor(self._compute, self._fold, effect)

    def _fold(self, effect: Aggregate) -> Digest:
        weights = integer_weights([Share(c.num_examples, c.scale) for c in effect.contributions])
        updates = [
            Weighted(self.store.stored_update(c.digest), weight)
            for c, weight in zip(effect.contributions, weights, strict=True)
        ]
        version = Version(effect.base_version + 1)
        base = self.version(effect.base_version)
        out = self.store.version_path(version)
        with naming_full_disk(out):
            pieces = fold(base.path, updates, out, threads=os.cpu_count() or 1, between=_between_blocks)
        steps.reached("aggregate.after_fold")
        manifest = VersionManifest(pieces, base.model_dtypes).encode()
        self.store.write_manifest(version, manifest)
        return digest_of(manifest)

    def publish(self, version: Version) -> None:
        """From now on this is the global model."""
        self.version(version)

    def recover(self, version: Version) -> None:
        """After a crash: the current version must be whole, to the bit.

        Raises:
            OSError: it is not.
        """
        file = self.version(version)
        if wrong := inspect(file.path, file.pieces, data_start=file.data_start).wrong_digests:
            names = ", ".join(repr(piece.tensor) for piece in wrong[:5])
            raise StoreCorrupted(f"{file.path} is damaged (tensors {names}): put it back from a backup")

    async def collect_garbage(
        self, live: Callable[[], set[Digest]], *, pinned_versions: set[Version], current: Version
    ) -> None:
        """Delete what no decision can need any more.

        `live` is asked after the look at what is there: an update that is accepted later has not been seen, and stays.
        """
        loop = asyncio.get_running_loop()
        seen = await loop.run_in_executor(self._compute, self.store.updates)
        await loop.run_in_executor(self._compute, self._collect_garbage, seen, live(), pinned_versions, current)

    def _collect_garbage(self, seen: set[Digest], live: set[Digest], pinned: set[Version], current: Version) -> None:
        self.store.collect_garbage(live, keep_versions=self._keep_versions, current=current, pinned=pinned, seen=seen)


def _between_blocks() -> None:
    steps.reached("aggregate.mid_fold")
