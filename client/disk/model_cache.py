"""Versions of the global model on the agent's disk: fetched in part, reused in part, checked piece by piece.

    <digest>.safetensors   a whole version, every piece checked
    <digest>.part          a version that is being put together: its length is where to go on

A version grows strictly in canonical order. A piece that an older version holds is copied when its turn comes, the
others are appended as they arrive, and each is checked against its SHA-256 before the next one begins. So a restart
needs nothing but the file, and only bytes that are nowhere on this disk travel. Nothing here is synced: what a power
cut spoils is found by its SHA-256 and fetched again.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.aggregation.tensors.layout import Layout, Piece
from atoll.aggregation.tensors.ownership import owned_pieces
from atoll.aggregation.tensors.pieces import cut_layout, piece_bytes_of
from atoll.aggregation.tensors.safetensors_file import TensorFileCorrupted, parse_header
from atoll.aggregation.tensors.safetensors_header import header_bytes
from atoll.protocol import crash_points
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import Digest
from atoll.protocol.wire.bulk_messages import Buffer

logger = logging.getLogger(__name__)

KEEP = 2
"""Versions that are kept: the one in use, and the one that the next most likely resembles."""

BLOCK_BYTES = 2**20


class PieceDamaged(ValueError):
    """A piece is not what the manifest says; it has been cut off again and must be fetched once more."""


@dataclass(frozen=True, slots=True)
class Held:
    """Where some piece's bytes lie."""

    path: Path
    start: int
    num_bytes: int


class PartialVersion:
    """One version on its way in. Call `resume` first, then `append` what `wanted` and `position` ask for."""

    def __init__(
        self, path: Path, pieces: Sequence[Piece], held: Mapping[str, Held], *, layout: Layout | None = None
    ) -> None:
        """Args: its file; its pieces; what is held elsewhere; the layout, when these are all pieces of a version."""
        self._path, self._pieces = path, pieces
        self._held = dict(held)
        self.is_whole = layout is not None
        self._header = b"" if layout is None else header_bytes(layout)
        self.num_bytes, self.data_start = sum(piece.num_bytes for piece in pieces), len(self._header)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by `close`
        self._index = 0  # of the piece that is being filled
        self._begin = self.data_start  # where it begins in the file
        self._filled = 0  # how much of it is there
        self._sha256 = hashlib.sha256()
        self.copied_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether every piece is there, and checked."""
        return self._index == len(self._pieces)

    @property
    def wanted(self) -> list[Piece]:
        """The pieces that must come over the wire, the first of them perhaps in part."""
        left = self._pieces[self._index :]
        begun = left[:1] if self._filled else ()
        return [*begun, *(p for p in left[len(begun) :] if p.num_bytes and p.sha256 not in self._held)]

    @property
    def wants_the_rest(self) -> bool:
        """Whether no piece from here on is held by an older version."""
        return all(piece.sha256 not in self._held for piece in self._pieces[self._index :])

    @property
    def filled_bytes(self) -> int:
        """How much of the first wanted piece is there."""
        return self._filled

    @property
    def data_bytes(self) -> int:
        """How much of the whole version is there."""
        return self._begin + self._filled - self.data_start

    def resume(self) -> None:
        """Check what an earlier attempt has left, and copy what older versions hold, up to the first missing byte."""
        self._file.seek(0)
        if self._file.read(len(self._header)) != self._header:
            self._begin_anew()
        with suppress(PieceDamaged):  # what is wrong has been cut off
            self._close_whole_pieces()
            while not self.is_complete and (block := self._file.read(min(BLOCK_BYTES, self._missing))):
                self._take(block)
        while not self._copy_held_or_drop():
            pass
        self._file.flush()

    def append_all(self, blocks: Sequence[Buffer]) -> None:
        """Take one block after the other; raises as `append`."""
        for block in blocks:
            self.append(block)
            crash_points.reached("agent.downloading")

    def append(self, data: Buffer) -> None:
        """Take the next bytes of the wanted pieces; afterwards they are with the operating system.

        Raises:
            PieceDamaged: a piece is whole and wrong. What was behind it in `data` is dropped, too.
        """
        view = memoryview(data)
        while view:
            assert not self.is_complete, "bytes beyond the end"
            size = min(len(view), self._missing)
            self._file.write(view[:size])
            self._take(view[:size])
            self._copy_held()
            view = view[size:]
        self._file.flush()

    def take_over(self, parts: "Sequence[PartialVersion]") -> None:
        """Become whole from complete parts, each checked, one after the other."""
        assert all(part.is_complete for part in parts)
        self._begin_anew()
        for part in parts:
            part._file.seek(0)
            shutil.copyfileobj(part._file, self._file, BLOCK_BYTES)
        self._file.flush()
        self._index, self._begin, self._filled = len(self._pieces), self.data_start + self.num_bytes, 0

    def remove(self) -> None:
        """Delete the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which stays as it is."""
        self._file.close()

    @property
    def _missing(self) -> int:
        """Bytes that the piece that is being filled lacks."""
        return self._pieces[self._index].num_bytes - self._filled

    def _take(self, block: "bytes | memoryview") -> None:
        """Count and hash bytes that are in the file now."""
        self._sha256.update(block)
        self._filled += len(block)
        self._close_whole_pieces()

    def _close_whole_pieces(self) -> None:
        while not self.is_complete and self._filled == (piece := self._pieces[self._index]).num_bytes:
            if self._sha256.hexdigest() != piece.sha256:
                self._cut_off()
                raise PieceDamaged(f"tensor {piece.tensor!r}: {piece.num_bytes} bytes do not have its SHA-256")
            self._index += 1
            self._begin += self._filled
            self._filled, self._sha256 = 0, hashlib.sha256()

    def _begin_anew(self) -> None:
        """Let the file hold its header, and nothing else."""
        if self._file.seek(0, os.SEEK_END):  # ext4 writes all of a file to the disk at its close once it was cut to 0
            self._file.seek(0)
            self._file.truncate()
        self._file.write(self._header)

    def _cut_off(self) -> None:
        """Forget the piece that is being filled, and everything behind it."""
        self._file.seek(self._begin)
        self._file.truncate()
        self._filled, self._sha256 = 0, hashlib.sha256()

    def _copy_held(self) -> None:
        """Copy pieces as long as the next one is held by an older version."""
        while not self.is_complete and not self._filled and (held := self._held.get(self._pieces[self._index].sha256)):
            del self._held[self._pieces[self._index].sha256]  # if it proves damaged there, it is wanted here
            self._copy(held)
            self._held.setdefault(self._pieces[self._index - 1].sha256, held)

    def _copy_held_or_drop(self) -> bool:
        try:
            self._copy_held()
        except PieceDamaged:
            return False  # the older version's copy is spoilt, and forgotten
        return True

    def _copy(self, held: Held) -> None:
        with held.path.open("rb") as source:
            source.seek(held.start)
            left = held.num_bytes
            while left:
                block = source.read(min(BLOCK_BYTES, left))
                if not block:
                    self._cut_off()
                    raise PieceDamaged(f"{held.path} has lost its end")
                left -= len(block)
                self._file.write(block)
                self._take(block)
        self.copied_bytes += held.num_bytes


class ModelCache:
    """The versions in one folder, the most recently used last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._versions: dict[Digest, list[tuple[str, Held]]] | None = None
        self._parts: set[Digest] = set()
        self._leaving: list[Path] = []

    @property
    def is_scanned(self) -> bool:
        """Whether the files of an earlier process have been looked at: it takes reading all of them."""
        return self._versions is not None

    def scan(self) -> None:
        """Check the versions that an earlier process has left."""
        versions = {}
        for path in sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns):
            try:
                versions[Digest(path.stem)] = _hashed(path)
            except TensorFileCorrupted as error:
                logger.warning("%s is damaged, and is removed: %s", path, error)
                path.unlink()
        self._versions = versions
        self._parts = {Digest(path.stem) for path in self._folder.glob("*.part")}

    def path(self, digest: Digest) -> Path:
        """Where a version lies when it is whole."""
        return self._folder / f"{digest}.safetensors"

    def find(self, digest: Digest, manifest: VersionManifest) -> Path | None:
        """The whole version, when it is here."""
        assert self._versions is not None, "scan comes first"
        pieces = self._versions.get(digest)
        if pieces is None or [sha256 for sha256, _ in pieces] != [piece.sha256 for piece in manifest.pieces]:
            return None
        self._versions[digest] = self._versions.pop(digest)
        return self.path(digest)

    def begin(self, digest: Digest, manifest: VersionManifest, *, reuse: bool = True) -> PartialVersion:
        """Begin to put a version together, or go on with it; `reuse`: copy the pieces that older versions hold."""
        assert self._versions is not None, "scan comes first"
        versions = self._versions.values() if reuse else ()
        held = {sha256: where for pieces in versions for sha256, where in pieces if where.num_bytes}
        self._parts.add(digest)
        self._stays(self._part(digest))
        return PartialVersion(self._part(digest), manifest.pieces, held, layout=manifest.layout)

    def begin_parts(self, digest: Digest, manifest: VersionManifest, num_ranks: int) -> list[PartialVersion]:
        """As `begin`, in one file for what each aggregation rank has of the version: they can come at once."""
        assert self._versions is not None, "scan comes first"
        held = {sha256: where for of_one in self._versions.values() for sha256, where in of_one if where.num_bytes}
        parts = []
        for rank in range(num_ranks):
            name = Digest(f"{digest}.{rank}of{num_ranks}")
            self._parts.add(name)
            self._stays(self._part(name))
            parts.append(PartialVersion(self._part(name), owned_pieces(manifest.pieces, rank, num_ranks), held))
        return parts

    def join(self, digest: Digest, manifest: VersionManifest, parts: Sequence[PartialVersion]) -> Path:
        """Let a version whose parts are complete appear."""
        whole = PartialVersion(self._part(digest), manifest.pieces, {}, layout=manifest.layout)
        whole.take_over(parts)
        path = self.finish(digest, manifest, whole)
        for part in parts:
            part.remove()
        return path

    def finish(self, digest: Digest, manifest: VersionManifest, partial: PartialVersion) -> Path:
        """Let a complete version appear. The oldest ones are forgotten; `tidy` deletes them."""
        assert self._versions is not None
        assert partial.is_complete
        partial.close()
        path = self.path(digest)
        os.replace(self._part(digest), path)
        self._stays(path)
        self._versions.pop(digest, None)
        start, pieces = partial.data_start, []
        for piece in manifest.pieces:
            pieces.append((piece.sha256, Held(path, start, piece.num_bytes)))
            start += piece.num_bytes
        self._versions[digest] = pieces
        for old in list(self._versions)[:-KEEP]:
            del self._versions[old]
            self._leaving.append(self.path(old))
        self._leaving += map(self._part, self._parts - {digest})
        self._parts.clear()
        return path

    def _stays(self, path: Path) -> None:
        """What was forgotten, and not deleted yet, is wanted again."""
        if path in self._leaving:
            self._leaving.remove(path)

    def tidy(self) -> None:
        """Delete what was forgotten, which takes long for large files. While it does, no version may be begun."""
        while self._leaving:
            path = self._leaving.pop()
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # the next process finds it, and forgets it once more
                logger.warning("%s cannot be deleted: %s", path, error)

    def _part(self, digest: Digest) -> Path:
        return self._folder / f"{digest}.part"


def _hashed(path: Path) -> list[tuple[str, Held]]:
    """Every piece of a whole version's file."""
    layout, start = parse_header(path)
    pieces = []
    with path.open("rb") as file:
        file.seek(start)
        for piece in cut_layout(layout, piece_bytes_of(layout)):
            digest, left = hashlib.sha256(), piece.num_bytes
            while left:
                block = file.read(min(BLOCK_BYTES, left))
                if not block:
                    raise TensorFileCorrupted(f"{path}: ends too early")
                digest.update(block)
                left -= len(block)
            pieces.append((digest.hexdigest(), Held(path, start, piece.num_bytes)))
            start += piece.num_bytes
    return pieces
