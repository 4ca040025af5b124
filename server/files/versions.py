"""The versions of one run's global model that are on disk: found by number or by identity, ready to be sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.tensors.layout import Piece
from atoll.aggregation.tensors.safetensors_file import parse_header
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.vocabulary import Digest, Version
from atoll.protocol.wire.channel import INLINE_BYTES_MAX
from atoll.server.files.run_store import RunStore

VERSIONS_CACHED_MAX = 8


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A version of the global model. Its file holds all of it, or a run of its bytes, or is not here at all."""

    version: Version
    digest: Digest
    path: Path
    manifest: VersionManifest
    manifest_bytes: bytes
    data_start: int
    """Where in the file the version's first byte would lie: negative, when the file holds a later run of them."""
    held: range
    """The version's bytes that the file holds."""
    small_data: bytes
    """Of all pieces, when they ride in an invitation; otherwise nothing."""


class Versions:
    """The versions of one run, whose files lie in `store`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._cache: dict[Version, VersionFile] = {}

    def version(self, version: Version) -> VersionFile:
        """A version whose manifest is on disk.

        Raises:
            OSError: it is not, or is damaged.
        """
        file = self._cache.get(version)
        if file is None:
            file = version_file(self.store, version, self.store.read_manifest(version))
            self.remember(file)
        return file

    def remember(self, file: VersionFile) -> None:
        """A version that is on disk: who has just written it need not read it."""
        self._cache = {**dict(list(self._cache.items())[1 - VERSIONS_CACHED_MAX :]), file.version: file}

    def num_bytes(self, version: Version) -> int:
        """Size of a version."""
        return self.version(version).manifest.num_bytes

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


def version_file(
    store: RunStore, version: Version, manifest_bytes: bytes, owned: Iterable[Piece] | None = None
) -> VersionFile:
    """What is kept here of a version.

    Args:
        store: where its file lies; without one, nothing is held.
        version: its number.
        manifest_bytes: of the whole version.
        owned: the run of pieces that the file holds; left out: all of them.
    """
    manifest, path = parse_version(manifest_bytes), store.version_path(version)
    begin = end = 0
    if path.exists():
        begin, end = byte_range(manifest, owned)
    _, data_start = parse_header(path) if end > begin else ((), 0)
    small = _read(path, data_start, end) if end - begin == manifest.num_bytes <= INLINE_BYTES_MAX else b""
    digest = digest_of(manifest_bytes)
    return VersionFile(version, digest, path, manifest, manifest_bytes, data_start - begin, range(begin, end), small)


def byte_range(manifest: VersionManifest, owned: Iterable[Piece] | None) -> tuple[int, int]:
    """Where a run of pieces begins and ends among a version's bytes; (0, 0) for no piece."""
    if owned is None:
        return 0, manifest.num_bytes
    run = [(piece.tensor, piece.offsets) for piece in owned]
    begin = position = end = 0
    for piece in manifest.pieces:
        key = (piece.tensor, piece.offsets)
        if run and key == run[0]:
            begin = position
        position += piece.num_bytes
        if run and key == run[-1]:
            end = position
    return begin, end


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(num_bytes)
