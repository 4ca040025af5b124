"""The files of each run at an aggregation rank: the updates of its clients and its shard of each version."""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from atoll.ground.durable import naming_full_disk
from atoll.protocol import services as rpc
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import RunStore
from atoll.server.files.versions import VersionFile, version_file
from atoll.server.ranks.fetch import fetch_into, fetch_manifest
from atoll.tensors.layout import Piece
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.safetensors_file import TensorFileCorrupted, TensorFileWriter, parse_header
from atoll.tensors.updates.inspection import inspect

VERSIONS_KNOWN_MAX = 16


class RankRun:
    """One run at one rank. A version's shard is checked, every byte, before its first use."""

    def __init__(self, folder: Path, run_id: RunId, rank: int, num_ranks: int) -> None:
        self.store = RunStore(folder, has_files_only=True)  # the coordinator's journal contains no bytes of this rank
        self._run_id, self._rank, self._num_ranks = run_id, rank, num_ranks
        self.shard_bytes = 0
        """Size of this rank's shard of the last requested version [bytes]."""
        self._known: dict[Digest, VersionFile] = {}
        self._made: dict[Version, tuple[str, ...]] = {}  # the digests of the shard that this process folded last
        self._finding: dict[Digest, asyncio.Task[VersionFile]] = {}
        self._one_at_a_time = asyncio.Lock()

    def known(self, digest: Digest) -> VersionFile | None:
        """Return a version that has been checked before."""
        return self._known.get(digest)

    async def find(self, stub: rpc.Stub, digest: Digest) -> VersionFile:
        """Return a committed version, of which this rank has its shard.

        The check of a large one takes a while; if its caller is cancelled it continues for the next caller.

        Raises:
            NotFetched: the coordinator cannot be asked now, or knows no such version.
            StoreCorrupted: the shard is damaged, or gone.
            DiskFull: the disk has no room for it.
        """
        if (finding := self._finding.get(digest)) is None:
            finding = self._finding[digest] = asyncio.ensure_future(self._found(stub, digest))
            finding.add_done_callback(lambda _: self._finding.pop(digest))
        return await asyncio.shield(finding)

    async def _found(self, stub: rpc.Stub, digest: Digest) -> VersionFile:
        async with self._one_at_a_time:
            known = await self._find(stub, digest)
            newest = list(self._known.items())[1 - VERSIONS_KNOWN_MAX :]
            self._known = {**dict(newest), digest: known}
        return known

    async def _find(self, stub: rpc.Stub, digest: Digest) -> VersionFile:
        version, manifest, encoded = await fetch_manifest(stub, self._run_id, digest)
        owned = owned_pieces(manifest.pieces, self._rank, self._num_ranks)
        self.shard_bytes = sum(piece.num_bytes for piece in owned)
        if not await on_thread(None, self._is_sound, version, owned):
            if version:
                path = self.store.version_path(version)
                raise StoreCorrupted(f"{path} is damaged or gone: put it back from a backup")
            with naming_full_disk(self.store.version_path(version)):
                await self._fetch(stub, digest, manifest, owned)

        def store_manifest() -> VersionFile:
            with naming_full_disk(self.store.version_path(version)):
                self.store.write_manifest(version, encoded)
            return version_file(self.store, version, encoded, owned)

        return await on_thread(None, store_manifest)

    async def _fetch(self, stub: rpc.Stub, digest: Digest, manifest: VersionManifest, owned: Iterable[Piece]) -> None:
        """Fetch this rank's shard of version 0, which the coordinator makes from the task."""
        pieces = tuple(owned)
        with TensorFileWriter(self.store.version_path(Version(0)), manifest.layout, pieces=pieces) as writer:
            await fetch_into(writer, stub.Download, self._run_id, digest, pieces)
            await on_thread(None, writer.finish)

    def _is_sound(self, version: Version, owned: tuple[Piece, ...]) -> bool:
        """Compare the shard's digests: known ones for a shard made by this process, else computed ones."""
        path = self.store.version_path(version)
        if self._made.get(version) == tuple(piece.sha256 for piece in owned):
            return True
        with suppress(FileNotFoundError, TensorFileCorrupted):
            return not inspect(path, owned, data_start=parse_header(path)[1]).wrong_digests
        return False

    def made(self, version: Version, pieces: Iterable[Piece], slots: dict[str, tuple[Piece, ...]]) -> None:
        """Store the digests of a shard, and of its optimizer slots, written by a fold of this process."""
        self._made = {version: tuple(piece.sha256 for piece in pieces)}
        for slot, of_slot in slots.items():
            digests = json.dumps([piece.sha256 for piece in of_slot]).encode()
            self.store.write_manifest(version, digests, slot)

    def check_slots(self, version: Version, slots: dict[str, tuple[Piece, ...]]) -> None:
        """Check the shards of the optimizer slots beside a version made by an earlier process.

        Raises:
            StoreCorrupted: a shard is damaged, or gone.
        """
        if version in self._made:
            return
        for slot, pieces in slots.items():
            path = self.store.version_path(version, slot)
            try:
                digests = json.loads(self.store.read_manifest(version, slot))
                noted = [replace(piece, sha256=sha256) for piece, sha256 in zip(pieces, digests, strict=True)]
                wrong = inspect(path, noted, data_start=parse_header(path)[1]).wrong_digests
            except (FileNotFoundError, ValueError, TensorFileCorrupted) as error:
                raise StoreCorrupted(f"{path} is damaged or gone: {error}") from error
            if wrong:
                raise StoreCorrupted(f"{path} is damaged (tensor {wrong[0].tensor!r}): put it back from a backup")
