"""The versions of the global model on the agent's disk: partly downloaded, partly reused, checked piece by piece.

    <digest>.safetensors   a whole version, every piece checked
    <digest>.part          an incomplete version; its length is the position at which it resumes

A version is written strictly in canonical order: a piece that an older version has is copied, any other is appended as
it arrives, and each is checked against its SHA-256 before the next. So a restart needs only the file, and only bytes
that this disk lacks are downloaded. Nothing here is synced: a piece that a power failure has damaged is found by its
SHA-256 and downloaded again.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.file_digest import sha256_of_next
from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import Digest
from atoll.protocol.wire.bulk_messages import Buffer
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.pieces import cut_layout, piece_bytes_of
from atoll.tensors.safetensors_file import TensorFileCorrupted, parse_header
from atoll.tensors.safetensors_header import header_bytes

logger = logging.getLogger(__name__)

KEEP = 2
"""Number of versions to keep: the one in use, and its predecessor, which the next one most likely resembles."""

BLOCK_BYTES = 2**20


class PieceDamaged(ValueError):
    """Error: a piece does not match its SHA-256. The file was truncated before it, and it must be fetched again."""


@dataclass(frozen=True, slots=True)
class PieceLocation:
    """The location of a piece's bytes on disk."""

    path: Path
    start: int
    num_bytes: int


class PartialVersion:
    """An incomplete version. Call `resume` first, then `append` the bytes of the `wanted` pieces.

    Args:
        path: its file.
        pieces: the pieces, in canonical order.
        available: the locations of pieces in older versions, by SHA-256.
        layout: the layout of the version, when these are all of its pieces; None: they are one rank's part of it.
    """

    def __init__(
        self,
        path: Path,
        pieces: Sequence[Piece],
        available: Mapping[str, PieceLocation],
        *,
        layout: Layout | None = None,
    ) -> None:
        self._path, self._pieces = path, pieces
        self._available = dict(available)
        self.is_whole = layout is not None
        self._header = b"" if layout is None else header_bytes(layout)
        self.num_bytes, self.data_start = sum(piece.num_bytes for piece in pieces), len(self._header)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by `close`
        self._index = 0  # of the piece that is being filled
        self._begin = self.data_start  # its first byte in the file
        self._filled = 0  # bytes of it already in the file
        self._sha256 = hashlib.sha256()
        self.copied_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Return whether every piece is there and checked."""
        return self._index == len(self._pieces)

    @property
    def wanted(self) -> list[Piece]:
        """The pieces that no older version has, in canonical order; the first one may be partly present."""
        left = self._pieces[self._index :]
        begun = left[:1] if self._filled else ()
        return [*begun, *(p for p in left[len(begun) :] if p.num_bytes and p.sha256 not in self._available)]

    @property
    def wants_the_rest(self) -> bool:
        """Return whether no older version has any of the remaining pieces."""
        return all(piece.sha256 not in self._available for piece in self._pieces[self._index :])

    @property
    def filled_bytes(self) -> int:
        """Size of the present part of the first wanted piece [bytes]."""
        return self._filled

    @property
    def data_bytes(self) -> int:
        """Size of the present part of the version [bytes]."""
        return self._begin + self._filled - self.data_start

    def resume(self) -> None:
        """Check the bytes of an earlier attempt, and copy pieces from older versions up to the first missing byte."""
        self._file.seek(0)
        if self._file.read(len(self._header)) != self._header:
            self._begin_anew()
        with suppress(PieceDamaged):  # the file was truncated before it
            self._close_whole_pieces()
            while not self.is_complete and (block := self._file.read(min(BLOCK_BYTES, self._missing))):
                self._take(block)
        while not self._copy_available_or_drop():
            pass
        self._file.flush()

    def append_all(self, blocks: Sequence[Buffer]) -> None:
        """Append one block after the other; raises the errors of `append`."""
        for block in blocks:
            self.append(block)
            crash_points.reached("agent.downloading")

    def append(self, data: Buffer) -> None:
        """Append the next bytes of the wanted pieces; on return the operating system has them.

        Raises:
            PieceDamaged: a complete piece is wrong. It is dropped, and so are the later bytes of `data`.
        """
        view = memoryview(data)
        while view:
            assert not self.is_complete, "bytes beyond the end"
            size = min(len(view), self._missing)
            self._file.write(view[:size])
            self._take(view[:size])
            self._copy_available()
            view = view[size:]
        self._file.flush()

    def take_over(self, parts: "Sequence[PartialVersion]") -> None:
        """Assemble the version from complete, checked parts, in their order."""
        assert all(part.is_complete for part in parts)
        self._begin_anew()
        for part in parts:
            part._file.seek(0)
            shutil.copyfileobj(part._file, self._file, BLOCK_BYTES)
        self._file.flush()
        self._index, self._begin, self._filled = len(self._pieces), self.data_start + self.num_bytes, 0

    def remove(self) -> None:
        """Delete the file of the incomplete version."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file of the incomplete version without deleting it."""
        self._file.close()

    @property
    def _missing(self) -> int:
        """Number of bytes that the current piece lacks."""
        return self._pieces[self._index].num_bytes - self._filled

    def _take(self, block: "bytes | memoryview") -> None:
        """Count and hash bytes that were just read from the file or written to it."""
        self._sha256.update(block)
        self._filled += len(block)
        self._close_whole_pieces()

    def _close_whole_pieces(self) -> None:
        while not self.is_complete and self._filled == (piece := self._pieces[self._index]).num_bytes:
            if self._sha256.hexdigest() != piece.sha256:
                self._cut_off()
                raise PieceDamaged(
                    f"tensor {piece.tensor!r}: "
                    f"{count_of(piece.num_bytes, 'byte does', 'bytes do')} not have its SHA-256"
                )
            self._index += 1
            self._begin += self._filled
            self._filled, self._sha256 = 0, hashlib.sha256()

    def _begin_anew(self) -> None:
        """Truncate the file to its header."""
        if self._file.seek(0, os.SEEK_END):  # ext4 flushes a whole file on close if it was truncated to 0
            self._file.seek(0)
            self._file.truncate()
        self._file.write(self._header)

    def _cut_off(self) -> None:
        """Truncate the file before the current piece."""
        self._file.seek(self._begin)
        self._file.truncate()
        self._filled, self._sha256 = 0, hashlib.sha256()

    def _copy_available(self) -> None:
        """Copy pieces while an older version has the next one."""
        while not self.is_complete and not self._filled:
            sha256 = self._pieces[self._index].sha256
            if (location := self._available.get(sha256)) is None:
                return
            del self._available[sha256]  # a damaged copy makes the piece a wanted one
            self._copy(location)
            self._available.setdefault(sha256, location)

    def _copy_available_or_drop(self) -> bool:
        """Copy the available pieces; return False if one was damaged, which is then no longer available."""
        try:
            self._copy_available()
        except PieceDamaged:
            return False
        return True

    def _copy(self, location: PieceLocation) -> None:
        with location.path.open("rb") as source:
            source.seek(location.start)
            left = location.num_bytes
            while left:
                block = source.read(min(BLOCK_BYTES, left))
                if not block:
                    self._cut_off()
                    raise PieceDamaged(f"{location.path} ends before byte {location.start + location.num_bytes}")
                left -= len(block)
                self._file.write(block)
                self._take(block)
        self.copied_bytes += location.num_bytes


class ModelCache:
    """Cache of model versions in one folder, ordered by last use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[Digest, list[tuple[str, PieceLocation]]] | None = None
        self._parts: set[Digest] = set()
        self._to_delete: list[Path] = []

    @property
    def is_scanned(self) -> bool:
        """Whether the files of an earlier process have been checked, which reads all of them."""
        return self._versions is not None

    def scan(self) -> None:
        """Check the versions of an earlier process, and remove damaged ones."""
        versions = {}
        for path in sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns):
            try:
                versions[Digest(path.stem)] = _hashed(path)
            except TensorFileCorrupted as error:
                logger.warning("%s is damaged and is removed: %s", path, error)
                path.unlink()
        self._versions = versions
        self._parts = {Digest(path.stem) for path in self._folder.glob("*.part")}

    def path(self, digest: Digest) -> Path:
        """Return the path that a version has once it is complete."""
        return self._folder / f"{digest}.safetensors"

    def find(self, digest: Digest, manifest: VersionManifest) -> Path | None:
        """Return the path of a complete version and mark it as the most recently used; None: it is not here."""
        assert self._versions is not None, "scan comes first"
        pieces = self._versions.get(digest)
        if pieces is None or [sha256 for sha256, _ in pieces] != [piece.sha256 for piece in manifest.pieces]:
            return None
        self._versions[digest] = self._versions.pop(digest)
        return self.path(digest)

    def begin(self, digest: Digest, manifest: VersionManifest, *, reuse: bool = True) -> PartialVersion:
        """Begin or resume a version.

        Args:
            digest: the digest of the version's manifest.
            manifest: lists its pieces.
            reuse: copy the pieces that older versions have.
        """
        available = self._available() if reuse else {}
        self._parts.add(digest)
        self._keep(self._part(digest))
        return PartialVersion(self._part(digest), manifest.pieces, available, layout=manifest.layout)

    def begin_parts(self, digest: Digest, manifest: VersionManifest, num_ranks: int) -> list[PartialVersion]:
        """Begin or resume a version in one file for each aggregation rank's part, so that they arrive in parallel."""
        available = self._available()
        parts = []
        for rank in range(num_ranks):
            name = Digest(f"{digest}.{rank}of{num_ranks}")
            self._parts.add(name)
            self._keep(self._part(name))
            parts.append(PartialVersion(self._part(name), owned_pieces(manifest.pieces, rank, num_ranks), available))
        return parts

    def _available(self) -> dict[str, PieceLocation]:
        """Return the locations of the pieces of all whole versions, by SHA-256."""
        assert self._versions is not None, "scan comes first"
        versions = self._versions.values()
        return {sha256: location for pieces in versions for sha256, location in pieces if location.num_bytes}

    def join(self, digest: Digest, manifest: VersionManifest, parts: Sequence[PartialVersion]) -> Path:
        """Join complete parts into a version, and return its path."""
        whole = PartialVersion(self._part(digest), manifest.pieces, {}, layout=manifest.layout)
        whole.take_over(parts)
        path = self.finish(digest, manifest, whole)
        for part in parts:
            part.remove()
        return path

    def finish(self, digest: Digest, manifest: VersionManifest, partial: PartialVersion) -> Path:
        """Turn a finished download into a cached version, and return its path; `tidy` deletes the older ones."""
        assert self._versions is not None
        assert partial.is_complete
        partial.close()
        path = self.path(digest)
        os.replace(self._part(digest), path)
        self._keep(path)
        self._versions.pop(digest, None)
        start, pieces = partial.data_start, []
        for piece in manifest.pieces:
            pieces.append((piece.sha256, PieceLocation(path, start, piece.num_bytes)))
            start += piece.num_bytes
        self._versions[digest] = pieces
        for old in list(self._versions)[:-KEEP]:
            del self._versions[old]
            self._to_delete.append(self.path(old))
        self._to_delete += map(self._part, self._parts - {digest})
        self._parts.clear()
        return path

    def _keep(self, path: Path) -> None:
        """Exempt a file from deletion: it is in use again."""
        if path in self._to_delete:
            self._to_delete.remove(path)

    def tidy(self) -> None:
        """Delete the files of older versions, which takes long for large ones; begin no version meanwhile."""
        while self._to_delete:
            path = self._to_delete.pop()
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the next process will find the file and try again
                logger.warning("%s cannot be deleted: %s", path, error)

    def _part(self, digest: Digest) -> Path:
        return self._folder / f"{digest}.part"


def _hashed(path: Path) -> list[tuple[str, PieceLocation]]:
    """Return the SHA-256 and the location of every piece in a cached version's file."""
    layout, start = parse_header(path)
    pieces = []
    with path.open("rb") as file:
        file.seek(start)
        for piece in cut_layout(layout, piece_bytes_of(layout)):
            try:
                digest = sha256_of_next(file, piece.num_bytes)
            except EOFError as error:
                raise TensorFileCorrupted(f"{path}: {error}") from error
            pieces.append((digest, PieceLocation(path, start, piece.num_bytes)))
            start += piece.num_bytes
    return pieces
