"""The versions of one run's global model on disk, by number or by digest, ready to be sent."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.vocabulary import Digest, Version
from atoll.protocol.wire.channel import INLINE_BYTES_MAX
from atoll.server.files.run_store import RunStore
from atoll.tensors.layout import Piece
from atoll.tensors.safetensors_file import parse_header

VERSIONS_CACHED_MAX = 8


@dataclass(frozen=True, slots=True)
class VersionFile:
    """Version of the global model. Its file contains all of its bytes, a range of them, or does not exist here."""

    version: Version
    digest: Digest
    path: Path
    manifest: VersionManifest
    manifest_bytes: bytes
    data_start: int
    """Offset in the file of the version's byte 0; negative when the file begins with a later byte."""
    held: range
    """The version's bytes that the file contains."""
    small_data: bytes
    """All bytes of a version that is small enough for an invitation; otherwise empty."""


class Versions:
    """Versions of one run, whose files are in `store`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._cache: dict[Version, VersionFile] = {}

    def version(self, version: Version) -> VersionFile:
        """Return a version.

        Raises:
            OSError: its manifest is missing or damaged.
        """
        file = self._cache.get(version)
        if file is None:
            file = version_file(self.store, version, self.store.read_manifest(version))
            self.remember(file)
        return file

    def remember(self, file: VersionFile) -> None:
        """Add a version to the cache, for example one that was just written."""
        self._cache = {**dict(list(self._cache.items())[1 - VERSIONS_CACHED_MAX :]), file.version: file}

    def num_bytes(self, version: Version) -> int:
        """Return the size of a version [bytes]."""
        return self.version(version).manifest.num_bytes

    def known(self, version: Version) -> VersionFile | None:
        """Return a version; None: it was never made, or was deleted."""
        try:
            return self.version(version)
        except FileNotFoundError:
            return None

    def by_digest(self, digest: str) -> VersionFile | None:
        """Return the version on disk whose manifest has this digest; None: there is none."""
        cached = next((v for v in self._cache.values() if v.digest == digest), None)
        if cached is not None:
            return cached
        newest_first = sorted(self.store.versions(), reverse=True)
        found = (v for v in map(self.known, newest_first) if v is not None and v.digest == digest)
        return next(found, None)


def version_file(
    store: RunStore, version: Version, manifest_bytes: bytes, owned: Iterable[Piece] | None = None
) -> VersionFile:
    """Return a version with the range of its bytes that a store has.

    Args:
        store: the store with the file, if there is one.
        version: the number of the version.
        manifest_bytes: the manifest of the complete version.
        owned: the consecutive pieces that the file contains; default: all of them.
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
    """Return start and end of consecutive pieces among a version's bytes; (0, 0) for no piece."""
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
